"""Detectors and what they need: backbone and pyramid, proposals, stages of heads, batches, evaluation, drawing."""
