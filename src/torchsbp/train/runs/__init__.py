"""What a run leaves: checkpoints, metrics, weights."""
