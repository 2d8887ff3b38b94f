"""Patching: ``apply`` puts a mixin before the classes of a model's modules; strategies say what it does in training."""
