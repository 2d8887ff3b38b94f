"""launch: runs Triton kernels (``kernels.py``, ``row_kernels.py``, ``window_kernels.py``) without Triton's overhead.

In every launch Triton binds and specialises arguments, looks up the compiled kernel, asks the driver about every
tensor, and prepares what profilers might want: 20 to 80 µs of the CPU's time on an H200's machine, more than many of
these kernels run. Here a kernel that is compiled already for such a kind of arguments goes straight to the driver.

In a compiled step a launch is an operator. Inductor could be given the Triton kernel itself, but then it would analyse
what the kernel writes to, and translate it, for every launch anew.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, reduce
from operator import itemgetter, or_
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .ahead import build_ahead, wait_for_builds
from .compiling import call_named, compiling, no_data

WRITTEN = {
    "cotangent": {"half", "scaled", "sums"},
    "normalise": {"middle", "y", "y_kept", "mean", "rstd"},
    "activation": {"dg", "g", "sums"},
    "gated_activation": {"dg", "dh", "sums"},
    "rotation": {"y"},
    "stack": {"stacked", "sums"},
    "norm_backward": {"dx", "half", "scaled", "sums"},
    "last_layer": {"product", "dbias", "dscale"},
    "lengths": {"lengths"},
    "choose": {"rows", "counts", "inverse"},
    "take": {"kept"},
    "keep": {"kept_x", "kept_o", "kept_lse"},
    "window_forward": {"o", "lse"},
    "window_backward": {"dq", "dk", "dv", "d_pad_k", "d_pad_v", "d_bias"},
    "window_backward_queries": {"dq", "d_bias"},
}
"""Kernel -> the tensors that it writes to, if it is given them."""
Taken = Callable[[Mapping[str, Any]], tuple[Any, ...]]


class Kernel(NamedTuple):
    """A Triton function, functions that take its tensors, numbers and constants from named arguments, in the order of
    its signature, and how many of the constants are its own: the rest are options of the launch."""

    function: Any
    tensors: Taken
    numbers: Taken
    constants: Taken
    own_constants: int


_KERNELS: dict[str, Kernel] = {}
Compiled = tuple[Any, Any, Any]
"""A compiled kernel: its launcher, its handle, its metadata."""
_COMPILED: dict[tuple[Any, ...], Compiled] = {}
"""By kind of arguments."""


def launch(kernel: str, grid: tuple[int, ...], **arguments: Any) -> None:
    """Launch a kernel; needs Triton. Kernels take tensors (None: absent), then numbers, then constants, whose names are
    in capitals; every launch of a kernel names the same arguments."""
    if compiling():
        launch_later(kernel, grid, arguments)
    elif not no_data():
        launch_now(kernel, grid, arguments)
    else:
        prepare(kernel, arguments)


def launch_now(kernel: str, grid: tuple[int, ...], arguments: Mapping[str, Any]) -> Compiled | None:
    """Launch a kernel and return its compiled form; None in Triton's interpreter, which compiles nothing.

    Triton is given the first tensor in place of an absent one, which is not read: given None, it would build another
    launcher, with a C compiler, for every set of absent tensors."""
    known = _KERNELS.get(kernel)
    if known is None:
        known = _KERNELS[kernel] = kernel_named(kernel, arguments)
    function, tensors_of, numbers_of, constants_of, own = known
    tensors, numbers, constants = tensors_of(arguments), numbers_of(arguments), constants_of(arguments)
    addresses = [None if t is None else t.data_ptr() for t in tensors]
    device, dtypes = tensors[0].get_device(), [None if t is None else t.dtype for t in tensors]
    if elsewhere(device):
        with torch.cuda.device(device):
            return launch_now(kernel, grid, arguments)
    key = (kernel, device, constants, aligned(addresses), *dtypes, *map(kind, numbers))
    compiled = _COMPILED.get(key)
    if compiled is not None:
        run, handle, metadata = compiled
        x, y, z = (*grid, 1, 1)[:3]
        run(x, y, z, stream(device), handle, metadata, None, None, None, *addresses, *numbers, *constants[:own])
        return compiled
    wait_for_builds()
    bound = function[grid](**{name: tensors[0] if value is None else value for name, value in arguments.items()})
    if bound is not None:
        _COMPILED[key] = bound.run, bound.function, bound.packed_metadata
    return _COMPILED.get(key)


def prepare(kernel: str, arguments: Mapping[str, Any]) -> None:
    """Begin to build a kernel that will be launched on other tensors: on a GPU, if all numbers are known."""
    values = arguments.values()
    device = next(value.get_device() for value in values if isinstance(value, Tensor))
    if device < 0 or any(isinstance(value, torch.SymInt) for value in values):
        return
    function, tensors_of, numbers_of, constants_of, own = kernel_named(kernel, arguments)
    tensors, numbers, constants = tensors_of(arguments), numbers_of(arguments), constants_of(arguments)
    dtypes = [(tensors[0] if t is None else t).dtype for t in tensors]
    options = {name: value for name, value in arguments.items() if name not in function.arg_names}
    what = (kernel, device, constants, *dtypes, *map(kind, numbers))
    build_ahead(what, function, device, [*dtypes, *numbers, *constants[:own]], options)


def aligned(addresses: Sequence[int | None]) -> Any:
    """Which addresses are multiples of 16, so that Triton's kernels may read 16 bytes at a time: True if all."""
    return reduce(or_, [a for a in addresses if a], 0) % 16 == 0 or tuple([a and a % 16 == 0 for a in addresses])


