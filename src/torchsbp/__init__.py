"""Stochastic backpropagation: the forward pass runs on every position, the backward pass on a sampled subset."""

from .config import SBPConfig
from .frames import sbp_frames
from .ops.wrap import sbp
from .patch import apply, kept, remove, set_step

__all__ = ["SBPConfig", "apply", "kept", "remove", "sbp", "sbp_frames", "set_step"]
__version__ = "0.1.0"
