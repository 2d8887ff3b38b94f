"""build_ahead: the kernels of a compiled step are built on another thread, while its compiler reads on.

Triton builds a kernel when it is launched first, and with a C compiler what launches it: one after the other, behind
everything else, while the compiler's own kernels were built beside it.
"""

from collections.abc import Hashable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

import torch

_THREAD = ThreadPoolExecutor(1, "torchsbp kernels")
_BUILDS: dict[Hashable, Future[Any]] = {}


def build_ahead(kind: Hashable, function: Any, device: int, arguments: Sequence[Any], options: dict[str, Any]) -> None:
    """Begin to build a kernel for that kind of arguments, unless that was begun before; tensors are told by their
    precision."""
    if kind not in _BUILDS:
        _BUILDS[kind] = _THREAD.submit(build, function, device, arguments, options)


def build(function: Any, device: int, arguments: Sequence[Any], options: dict[str, Any]) -> Any:
    """Triton keeps it, with what launches it."""
    with torch.cuda.device(device):
        return function.warmup(*arguments, grid=(1,), **options).run


def wait_for_builds() -> None:
    """What has failed fails again where it is launched."""
    wait(_BUILDS.values())
