"""Any block as one function: its value is that of all rows, its gradient that of a second run on kept rows.

``again(x, rows, *tensors) -> [B, k, C]`` is the block's forward for kept rows, given all rows x: keys and values come
from them. With y the block's output on all rows, computed without recording, the result is y with the gradients of
``again`` for x and the tensors; at dropped rows x also gets the residual path's, dy (nothing in scope "block").
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from . import rows as R
from .layers import Backward, Grad, autocast_dtype, saved_dtype

Again = Callable[..., Tensor]


def rerun(again: Again, y: Tensor, x: Tensor, rows: R.Rows, tensors: Sequence[Tensor], how: Backward) -> Tensor:
    """y, with the gradient of ``again(x, rows, *tensors)``, which runs in backward. Saved: x and the tensors."""
    return _Rerun.apply(again, fresh(y), rows, how, x, *tensors)


def graft(y: Tensor, kept: Tensor, x: Tensor, rows: R.Rows, how: Backward) -> Tensor:
    """y, with the gradient of its kept rows, which have run already on ``inner(x, how)``.

    The value does not depend on them: where their run is checkpointed, a compiler leaves it to the backward graph.
    """
    return _Graft.apply(fresh(y), kept, x, rows, how)


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


def dropped(dy: Tensor, rows: R.Rows, how: Backward) -> Grad:
    """What the residual path brings to x at dropped rows."""
    if rows is None or how.scope == "block":
        return None
    return R.flat(dy).index_fill(0, rows, 0).view(dy.shape)


class _Rerun(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, again: Again, y: Tensor, rows: R.Rows, how: Backward, x: Tensor, *tensors: Tensor) -> Tensor:
        ctx.static = again, how, x.dtype, autocast_dtype(x)
        ctx.save_for_backward(rows, x.to(saved_dtype(x, autocast_dtype(x), recompute=True)), *tensors)
        ctx.mark_dirty(y)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Grad, ...]:
        again, how, x_dtype, dtype = ctx.static
        rows, x, *tensors = ctx.saved_tensors
        needs = ctx.needs_input_grad[4:]
        inputs = [t.detach().requires_grad_(n) for t, n in zip((x.to(x_dtype), *tensors), needs, strict=True)]
        with torch.enable_grad(), casts_anew(x, dtype):
            kept = again(inputs[0], rows, *inputs[1:])
        wanted = [t for t in inputs if t.requires_grad]
        found = iter(torch.autograd.grad(kept, wanted, R.take(dy, rows).view_as(kept), allow_unused=True))
        dx, *grads = (next(found) if need else None for need in needs)
        residual = dropped(dy, rows, how)
        if needs[0] and residual is not None:
            dx = residual if dx is None else residual + dx
        if how.weight_scale != 1:
            grads = [None if grad is None else grad * how.weight_scale for grad in grads]
        return None, None, None, None, dx, *grads


class _Graft(torch.autograd.Function):
    """y; its gradient goes to its kept rows, times the weight scale, and to x at dropped rows."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, kept: Tensor, x: Tensor, rows: R.Rows, how: Backward) -> Tensor:
        ctx.save_for_backward(rows)
        ctx.how, ctx.shape = how, kept.shape
        ctx.mark_dirty(y)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Grad, ...]:
        (rows,) = ctx.saved_tensors
        kept = R.take(dy, rows).view(ctx.shape)
        scaled = kept if ctx.how.weight_scale == 1 else kept * ctx.how.weight_scale
        return None, scaled, dropped(dy, rows, ctx.how), None, None


class _ScaleGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dx: Tensor) -> tuple[Tensor, None]:
        return dx * ctx.factor, None
