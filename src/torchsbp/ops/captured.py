"""Decorators for the passes of an autograd function: small ones may run as CUDA graphs (``graphs.py``)."""

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, NamedTuple, TypeVar, cast

from torch import Tensor

from .compiling import compiling
from .device import device_of
from .graphs import Tensors, small
from .layers import BackwardOptions, Grad


class Noted:
    """Stands in for the ctx of a forward pass."""

    saved: tuple[Grad, ...]
    static: Any

    def save_for_backward(self, *tensors: Grad) -> None:
        self.saved = tensors


Method = TypeVar("Method", bound=Callable[..., Any])


def named_as(run: Callable[..., Any], method: Callable[..., Any]) -> None:
    """Give ``run`` the name of the method: compiled steps know a pass by its name."""
    run.__module__, run.__qualname__ = method.__module__, method.__qualname__


def captured_forward(forward: Method, share: float = 1.0, compiled: bool = False) -> Method:
    """A forward that is captured if its first argument is within ``share`` of the size that ``graphs.small`` allows.

    It takes tensors and hashable values, one of them ``BackwardOptions``, and returns one tensor. It saves tensors in
    its ctx, and in ``ctx.static`` what else its backward needs, hashable. In compiled steps it is captured only if
    ``compiled``."""

    def run(others: Sequence[Any], tensors: Tensors) -> tuple[Tensors, Any]:
        ctx = Noted()
        flat = [other if t is None else t for t, other in zip(tensors, others, strict=True)]
        y = forward(ctx, *flat)
        return (y, *ctx.saved), ctx.static

    named_as(run, forward)

    @wraps(forward)
    def wrapper(ctx: Any, *flat: Any) -> Tensor:
        options = next(value for value in flat if isinstance(value, BackwardOptions))
        ctx.capture = options.capture and (compiled or not compiling())
        if not ctx.capture or not small(flat[0], share):
            return forward(ctx, *flat)
        tensors = [value if isinstance(value, Tensor) else None for value in flat]
        others = tuple(None if isinstance(value, Tensor) else value for value in flat)
        (y, *saved), ctx.static = device_of(flat[0]).run_pass(run, others, tensors)
        ctx.save_for_backward(*saved)
        return y

    return cast(Method, wrapper)


class Context(NamedTuple):
    """Stands in for the ctx of a backward pass."""

    saved_tensors: Tensors
    needs_input_grad: tuple[Any, ...]
    static: Any


def captured_backward(backward: Method, share: float = 1.0) -> Method:
    """The backward of such a function, captured if its cotangent is within ``share`` of that size."""

    def run(others: Any, tensors: Tensors) -> tuple[Tensors, Any]:
        return backward(Context(tensors[1:], *others), tensors[0]), None

    named_as(run, backward)

    @wraps(backward)
    def wrapper(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        if not ctx.capture or not small(dy, share):  # checkpointing unpacks a saved tensor only once
            return backward(Context(ctx.saved_tensors, ctx.needs_input_grad, ctx.static), dy)
        others = ctx.needs_input_grad, ctx.static
        found, _ = device_of(dy).run_pass(run, others, (dy, *ctx.saved_tensors))
        return tuple(found)

    return cast(Method, wrapper)
