"""``constant``: a cache of tensors that follow from shapes alone, made once per device.

On a GPU, the CPU takes longer to launch the small kernels that draw a mask than they take to run.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode

from .compiling import compiling, constant_for_dynamo

Made = TypeVar("Made")
KEPT = 128
"""Results kept of every function; the oldest is dropped first."""
_held: list[Any] | None = None


def constant(make: Callable[..., Made]) -> Callable[..., Made]:
    """Cache a function of hashable arguments, the last of which is a device.

    The function runs anew while compiling, under a dispatch mode (a simulation), and in a CUDA graph of the user's,
    which may outlive the cache. Graphs captured inside ``holding`` read what the cache has.
    """
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
    """``constant`` for arguments that are plain numbers in compiled code too."""
    return constant_for_dynamo(constant(make))


@contextmanager
def holding() -> Iterator[list[Any]]:
    """Yield a list of the constants handed out inside. A CUDA graph that reads them must keep the list alive."""
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
