"""The backward pass of an op as a single operator of a compiled graph.

The compiler sees forward and backward as one graph. It would merge what backward recomputes with the same expression in
forward and save it, which undoes the saving; and its schedule, not ours, would say how many of the wide buffers live at
once. Here it sees one call: what goes in is what is saved, what happens inside is the op's own code.
"""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

Grads = list[Tensor | None]
# (dy, saved, params, needs, shape of dx, static) -> dx and the gradients of the parameters, in their order.
Backward = Callable[[Tensor, Sequence[Any], Sequence[Any], Sequence[bool], Sequence[int], Any], tuple[Tensor, Grads]]

import os

OPAQUE = os.environ.get("SBP_OPAQUE") == "1"
_BACKWARD: dict[str, Backward] = {}
_NAMES: dict[str, Any] = {"torch": torch}


def register(name: str, backward: Backward, *specs: type) -> None:
    """Make a backward function callable by name; ``specs`` are the named tuples in its static argument."""
    _BACKWARD[name] = backward
    _NAMES.update({spec.__name__: spec for spec in specs})


def backward(
    name: str,
    dy: Tensor,
    saved: Sequence[Tensor | None],
    params: Sequence[Tensor | None],
    needs: Sequence[bool],
    shape: Sequence[int],
    static: Any,
) -> tuple[Tensor, Grads]:
    """Run a registered backward function: as it is, or while compiling as one operator."""
    if not torch.compiler.is_compiling() or not OPAQUE:
        return _BACKWARD[name](dy, saved, params, needs, shape, static)
    dx, vectors, *matrices = torch.ops.torchsbp.backward(name, dy, saved, params, needs, shape, spell(static))
    grads: Grads = []
    start = 0
    for param, need in zip(params, needs, strict=True):
        if not need or param is None:
            grads.append(None)
        elif param.dim() == 1:
            grads.append(vectors[start : start + param.shape[0]].to(param.dtype))
            start += param.shape[0]
        else:
            grads.append(matrices[0])
            matrices = matrices[1:]
    return dx, grads


@torch.library.custom_op("torchsbp::backward", mutates_args=())
def _operator(
    name: str,
    dy: Tensor,
    saved: Sequence[Tensor | None],
    params: Sequence[Tensor | None],
    needs: Sequence[bool],
    shape: Sequence[int],
    static: str,
) -> list[Tensor]:
    """dx, the gradients of vectors one after the other (an operator's results must not share memory, which those of
    biases and norms do), and the gradients of matrices."""
    dx, grads = _BACKWARD[name](dy, saved, params, needs, shape, _read(static))
    given = [g for g in grads if g is not None]
    vectors = [g for g in given if g.dim() == 1]
    joined = torch.cat(vectors) if vectors else dx.new_empty(0)
    return [dx.contiguous(), joined, *(g.contiguous() for g in given if g.dim() > 1)]


@_operator.register_fake
def _shapes(
    name: str,
    dy: Tensor,
    saved: Sequence[Tensor | None],
    params: Sequence[Tensor | None],
    needs: Sequence[bool],
    shape: Sequence[int],
    static: str,
) -> list[Tensor]:
    x = saved[0]
    assert x is not None
    needed = [p for p, need in zip(params, needs, strict=True) if need and p is not None]
    vectors = [p for p in needed if p.dim() == 1]
    joined = torch.cat(vectors) if vectors else x.new_empty(0)
    return [x.new_empty(shape), joined, *(p.new_empty(p.shape) for p in needed if p.dim() > 1)]


def spell(static: Any) -> str:
    """Named tuples, numbers and words as Python would write them (the compiler traces this, but not ``repr``)."""
    if isinstance(static, tuple):
        name = type(static).__name__
        return ("" if name == "tuple" else name) + "(" + "".join([spell(part) + ", " for part in static]) + ")"
    return f"'{static}'" if isinstance(static, str) else str(static)


@cache
def _read(static: str) -> Any:
    """What ``spell`` wrote."""
    return eval(static, {"__builtins__": {}, **_NAMES})
