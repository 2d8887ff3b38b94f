"""MLP branch: ``y = x + s · gate(γ ∘ (W₂ act(W₁ norm(x) + b₁) + b₂))``, backward on kept rows (Eq. 4, 5).

It serves ConvNeXt's pointwise convolutions too, where the residual comes from elsewhere (``residual=False``).
Saved: the kept rows of x; with ``recompute=False`` also the kept rows of the hidden layer.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from . import opaque
from . import rows as R
from .fused import Cotangent, activation_step, cotangent, norm_backward, norm_backward_spread, normalise
from .layers import (
    Backward,
    Grad,
    Norm,
    Normed,
    activation,
    autocast_dtype,
    cast,
    linear,
    norm,
    scaled,
    scaled_linear_gradients,
    weight_gradient,
)


class MLP(NamedTuple):
    """The parameters of the branch."""

    norm_weight: Grad
    norm_bias: Grad
    weight1: Tensor
    bias1: Grad
    weight2: Tensor
    bias2: Grad
    scale: Grad = None


class MLPSpec(NamedTuple):
    """What is static about the branch."""

    norm: Norm = Norm()
    act: str = "gelu"
    dtype: torch.dtype | None = None


def mlp_branch(
    x: Tensor,
    rows: R.Rows,
    params: MLP,
    spec: MLPSpec = MLPSpec(),
    *,
    factor: Tensor | None = None,
    residual: bool = True,
    how: Backward = Backward(),
) -> Tensor:
    """The branch on ``x [B, ..., C]``; ``factor [B]`` is stochastic depth's factor per sample."""
    spec = spec._replace(dtype=autocast_dtype(x))
    return _MLPBranch.apply(x, rows, factor, spec, residual, how, *params)


def mlp_hidden(x: Tensor, p: MLP, spec: MLPSpec) -> Tensor:
    """The hidden layer before its activation."""
    return linear(norm(x, p.norm_weight, p.norm_bias, spec.norm, spec.dtype), p.weight1, p.bias1, spec.dtype)


def mlp_output(h: Tensor, p: MLP, spec: MLPSpec) -> Tensor:
    """The branch's output from its hidden layer."""
    z = linear(activation(h, spec.act), p.weight2, p.bias2, spec.dtype)
    return z if p.scale is None else z * p.scale


def mlp_backward(
    dy: Cotangent, n: Normed, h: Grad, p: MLP, spec: MLPSpec, needs: Sequence[bool]
) -> tuple[Tensor, tuple[Grad, ...]]:
    """From normalised kept rows: their gradient, and those of (weight1, bias1, weight2, bias2, scale); ``needs`` for
    the latter. ``h`` is the hidden layer, recomputed unless given."""
    dtype = dy.dy.dtype
    weight1, weight2 = cast(p.weight1, dtype), cast(p.weight2, dtype)
    own = h is None
    if h is None:
        h = linear(n.y, weight1, p.bias1, dtype)
    g, dh, total = activation_step(h, dy.dz @ weight2, spec.act, own)
    del h  # the hidden layer is the widest: no more of it at once than needed
    dw2, db2, dscale = scaled_linear_gradients(dy.dy, dy.total, g, p.weight2, p.bias2, p.scale, needs[2:])
    del g
    dw1 = weight_gradient(dh, n.y, p.weight1, needs[0])
    db1 = total.to(p.weight1.dtype) if needs[1] else None
    return dh @ weight1, (dw1, db1, dw2, db2, dscale)


class _MLPBranch(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        rows: R.Rows,
        factor: Grad,
        spec: MLPSpec,
        residual: bool,
        how: Backward,
        *params: Grad,
    ) -> Tensor:
        p = MLP(*params)  # type: ignore[arg-type]
        h = mlp_hidden(x, p, spec)
        kept_h = None if how.recompute else R.take(h, rows)
        ctx.save_for_backward(R.take(x, rows) if rows is not None else x, kept_h, rows, factor, *params)
        ctx.static, ctx.weight_scale = (spec, residual, how.scope), how.weight_scale
        y = mlp_output(h, p, spec)
        if factor is not None:
            y = y * factor.view(-1, *[1] * (x.dim() - 1))
        return x + y if residual else y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        tensors = ctx.saved_tensors
        needs = ctx.needs_input_grad[6:]
        dx, grads = opaque.backward("mlp_branch", dy, tensors[:4], tensors[4:], needs, dy.shape, ctx.static)
        return dx, *[None] * 5, *scaled(grads, ctx.weight_scale)


def _mlp_branch_backward(
    dy: Tensor,
    saved: Sequence[Any],
    params: Sequence[Any],
    needs: Sequence[bool],
    shape: Sequence[int],
    static: tuple[MLPSpec, bool, str],
) -> tuple[Tensor, opaque.Grads]:
    x, h, rows, factor = saved
    spec, residual, scope = static
    p, samples, dy, dtype = MLP(*params), dy.shape[0], R.flat(dy), x.dtype
    n = normalise(R.flat(x), p.norm_weight, p.norm_bias, spec.norm, spec.dtype)
    kept_dy = cotangent(dy, rows, factor, p.scale, samples, n.y.dtype)
    dn, grads = mlp_backward(kept_dy, n, h if h is None else R.flat(h), p, spec, needs[2:])
    norm_args = (dn, n, p.norm_weight, p.norm_bias, spec.norm, needs[:2])
    base = dy if residual else None
    if rows is None:
        dx, dnw, dnb = norm_backward(*norm_args, base)
    else:
        dx, dnw, dnb = norm_backward_spread(*norm_args, rows, dy.shape[0], dtype, base=base, gated=scope == "block")
    return dx.to(dtype).view(shape), [dnw, dnb, *grads]


opaque.register("mlp_branch", _mlp_branch_backward, MLPSpec, Norm)
