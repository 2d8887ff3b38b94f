"""launch: a kernel of ``kernels.py`` or ``window_kernels.py`` by name, bound once for every kind of arguments.

Triton binds, specialises and looks up its kernel in every launch: 20 to 80 µs of the CPU's time on an H200's machine,
more than many of these kernels run. One that is compiled already for such arguments is with the driver in about 10.
"""

from typing import Any

import torch
from torch import Tensor

_COMPILED: dict[tuple[Any, ...], tuple[Any, list[str]]] = {}
"""The compiled kernel for a kind of arguments, and the names of what it takes, in order."""


def launch(kernel: str, grid: tuple[int, ...], **arguments: Any) -> None:
    """Run it; needs Triton. What is a constant to the kernel has a name in capitals, or is an option of the launch."""
    from . import kernels, window_kernels

    function = getattr(window_kernels if kernel.startswith("window") else kernels, kernel)
    if torch.compiler.is_compiling():
        function[grid](**arguments)
        return
    key = (kernel, *[kind(name, value) for name, value in arguments.items()])
    known = _COMPILED.get(key)
    if known is not None:
        compiled, names = known
        compiled[(*grid, 1, 1)[:3]](*[arguments[name] for name in names])
        return
    compiled = function[grid](**arguments)
    if compiled is not None:  # Triton's interpreter compiles nothing
        _COMPILED[key] = compiled, [parameter.name for parameter in function.params]


def kind(name: str, value: Any) -> Any:
    """All that Triton compiles for: constants, and of what varies its type, divisibility by 16, and whether it is 1."""
    if isinstance(value, Tensor):
        return value.dtype, value.get_device(), value.data_ptr() % 16 == 0
    if value is None or name.isupper() or name in ("num_warps", "num_stages"):
        return value
    if isinstance(value, int):
        return value == 1, value % 16 == 0, value.bit_length() > 31
    return type(value)
