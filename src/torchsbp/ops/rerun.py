"""Any block as one function: its value is that of all rows, its gradient that of a second run on kept rows.

``again(x, rows, *tensors) -> [B, k, C]`` is the block's forward for kept rows; x is what it needs of the block's input,
all rows where keys and values come from them. With y the block's output on all rows, computed without recording, the
result is y with the gradients of ``again`` for x and the tensors; ``residual``, the tensor on the residual path, gets
its own at dropped rows, dy (nothing in scope "block"). Rows of y begin at its dimension ``dim``, as in ``rows``.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from . import rows as R
from .layers import Backward, Grad, autocast_dtype, saved_dtype

Again = Callable[..., Tensor]


def rerun(
    again: Again,
    y: Tensor,
    x: Tensor,
    residual: Grad,
    rows: R.Rows,
    tensors: Sequence[Tensor],
    how: Backward,
    dim: int = 1,
) -> Tensor:
    """y, with the gradient of ``again(x, rows, *tensors)``, which runs in backward. Saved: x and the tensors."""
    return _Rerun.apply(again, fresh(y), rows, how, dim, residual, x, *tensors)


def graft(y: Tensor, kept: Tensor, residual: Grad, rows: R.Rows, how: Backward, dim: int = 1) -> Tensor:
    """y, with the gradient of its kept rows, which have run already on ``inner(x, how)``.

    The value does not depend on them: where their run is checkpointed, a compiler leaves it to the backward graph.
    """
    return _Graft.apply(fresh(y), kept, residual, rows, how, dim)


def fresh(y: Tensor) -> Tensor:
    """y, which may be given a gradient itself: a view of it would not bear the in-place operations of the model."""
    return y.clone() if torch.compiler.is_compiling() or y._is_view() else y


def inner(x: Tensor, how: Backward) -> Tensor:
    """x for a run that is grafted: it takes back the weight scale, which parameters alone should see."""
    return x if how.weight_scale == 1 else _ScaleGradient.apply(x, 1 / how.weight_scale)


def casts_anew(x: Tensor, dtype: torch.dtype | None) -> torch.autocast:
    """Autocast to ``dtype`` (None: none) without its cache, in which a run without gradients leaves weights without."""
    device = x.device.type
    if dtype is None:
        return torch.autocast(device, enabled=False, cache_enabled=False)
    return torch.autocast(device, dtype, cache_enabled=False)


def kept_of(dy: Tensor, rows: R.Rows, shape: torch.Size, dim: int) -> Tensor:
    """The cotangent of the second run."""
    return dy if rows is None else R.take(R.channels_last(dy, dim), rows).view(shape)


def dropped(dy: Tensor, rows: R.Rows, how: Backward, dim: int, need: bool) -> Grad:
    """What the residual path gets at dropped rows."""
    if rows is None or how.scope == "block" or not need:
        return None
    dy = R.channels_last(dy, dim)
    dropped = R.flat(dy).index_fill(0, rows, 0).view(dy.shape)
    return dropped if dim == 1 else dropped.movedim(-1, 1)


class _Rerun(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        again: Again,
        y: Tensor,
        rows: R.Rows,
        how: Backward,
        dim: int,
        residual: Grad,
        x: Tensor,
        *tensors: Tensor,
    ) -> Tensor:
        ctx.static = again, how, dim, x.dtype, autocast_dtype(x)
        ctx.save_for_backward(rows, x.to(saved_dtype(x, autocast_dtype(x), recompute=True)), *tensors)
        ctx.mark_dirty(y)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Grad, ...]:
        again, how, dim, x_dtype, dtype = ctx.static
        rows, x, *tensors = ctx.saved_tensors
        residual_needs, *needs = ctx.needs_input_grad[5:]
        inputs = [t.detach().requires_grad_(n) for t, n in zip((x.to(x_dtype), *tensors), needs, strict=True)]
        with torch.enable_grad(), casts_anew(x, dtype):
            kept = again(inputs[0], rows, *inputs[1:])
        wanted = [t for t in inputs if t.requires_grad]
        kept_dy = kept_of(dy, rows, kept.shape, dim)
        found = iter(torch.autograd.grad(kept, wanted, kept_dy, allow_unused=True))
        dx, *grads = (next(found) if need else None for need in needs)
        if how.weight_scale != 1:
            grads = [None if grad is None else grad * how.weight_scale for grad in grads]
        return *[None] * 5, dropped(dy, rows, how, dim, residual_needs), dx, *grads


class _Graft(torch.autograd.Function):
    """y; its gradient goes to its kept rows, times the weight scale, and to the residual path at dropped rows."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, kept: Tensor, residual: Grad, rows: R.Rows, how: Backward, dim: int) -> Tensor:
        ctx.save_for_backward(rows)
        ctx.how, ctx.shape, ctx.dim = how, kept.shape, dim
        ctx.mark_dirty(y)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Grad, ...]:
        (rows,) = ctx.saved_tensors
        how, dim = ctx.how, ctx.dim
        kept = kept_of(dy, rows, ctx.shape, dim)
        scaled = kept if how.weight_scale == 1 else kept * how.weight_scale
        return None, scaled, dropped(dy, rows, how, dim, ctx.needs_input_grad[2]), None, None, None


class _ScaleGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dx: Tensor) -> tuple[Tensor, None]:
        return dx * ctx.factor, None