def kernel_named(name: str, arguments: Mapping[str, Any]) -> Kernel:
    function = function_named(name)
    names = [each for each in function.arg_names if not each.isupper()]
    constants = [each for each in function.arg_names if each.isupper()]
    numbers = [each for each in names if isinstance(arguments[each], (int, float))]
    tensors = [each for each in names if each not in numbers]
    assert [*tensors, *numbers, *constants] == [*function.arg_names], f"{name}: tensors, numbers, constants"
    options = [each for each in arguments if each not in function.arg_names]
    return Kernel(function, getter(tensors), getter(numbers), getter(constants + options), len(constants))


def function_named(kernel: str) -> Any:
    from . import kernels, row_kernels, window_kernels

    return next(getattr(file, kernel) for file in (kernels, row_kernels, window_kernels) if hasattr(file, kernel))


def getter(names: Sequence[str]) -> Taken:
    """A function that takes the values of these names, a tuple also for one or none."""
    return itemgetter(*names) if len(names) > 1 else lambda arguments: tuple(arguments[name] for name in names)


@lru_cache(4096, typed=True)
def kind(value: float) -> Any:
    """What Triton specialises a kernel for in a number: its type, whether it is 1, its divisibility by 16."""
    return (value == 1, value % 16 == 0, value.bit_length() > 31) if isinstance(value, int) else float


def elsewhere(device: int) -> bool:
    """Return whether a GPU, unlike -1 for a CPU, is not the current one, to which Triton and the driver launch."""
    return device >= 0 and device != torch._C._cuda_getDevice()


def stream(device: int) -> int:
    """The current one, as the driver knows it."""
    return torch._C._cuda_getCurrentRawStream(device)


class OperatorLaunch(NamedTuple):
    """A launch in a compiled step: its kernel; the names of tensors that it reads, of those that it writes to, and of
    numbers known only when it runs (dynamic sizes); and all other arguments. The grid's sides are in the last two."""

    kernel: str
    read: list[str]
    written: list[str]
    sizes: list[str]
    fixed: dict[str, Any]


class Bound(NamedTuple):
    """Such a launch with a compiled kernel: the grid's sides, what orders addresses and numbers, and the numbers."""

    compiled: Compiled
    sides: tuple[int, ...]
    ordered: Callable[[Sequence[Any]], tuple[Any, ...]]
    numbers: list[Any]


SIDES = "grid_x", "grid_y", "grid_z"
_LAUNCHES: dict[str, OperatorLaunch] = {}
_BOUND: dict[tuple[Any, ...], Bound] = {}
torch.library.define("torchsbp::launch", "(str name, Tensor[] read, Tensor(a!)[] written, SymInt[] sizes) -> ()")


def launch_later(kernel: str, grid: tuple[int, ...], arguments: Mapping[str, Any]) -> None:
    """Call the operator, which knows the launch by a name."""
    prepare(kernel, arguments)
    arguments = dict(zip(SIDES, (*grid, 1, 1), strict=False), **arguments)
    tensors = {name: value for name, value in arguments.items() if isinstance(value, Tensor)}
    sizes = {name: value for name, value in arguments.items() if isinstance(value, torch.SymInt)}
    read, written = ([name for name in tensors if (name in WRITTEN[kernel]) == writes] for writes in (False, True))
    fixed = {name: value for name, value in arguments.items() if name not in {*tensors, *sizes}}
    later = OperatorLaunch(kernel, read, written, [*sizes], fixed)
    name = call_named(kernel, later, [tensor.dtype for tensor in tensors.values()])
    _LAUNCHES[name] = later
    torch.ops.torchsbp.launch(name, [tensors[it] for it in read], [tensors[it] for it in written], [*sizes.values()])


def launch_named(name: str, read: Sequence[Tensor], written: Sequence[Tensor], sizes: Sequence[int]) -> None:
    tensors = [*read, *written]
    addresses = [t.data_ptr() for t in tensors]
    device = tensors[0].get_device()
    if elsewhere(device):
        with torch.cuda.device(device):
            return launch_named(name, read, written, sizes)
    key = (name, device, aligned(addresses), *sizes)
    bound = _BOUND.get(key)
    if bound is not None:
        (run, handle, metadata), (x, y, z), ordered, numbers = bound
        run(x, y, z, stream(device), handle, metadata, None, None, None, *ordered(addresses + numbers))
        return None
    later = _LAUNCHES[name]
    arguments = dict(zip([*later.read, *later.written], tensors, strict=True))
    others = later.fixed | dict(zip(later.sizes, sizes, strict=True))
    sides = tuple(others.pop(side) for side in SIDES)
    compiled = launch_now(later.kernel, sides, arguments | others)
    if compiled is not None:
        at = {name: number for number, name in enumerate([*arguments, *others])}
        order = [at[name] for name in function_named(later.kernel).arg_names]
        _BOUND[key] = Bound(compiled, sides, itemgetter(*order), [*others.values()])
    return None


torch.library.impl("torchsbp::launch", ("cpu", "cuda"), launch_named)


@torch.library.register_fake("torchsbp::launch")
def _nothing(*given: Any) -> None:
    """The operator returns nothing."""
