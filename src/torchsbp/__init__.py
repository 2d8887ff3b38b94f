"""Stochastic backpropagation: the forward pass runs on every position, the backward pass on a sampled subset."""

from .adapters import register
from .checking import check
from .config import SBPConfig
from .frames import sbp_frames
from .memory import estimate, measure, plan
from .ops.wrap import sbp
from .patch import apply, kept, remove, set_step

__all__ = [
    "SBPConfig", "apply", "check", "estimate", "kept", "measure", "plan", "register", "remove", "sbp", "sbp_frames",
    "set_step",
]  # fmt: skip
__version__ = "0.1.0"
