"""launch: a kernel of ``kernels.py``, ``row_kernels.py`` or ``window_kernels.py``, bound once for a kind of arguments.

Triton binds, specialises and looks up its kernel in every launch, asks the driver about every tensor, and prepares what
profilers might want: 20 to 80 µs of the CPU's time on an H200's machine, more than many of these kernels run. One that
is compiled already for such arguments goes to the driver without any of that.

In a compiled step a launch is an operator. The compiler could be given the kernel itself, but then it analyses what the
kernel writes to, and translates it, for every launch anew: half of the time that it takes for a ViT.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, reduce
from hashlib import sha256
from operator import itemgetter, or_
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .compiling import compiling, no_data

WRITTEN = {
    "cotangent": {"half", "scaled", "sums"},
    "normalise": {"middle", "y", "y_kept", "mean", "rstd"},
    "activation": {"dg", "g", "sums"},
    "gated_activation": {"dg", "dh", "sums"},
    "rotation": {"y"},
    "stack": {"stacked", "sums"},
    "norm_backward": {"dx", "half", "scaled", "sums"},
    "last_layer": {"product", "dbias", "dscale"},
    "take": {"kept"},
    "keep": {"kept_x", "kept_o", "kept_lse"},
    "window_forward": {"o", "lse"},
    "window_backward": {"dq", "dk", "dv", "d_pad_k", "d_pad_v", "d_bias"},
    "window_backward_queries": {"dq", "d_bias"},
}
"""the tensors that a kernel writes to, if it is given them"""
OPTIONS = {"num_warps", "num_stages"}
"""of a launch, among its arguments"""
Taken = Callable[[dict[str, Any]], tuple[Any, ...]]


class Kernel(NamedTuple):
    """The function, what takes its arguments by kind, which is their order too, and how many constants it has: the
    rest of them are options of the launch."""

    function: Any
    tensors: Taken
    numbers: Taken
    constants: Taken
    own_constants: int


_KERNELS: dict[str, Kernel] = {}
_COMPILED: dict[tuple[Any, ...], tuple[Any, Any, Any]] = {}
"""The compiled kernel for a kind of arguments: its launcher, its handle, and what that has to know."""


def launch(kernel: str, grid: tuple[int, ...], **arguments: Any) -> None:
    """Run it; needs Triton. Kernels take tensors (None: not there), then numbers, then constants, whose names are in
    capitals; every launch of a kernel names the same arguments."""
    if compiling():
        launch_later(kernel, grid, arguments)
        return
    if no_data():
        return
    known = _KERNELS.get(kernel)
    if known is None:
        known = _KERNELS[kernel] = kernel_named(kernel, arguments)
    function, tensors_of, numbers_of, constants_of, own = known
    tensors, numbers, constants = tensors_of(arguments), numbers_of(arguments), constants_of(arguments)
    addresses = [None if t is None else t.data_ptr() for t in tensors]
    aligned = reduce(or_, [a for a in addresses if a], 0) % 16 == 0 or tuple([a and a % 16 == 0 for a in addresses])
    device, dtypes = tensors[0].get_device(), [None if t is None else t.dtype for t in tensors]
    key = (kernel, device, constants, aligned, *dtypes, *map(kind, numbers))
    compiled = _COMPILED.get(key)
    if compiled is not None:
        run, handle, metadata = compiled
        x, y, z = (*grid, 1, 1)[:3]
        run(x, y, z, stream(device), handle, metadata, None, None, None, *addresses, *numbers, *constants[:own])
        return
    bound = function[grid](**arguments)
    if bound is not None:  # Triton's interpreter compiles nothing
        _COMPILED[key] = bound.run, bound.function, bound.packed_metadata


def kernel_named(name: str, arguments: dict[str, Any]) -> Kernel:
    function = function_named(name)
    names = [each for each in function.arg_names if not each.isupper()]
    constants = [each for each in function.arg_names if each.isupper()]
    numbers = [each for each in names if isinstance(arguments[each], (int, float))]
    tensors = [each for each in names if each not in numbers]
    assert [*tensors, *numbers, *constants] == [*function.arg_names], f"{name}: tensors, numbers, constants"
    options = [each for each in arguments if each not in function.arg_names]
    return Kernel(function, taker(tensors), taker(numbers), taker(constants + options), len(constants))


def function_named(kernel: str) -> Any:
    from . import kernels, row_kernels, window_kernels

    return next(getattr(file, kernel) for file in (kernels, row_kernels, window_kernels) if hasattr(file, kernel))


def taker(names: Sequence[str]) -> Taken:
    """Of the values of these names, of which there may be one or none."""
    return itemgetter(*names) if len(names) > 1 else lambda arguments: tuple(arguments[name] for name in names)


@lru_cache(4096, typed=True)
def kind(value: float) -> Any:
    """What of a number Triton compiles for: its type, whether it is 1, its divisibility by 16."""
    return (value == 1, value % 16 == 0, value.bit_length() > 31) if isinstance(value, int) else float


def stream(device: int) -> int:
    """The current one, as the driver knows it."""
    return torch._C._cuda_getCurrentRawStream(device)


class Later(NamedTuple):
    """A launch in a compiled step: its kernel, the names of what differs from call to call, and what does not."""

    kernel: str
    read: list[str]
    written: list[str]
    counts: list[str]
    factors: list[str]
    fixed: dict[str, Any]


_LATER: dict[str, Later] = {}
torch.library.define(
    "torchsbp::launch",
    "(str name, SymInt[] grid, Tensor[] read, Tensor(a!)[] written, SymInt[] counts, float[] factors) -> ()",
)


def launch_later(kernel: str, grid: tuple[int, ...], arguments: Mapping[str, Any]) -> None:
    """The operator, with a name that tells all that a launch depends on but tensors and numbers: it is the same in
    every process."""
    tensors = [name for name, value in arguments.items() if isinstance(value, Tensor)]
    numbers = [name for name in arguments if name.islower() and name not in OPTIONS]
    read, written = ([name for name in tensors if (name in WRITTEN[kernel]) == writes] for writes in (False, True))
    counts = [name for name in numbers if isinstance(arguments[name], (int, torch.SymInt))]
    factors = [name for name in numbers if isinstance(arguments[name], float)]
    fixed = {name: value for name, value in arguments.items() if name not in {*tensors, *counts, *factors}}
    later = Later(kernel, read, written, counts, factors, fixed)
    name = f"{kernel} {sha256(repr(later).encode()).hexdigest()}"
    _LATER[name] = later
    values = [[arguments[name] for name in names] for names in (read, written, counts, factors)]
    torch.ops.torchsbp.launch(name, grid, *values)


@torch.library.impl("torchsbp::launch", ("cpu", "cuda"))
def _launch(name: str, grid: Sequence[int], *values: Sequence[Any]) -> None:
    kernel, *names, fixed = _LATER[name]
    pairs = (zip(its, given, strict=True) for its, given in zip(names, values, strict=True))
    launch(kernel, tuple(grid), **fixed, **{name: value for each in pairs for name, value in each})


@torch.library.register_fake("torchsbp::launch")
def _nothing(*given: Any) -> None:
    """It gives nothing back."""
