"""Which positions are kept: samplers, ratios over depth and training, windows, the masks of a model, frames."""
