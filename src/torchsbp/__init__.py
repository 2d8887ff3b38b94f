"""Stochastic backpropagation: the forward pass runs on every position, the backward pass on a sampled subset."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ._public import (
        SBPConfig,
        apply,
        check,
        estimate,
        kept,
        measure,
        plan,
        register,
        remove,
        sbp,
        sbp_frames,
        schedules,
        set_sizes,
        set_step,
    )

__all__ = [
    "SBPConfig", "apply", "check", "estimate", "kept", "measure", "plan", "register", "remove", "sbp", "sbp_frames",
    "schedules", "set_sizes", "set_step",
]  # fmt: skip
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """Import the public names, and torch with them, when the first is used: ``torchsbp --help`` needs neither."""
    if not name.startswith("_"):
        public = import_module("._public", __name__)
        if name in __all__:
            globals()[name] = getattr(public, name)
        if name in globals():  # or a subpackage, which the import has loaded
            return globals()[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
