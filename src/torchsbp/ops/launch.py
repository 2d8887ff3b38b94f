"""launch: a kernel of ``kernels.py``, ``row_kernels.py`` or ``window_kernels.py``, bound once for a kind of arguments.

Triton binds, specialises and looks up its kernel in every launch: 20 to 80 µs of the CPU's time on an H200's machine,
more than many of these kernels run. One that is compiled already for such arguments is with the driver in less than 10;
it is given addresses, as of every tensor Triton would ask the driver for its own.
"""

from collections.abc import Callable
from operator import itemgetter
from typing import Any, NamedTuple

import torch


class Kernel(NamedTuple):
    """The function, what takes its arguments in order, and all constants, from their names; where the rest is."""

    function: Any
    ordered: Callable[[dict[str, Any]], Any]
    constants: Callable[[dict[str, Any]], Any]
    varying: tuple[int, ...]


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
    function, ordered, constants, varying = _KERNELS[kernel]
    given, kinds, device = list(ordered(arguments)), [], -1
    for i in varying:
        value = given[i]
        if isinstance(value, int):
            kinds.append((value == 1, value % 16 == 0, value.bit_length() > 31))
        elif value is None or isinstance(value, float):
            kinds.append(type(value))
        else:
            given[i], device = value.data_ptr(), value.get_device()
            kinds.append((value.dtype, given[i] % 16 == 0))
    key = (kernel, device, constants(arguments), *kinds)
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
    constants = [each for each in arguments if each not in names or each.isupper()]
    varying = tuple(i for i, each in enumerate(names) if not each.isupper())
    return Kernel(function, itemgetter(*names), itemgetter(*constants), varying)


def function_named(kernel: str) -> Any:
    from . import kernels, row_kernels, window_kernels

    return next(getattr(file, kernel) for file in (kernels, row_kernels, window_kernels) if hasattr(file, kernel))
