"""apply and remove: what stands before a model's own classes, and what it does there."""
