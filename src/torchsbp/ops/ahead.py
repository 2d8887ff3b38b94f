"""build_ahead: builds Triton kernels of a compiled step on another thread, while the step is still being traced.

Otherwise Triton builds a kernel, and with a C compiler its launcher, when it is first launched: one after the other,
after all else is compiled, whereas Inductor builds its own kernels in parallel.
"""

from collections.abc import Hashable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

import torch

_THREAD = ThreadPoolExecutor(1, "torchsbp kernels")
_BUILDS: dict[Hashable, Future[Any]] = {}


def build_ahead(kind: Hashable, function: Any, device: int, arguments: Sequence[Any], options: dict[str, Any]) -> None:
    """Begin to build a kernel, once for each kind of arguments; a tensor is given by its dtype."""
    if kind not in _BUILDS:
        _BUILDS[kind] = _THREAD.submit(build, function, device, arguments, options)


def build(function: Any, device: int, arguments: Sequence[Any], options: dict[str, Any]) -> Any:
    """Build the kernel and its launcher, which Triton keeps."""
    with torch.cuda.device(device):
        return function.warmup(*arguments, grid=(1,), **options).run


def wait_for_builds() -> None:
    """Wait for all builds. A kernel whose build failed fails again when it is launched."""
    wait(_BUILDS.values())
