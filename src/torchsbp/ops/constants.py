"""constant: tensors that follow from shapes alone, made once for a device and kept.

On a GPU it takes the CPU longer to launch the small kernels that draw a mask than they run.
"""

from collections.abc import Callable
from functools import lru_cache, wraps
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode

Made = TypeVar("Made")


def constant(make: Callable[..., Made]) -> Callable[..., Made]:
    """The function, of arguments that can be hashed and a device; run once for them, but not for a compiler or a
    simulation."""
    kept = lru_cache(maxsize=128)(make)

    @wraps(make)
    def made(*args: Any) -> Made:
        if torch.compiler.is_compiling() or _get_current_dispatch_mode() is not None:
            return make(*args)
        return kept(*args)

    return made


@constant
def range_of(n: int, device: torch.device) -> Tensor:
    """0 … n − 1."""
    return torch.arange(n, device=device)
