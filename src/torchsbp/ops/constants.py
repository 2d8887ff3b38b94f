"""constant: tensors that follow from shapes alone, made once for a device and kept.

On a GPU it takes the CPU longer to launch the small kernels that draw a mask than they run.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode

from .compiling import compiling

Made = TypeVar("Made")
KEPT = 128
"""of every function, the last ones that were made"""
_held: list[Any] | None = None


def constant(make: Callable[..., Made]) -> Callable[..., Made]:
    """The function, of arguments that can be hashed and a device; run once for them, but not for a compiler, a
    simulation or a CUDA graph of the user's, which may outlive what is kept here."""
    known: dict[tuple[Any, ...], Made] = {}

    @wraps(make)
    def made(*args: Any) -> Made:
        if compiling() or _get_current_dispatch_mode() is not None:
            return make(*args)
        captured = args[-1].type == "cuda" and torch.cuda.is_current_stream_capturing()
        if captured and (_held is None or args not in known):
            return make(*args)
        if args not in known:
            known[args] = make(*args)
            if len(known) > KEPT:
                del known[next(iter(known))]
        if _held is not None:
            _held.append(known[args])
        return known[args]

    return made


def known(make: Callable[..., Made]) -> Callable[..., Made]:
    """``constant``, of arguments that are numbers also to a compiler: it runs the function when it reads the call, and
    holds what that makes."""
    made = constant(make)
    setattr(made, "_dynamo_marked_constant", True)  # noqa: B010
    return made


@contextmanager
def holding() -> Iterator[list[Any]]:
    """Has what was handed out inside: a graph that reads it must hold it."""
    global _held
    before, _held = _held, []
    try:
        yield _held
    finally:
        _held = before


@constant
def range_of(n: int, device: torch.device) -> Tensor:
    """0 … n − 1."""
    return torch.arange(n, device=device)
