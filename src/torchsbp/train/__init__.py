"""Training: one loop for every task. Imported by its commands only; needs the extra ``torchsbp[train]``."""
