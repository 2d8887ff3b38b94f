"""Studies of the method: gradient similarity and norms, agreement, sweeps. Over the public API alone."""
