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
    Normed,
    activation,
    autocast_dtype,
    last_layer_gradients,
    linear,
    norm,
    parameter_gradients,
    saved_dtype,
    weight_gradient,
)
from .steps import Affine, Cotangent, Steps, keep, steps_for


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
    places: Tensor | None = None,
    factor: Tensor | None = None,
    residual: bool = True,
    how: Backward = Backward(),
) -> Tensor:
    """The branch on ``x [B, ..., C]``; ``factor [B]`` is stochastic depth's factor per sample, ``places`` the inverse
    of ``rows`` if it is at hand."""
    spec = spec._replace(dtype=autocast_dtype(x))
    return _MLPBranch.apply(x, rows, places, factor, spec, residual, how, *params)


def mlp_hidden(x: Tensor, p: MLP, spec: MLPSpec) -> Tensor:
    """The hidden layer before its activation."""
    return linear(norm(x, p.norm_weight, p.norm_bias, spec.norm, spec.dtype), p.weight1, p.bias1, spec.dtype)


def mlp_output(h: Tensor, p: MLP, spec: MLPSpec) -> Tensor:
    """The branch's output from its hidden layer."""
    z = linear(activation(h, spec.act), p.weight2, p.bias2, spec.dtype)
    return z if p.scale is None else z * p.scale


def mlp_backward(
    steps: Steps,
    dy: Cotangent,
    n: Normed,
    h: Grad,
    halves: Sequence[Any],
    p: MLP,
    spec: MLPSpec,
    needs: Sequence[bool],
) -> tuple[Tensor, Grad, Grad]:
    """From normalised kept rows: their gradient, that of weight1, and ``dyᵀ g`` for weight2. ``h`` is the hidden layer,
    recomputed unless given; ``halves`` are (weight1, bias1, weight2) in the precision of products; ``needs`` as in MLP.
    """
    weight1, bias1, weight2 = halves
    own = h is None
    if h is None:
        h = linear(n.y, weight1, bias1, None)
    g, dh = steps.activation(h, dy.dz @ weight2, spec.act, own)
    del h  # the hidden layer is the widest: no more of it at once than needed
    product = weight_gradient(dy.dy, g, p.weight2, needs[4] or needs[6])
    del g
    return dh @ weight1, weight_gradient(dh, n.y, p.weight1, needs[2]), product


class _MLPBranch(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        rows: R.Rows,
        places: Grad,
        factor: Grad,
        spec: MLPSpec,
        residual: bool,
        how: Backward,
        *params: Grad,
    ) -> Tensor:
        p = MLP(*params)  # type: ignore[arg-type]
        h = mlp_hidden(x, p, spec)
        kept_h = None if how.recompute else keep(h, rows)
        kept_x = keep(x, rows, saved_dtype(x, spec.dtype, how.recompute))
        ctx.save_for_backward(kept_x, kept_h, rows, places, factor, *params)
        ctx.static, ctx.weight_scale = (spec, residual, how.scope, x.dtype), how.weight_scale
        y = mlp_output(h, p, spec)
        if factor is not None:
            y = y * factor.view(-1, *[1] * (x.dim() - 1))
        return x + y if residual else y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        tensors = ctx.saved_tensors  # read once: checkpointing unpacks each tensor a single time
        x, h, rows, places, factor = tensors[:5]
        p, needs = MLP(*tensors[5:]), ctx.needs_input_grad[7:]
        spec, residual, scope, dtype = ctx.static
        shape, dy = dy.shape, R.flat(dy)
        steps = steps_for(x, 3 * x.shape[-1] + p.weight1.shape[0])
        affine = Affine(p.norm_weight, p.norm_bias, spec.norm)

        n = steps.normalise(R.flat(x), affine, spec.dtype, after=dy)
        halves = steps.cast(n.y.dtype, p.weight1, p.bias1, p.weight2)
        kept_dy = steps.cotangent(dy, rows, factor, p.scale, shape[0], n.y.dtype)
        dn, dw1, product = mlp_backward(steps, kept_dy, n, h, halves, p, spec, needs)
        base, gated = dy if residual else None, scope == "block"
        dx = steps.norm_backward_input(
            dn, n, affine, dtype, rows=rows, places=places, size=dy.shape[0], base=base, gated=gated
        )
        total, db1, dnw, dnb = steps.totals()
        last = last_layer_gradients(product, total, p.weight2, p.bias2, p.scale, needs[4:])
        grads = dnw, dnb, dw1, db1, *last
        return dx.view(shape), *[None] * 6, *parameter_gradients(grads, p, needs, ctx.weight_scale)
