"""``once``: for backward passes that have no derivative of their own. To differentiate them again is an error."""

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from ..errors import UsageError
from .compiling import compiling

Backward = Callable[..., Any]


def once(backward: Backward) -> Backward:
    """Wrap the backward of an autograd function: it runs without recording, and differentiating its result is an error.

    Unlike with ``torch.autograd.function.once_differentiable``, that is so even if the cotangent is a constant: the
    result also depends on what forward has saved.
    """

    @wraps(backward)
    def wrapper(ctx: Any, *cotangents: Any) -> Any:
        with torch.no_grad():
            gradients = backward(ctx, *cotangents)
        if compiling() or not torch.is_grad_enabled():
            return gradients
        return marked(gradients, cotangents)

    return wrapper


def marked(gradients: tuple[Any, ...], cotangents: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the gradients such that differentiating any of them is an error: with respect to what forward has saved,
    or to the cotangents (a Jacobian-vector product by a second backward)."""
    given = [gradient.detach().requires_grad_() for gradient in gradients if isinstance(gradient, Tensor)]
    left = iter(_Refused.apply(len(given), *given, *cotangents) if given else ())
    return tuple(next(left) if isinstance(gradient, Tensor) else gradient for gradient in gradients)


def differentiable_once(*tensors: Tensor) -> list[Tensor]:
    """Return the tensors such that the gradients they receive can't be differentiated.

    This is for a part of a graph that autograd records itself. Operations in it that have no second derivative raise
    PyTorch's own error before this one is reached.
    """
    return [_Once.apply(x) if x.requires_grad else x for x in tensors]


class _Once(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    @once
    def backward(ctx: Any, dx: Tensor) -> tuple[Tensor]:
        return (dx,)


class _Refused(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, count: int, *given: Tensor) -> tuple[Tensor, ...]:
        return tuple(gradient.view_as(gradient) for gradient in given[:count])

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> Any:
        raise UsageError(
            "a gradient that went through a block patched by torchsbp was made with create_graph=True and is now "
            "differentiated again (a gradient penalty, a Hessian product): SBP has no double backward. Call "
            "torchsbp.remove(model) for such training, or let the penalty see a model that is not patched."
        )
