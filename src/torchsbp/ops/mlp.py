"""MLP branch: ``y = x + s · gate(γ ∘ (W₂ act(W₁ norm(x) + b₁) + b₂))``, backward on kept rows (Eq. 4, 5).

It serves ConvNeXt's pointwise convolutions too, where the residual comes from elsewhere (``residual=False``).
Saved: the kept rows of x; with ``recompute=False`` also the kept rows of the hidden layer.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from . import rows as R
from .layers import (
    Backward,
    Grad,
    Norm,
    activation,
    activation_backward,
    autocast_dtype,
    linear,
    linear_backward,
    norm,
    norm_again,
    norm_backward,
    scaled,
    scaled_linear_backward,
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


def mlp_backward(dy: Tensor, x: Tensor, h: Grad, p: MLP, spec: MLPSpec, needs: Sequence[bool]) -> tuple[Tensor, MLP]:
    """From dy and x ``[rows, C]``: dx and the gradients of the parameters, in their order; ``needs`` in that order."""
    n = norm_again(x, p.norm_weight, p.norm_bias, spec.norm, spec.dtype)
    if h is None:
        h = linear(n.y, p.weight1, p.bias1, spec.dtype)
    g = activation(h, spec.act)
    dg, dw2, db2, dscale = scaled_linear_backward(dy, g, p.weight2, p.bias2, p.scale, h.dtype, needs[4:])
    del g  # the hidden layer is the widest: no more of it at once than needed
    dh = activation_backward(dg, h, spec.act)
    del dg, h
    dn, dw1, db1 = linear_backward(dh, n.y, p.weight1, (True, *needs[2:4]))
    assert dn is not None
    dx, dnw, dnb = norm_backward(dn, n, p.norm_weight, p.norm_bias, spec.norm, needs[:2])
    return dx, MLP(dnw, dnb, dw1, db1, dw2, db2, dscale)  # type: ignore[arg-type]


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
        ctx.spec, ctx.residual, ctx.how, ctx.shape = spec, residual, how, x.shape
        y = mlp_output(h, p, spec)
        if factor is not None:
            y = y * factor.view(-1, *[1] * (x.dim() - 1))
        return x + y if residual else y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        x, h, rows, factor, *params = ctx.saved_tensors
        kept_dy = R.take(dy, rows)
        x = R.after(kept_dy, R.flat(x))
        needs = ctx.needs_input_grad[6:]
        dx, grads = mlp_backward(R.per_sample(kept_dy, factor), x, h, MLP(*params), ctx.spec, needs)
        if ctx.residual:
            base = dy if ctx.how.scope == "branch" else torch.zeros_like(dy)
            dx = R.put(base, rows, kept_dy + dx)
        else:
            dx = R.put(x.new_zeros(ctx.shape), rows, dx)
        return dx, None, None, None, None, None, *scaled(grads, ctx.how.weight_scale)
