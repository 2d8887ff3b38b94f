"""Any block as one function: its value comes from a run on all rows, its gradient from a second run on kept rows.

The first run gives y without recording a graph. ``again(x, rows, *tensors) -> [B, k, C]`` is the second: the block's
forward for kept rows. Its x is what it needs of the block's input, all rows if keys and values come from them. The
result is y. x and the tensors get the gradients of ``again`` for the cotangent w · dy at kept rows, with w their weight
(default 1). ``residual``, the tensor on the residual path, gets dy at dropped rows and (1 − w) · dy at kept ones: with
what reaches it through ``again``, it has dy in all (scope "block": it gets nothing). Positions of y begin at its
dimension ``dim``, as in ``rows.channels_last``.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import rows as R
from .layers import BackwardOptions, Grad, autocast_dtype, saved_dtype
from .named import first, split
from .once import once

Again = Callable[..., Tensor]


def rerun(
    again: Again,
    y: Tensor,
    x: Tensor,
    residual: Grad,
    rows: R.Rows,
    tensors: Sequence[Tensor],
    options: BackwardOptions,
    dim: int = 1,
) -> Tensor:
    """Return y with the gradient of ``again(x, rows, *tensors)``, which runs in backward. Saved: x and the tensors."""
    return _Rerun.apply(*RerunInputs(again, fresh(y), rows, options, dim, residual, x), *tensors)


def graft(y: Tensor, kept: Tensor, residual: Grad, rows: R.Rows, options: BackwardOptions, dim: int) -> Tensor:
    """Return y with the gradient of ``kept``, the result of a second run that has been made on ``inner(x, options)``.

    The value does not depend on ``kept``: if the second run is checkpointed, a compiler moves it to the backward graph.
    """
    return _Graft.apply(*GraftInputs(fresh(y), kept, residual, rows, options, dim))


def fresh(y: Tensor) -> Tensor:
    """Return y for an autograd function to mark dirty and return: a view would forbid in-place operations behind it."""
    return y.clone() if torch.compiler.is_compiling() or y._is_view() else y


def inner(x: Tensor, options: BackwardOptions) -> Tensor:
    """Return x for a second run that is grafted. Its gradient is divided by the weight scale, as ``graft`` multiplies
    the whole cotangent by it, but it is for parameters alone."""
    return x if options.weight_scale == 1 else _ScaleGradient.apply(x, 1 / options.weight_scale)


def casts_anew(x: Tensor, dtype: torch.dtype | None) -> torch.autocast:
    """Return autocast to ``dtype`` (None: off) without its cache: a run without gradients leaves casts of weights there
    that would pass no gradient on."""
    device = x.device.type
    if dtype is None:
        return torch.autocast(device, enabled=False, cache_enabled=False)
    return torch.autocast(device, dtype, cache_enabled=False)


def kept_of(dy: Tensor, rows: R.Rows, options: BackwardOptions, shape: torch.Size, dim: int) -> Tensor:
    """Return the cotangent of the second run: kept rows of dy, weighted, in its shape."""
    if rows is None:
        return dy
    return R.weighted(R.take(R.channels_last(dy, dim), rows), options.row_weight, dy.shape[0]).view(shape)


def past(dy: Tensor, rows: R.Rows, options: BackwardOptions, dim: int, need: bool) -> Grad:
    """Return the gradient that the residual path gets directly, besides what goes through the second run."""
    if rows is None or options.scope == "block" or not need:
        return None
    dy = R.channels_last(dy, dim)
    if options.row_weight is None:
        dropped = R.flat(dy).index_fill(0, rows, 0).view(dy.shape)
    else:
        kept = R.take(dy, rows)
        dropped = R.put(dy, rows, kept - R.weighted(kept, options.row_weight, dy.shape[0]))
    return dropped if dim == 1 else dropped.movedim(-1, 1)


class RerunInputs(NamedTuple):
    """The autograd function's arguments before the tensors; only residual and x have gradients that are not None."""

    again: Again | None = None
    y: Grad = None
    rows: R.Rows = None
    options: BackwardOptions | None = None
    dim: int | None = None
    residual: Grad = None
    x: Grad = None


class RerunSaved(NamedTuple):
    """What the function saves before the tensors."""

    rows: R.Rows
    x: Tensor


class _Rerun(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *flat: Any) -> Tensor:
        (again, y, rows, options, dim, _, x), tensors = first(flat, RerunInputs)
        ctx.again, ctx.options, ctx.dim, ctx.x_dtype, ctx.dtype = again, options, dim, x.dtype, autocast_dtype(x)
        saved = RerunSaved(rows, x.to(saved_dtype(x, ctx.dtype, recompute=True)))
        ctx.save_for_backward(*saved, *tensors)
        ctx.mark_dirty(y)
        return y

    @staticmethod
    @once
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        (rows, x), tensors = first(ctx.saved_tensors, RerunSaved)
        needs, needs_tensors = first(ctx.needs_input_grad, RerunInputs)
        options = ctx.options
        x_again = x.to(ctx.x_dtype).detach().requires_grad_(needs.x)
        others = [t.detach().requires_grad_(need) for t, need in zip(tensors, needs_tensors, strict=True)]
        with torch.enable_grad(), casts_anew(x, ctx.dtype):
            kept = ctx.again(x_again, rows, *others)
        wanted = [t for t in (x_again, *others) if t.requires_grad]
        kept_dy = kept_of(dy, rows, options, kept.shape, ctx.dim)
        used = kept.requires_grad  # no: the block does not use what is trained of it
        found = iter(torch.autograd.grad(kept, wanted, kept_dy, allow_unused=True) if used else [None] * len(wanted))
        dx, *grads = (next(found) if need else None for need in (needs.x, *needs_tensors))
        if options.weight_scale != 1:
            grads = [None if grad is None else grad * options.weight_scale for grad in grads]
        d_residual = past(dy, rows, options, ctx.dim, needs.residual)
        return *RerunInputs(residual=d_residual, x=dx), *grads


class GraftInputs(NamedTuple):
    """The autograd function's arguments; only kept and residual have gradients that are not None."""

    y: Grad = None
    kept: Grad = None
    residual: Grad = None
    rows: R.Rows = None
    options: BackwardOptions | None = None
    dim: int | None = None


class _Graft(torch.autograd.Function):
    """Returns y. Its gradient goes to ``kept``, weighted and times the weight scale, and to the residual path."""

    @staticmethod
    def forward(
        ctx: Any, y: Tensor, kept: Tensor, residual: Grad, rows: R.Rows, options: BackwardOptions, dim: int
    ) -> Tensor:
        ctx.save_for_backward(rows)
        ctx.options, ctx.shape, ctx.dim = options, kept.shape, dim
        ctx.mark_dirty(y)
        return y

    @staticmethod
    @once
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        (rows,) = ctx.saved_tensors
        (needs,) = split(ctx.needs_input_grad, GraftInputs)
        options, dim = ctx.options, ctx.dim
        kept = kept_of(dy, rows, options, ctx.shape, dim)
        scaled = kept if options.weight_scale == 1 else kept * options.weight_scale
        return (*GraftInputs(kept=scaled, residual=past(dy, rows, options, dim, needs.residual)),)


class _ScaleGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    @once
    def backward(ctx: Any, dx: Tensor) -> tuple[Tensor, None]:
        return dx * ctx.factor, None
