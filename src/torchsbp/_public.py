"""The public names of ``torchsbp``, imported when the first of them is used."""

from .adapters import register
from .config import SBPConfig
from .memory.estimate import estimate
from .memory.measure import measure
from .memory.plan import plan
from .ops.wrap import sbp
from .patching.apply import apply, kept, remove, set_sizes, set_step
from .patching.check import check
from .sampling import schedules
from .sampling.frames import sbp_frames

__all__ = [
    "SBPConfig", "apply", "check", "estimate", "kept", "measure", "plan", "register", "remove", "sbp", "sbp_frames",
    "schedules", "set_sizes", "set_step",
]  # fmt: skip
