"""Training: one loop for every task. Only its commands import it; it needs the extra ``torchsbp[train]``."""
