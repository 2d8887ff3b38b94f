"""Callbacks for training libraries. Each module needs its library; nothing here is imported by torchsbp itself."""
