"""launch: a kernel of ``kernels.py``, ``row_kernels.py`` or ``window_kernels.py``, bound once for a kind of arguments.

Triton binds, specialises and looks up its kernel in every launch: 20 to 80 µs of the CPU's time on an H200's machine,
more than many of these kernels run. One that is compiled already for such arguments is with the driver in less than 10;
it is given addresses, as of every tensor Triton would ask the driver for its own.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache
from operator import itemgetter
from typing import Any, NamedTuple

import torch

Taken = Callable[[dict[str, Any]], tuple[Any, ...]]


class Kernel(NamedTuple):
    """The function; what takes all its arguments in order, the constants, and the integers; where the tensors are."""

    function: Any
    ordered: Taken
    constants: Taken
    integers: Taken
    tensors: tuple[int, ...]


_KERNELS: dict[str, Kernel] = {}
_COMPILED: dict[tuple[Any, ...], Any] = {}
"""The compiled kernel for a kind of arguments."""


def launch(kernel: str, grid: tuple[int, ...], **arguments: Any) -> None:
    """Run it; needs Triton. What is a constant to the kernel has a name in capitals, or is an option of the launch;
    every launch of a kernel names the same arguments."""
    if torch.compiler.is_compiling():
        function_named(kernel)[grid](**arguments)
        return
    if kernel not in _KERNELS:
        _KERNELS[kernel] = kernel_named(kernel, arguments)
    function, ordered, constants, integers, tensors = _KERNELS[kernel]
    kinds: list[torch.dtype | None] = []
    given, bits = list(ordered(arguments)), 0
    device = given[tensors[0]].get_device()
    for i in tensors:
        tensor = given[i]
        if tensor is None:
            kinds.append(None)
        else:
            kinds.append(tensor.dtype)
            given[i] = address = tensor.data_ptr()
            bits |= address
    aligned = bits % 16 == 0 or tuple([given[i] is None or given[i] % 16 == 0 for i in tensors])
    key = (kernel, device, aligned, constants(arguments), *kinds, *map(kind, integers(arguments)))
    compiled = _COMPILED.get(key)
    if compiled is not None:
        compiled[(*grid, 1, 1)[:3]](*given)
        return
    compiled = function[grid](**arguments)
    if compiled is not None:  # Triton's interpreter compiles nothing
        _COMPILED[key] = compiled


def kernel_named(name: str, arguments: dict[str, Any]) -> Kernel:
    function = function_named(name)
    names = function.arg_names
    varying = [each for each in names if not each.isupper()]
    integers = [each for each in varying if isinstance(arguments[each], int)]
    tensors = [i for i, each in enumerate(names) if each in varying and not isinstance(arguments[each], (int, float))]
    constants = [each for each in arguments if each not in varying]
    return Kernel(function, taker(names), taker(constants), taker(integers), tuple(tensors))


def taker(names: Sequence[str]) -> Taken:
    """Of the values of these names, of which there may be one or none."""
    return itemgetter(*names) if len(names) > 1 else lambda arguments: tuple(arguments[name] for name in names)


@lru_cache(4096)
def kind(value: int) -> tuple[bool, ...]:
    """What of an integer Triton compiles for: whether it is 1, its divisibility by 16, its type."""
    return value == 1, value % 16 == 0, value.bit_length() > 31


def function_named(kernel: str) -> Any:
    from . import kernels, row_kernels, window_kernels

    return next(getattr(file, kernel) for file in (kernels, row_kernels, window_kernels) if hasattr(file, kernel))
