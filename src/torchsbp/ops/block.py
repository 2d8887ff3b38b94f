"""The pre-norm transformer block as one function: the attention branch, then the MLP branch, on the same kept rows.

Saved per block: x (all rows; under rule "qkv" the kept ones), and the kept rows of the attention output and its
log-sum-exp. The rows between the two branches are recomputed from these, so they need not be saved.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from . import opaque
from . import rows as R
from .attention import (
    QKV,
    Attention,
    AttentionSpec,
    attention_forward,
    attention_input_backward,
    attention_output,
    saved,
)
from .fused import cotangent, norm_backward, normalise
from .layers import Backward, Grad, Norm, autocast_dtype, linear, scaled
from .mlp import MLP, MLPSpec, mlp_backward, mlp_hidden, mlp_output


def transformer_block(
    x: Tensor,
    rows: R.Rows,
    attention: Attention,
    attention_spec: AttentionSpec,
    mlp: MLP,
    mlp_spec: MLPSpec,
    *,
    factors: tuple[Tensor | None, Tensor | None] = (None, None),
    how: Backward = Backward(),
) -> Tensor:
    """The block on ``x [B, N, C]``, rule "query" or "qkv"; ``factors``: stochastic depth of the two branches."""
    assert attention_spec.rule != "head", "heads are sampled by attention_branch"
    dtype = autocast_dtype(x)
    specs = attention_spec._replace(dtype=dtype), mlp_spec._replace(dtype=dtype)
    return _TransformerBlock.apply(x, rows, *factors, *specs, how, *attention, *mlp)


ATTENTION_PARAMS = len(Attention._fields)


class _TransformerBlock(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        rows: R.Rows,
        factor1: Grad,
        factor2: Grad,
        spec1: AttentionSpec,
        spec2: MLPSpec,
        how: Backward,
        *params: Grad,
    ) -> Tensor:
        p1 = Attention(*params[:ATTENTION_PARAMS])  # type: ignore[arg-type]
        p2 = MLP(*params[ATTENTION_PARAMS:])  # type: ignore[arg-type]
        o, lse, qkv = attention_forward(x, p1, spec1)
        kept = saved(x, o, lse, None if how.recompute else qkv, rows, None, spec1)
        y = attention_output(o, p1, spec1)
        x = x + (y if factor1 is None else y * factor1.view(-1, 1, 1))
        h = mlp_hidden(x, p2, spec2)
        kept_h = None if how.recompute else R.take(h, rows)
        y = mlp_output(h, p2, spec2)
        ctx.save_for_backward(*kept, kept_h, rows, factor1, factor2, *params)
        ctx.static, ctx.weight_scale = (spec1, spec2, how.scope), how.weight_scale
        return x + (y if factor2 is None else y * factor2.view(-1, 1, 1))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        tensors = ctx.saved_tensors  # read once: checkpointing unpacks each tensor a single time
        needs = ctx.needs_input_grad[7:]
        dx, grads = opaque.backward("transformer_block", dy, tensors[:10], tensors[10:], needs, dy.shape, ctx.static)
        return dx, *[None] * 6, *scaled(grads, ctx.weight_scale)


def _transformer_block_backward(
    dy: Tensor,
    saved: Sequence[Any],
    params: Sequence[Any],
    needs: Sequence[bool],
    shape: Sequence[int],
    static: tuple[AttentionSpec, MLPSpec, str],
) -> tuple[Tensor, opaque.Grads]:
    x, o, lse, q, k, v, h, rows, factor1, factor2 = saved
    spec1, spec2, scope = static
    p1, p2 = Attention(*params[:ATTENTION_PARAMS]), MLP(*params[ATTENTION_PARAMS:])
    needs1, needs2 = needs[:ATTENTION_PARAMS], needs[ATTENTION_PARAMS:]
    samples, dtype, dy = x.shape[0], o.dtype, R.flat(dy)
    x_rows = rows if spec1.rule == "query" else None  # which rows of the saved x are the kept ones

    branch = linear(o, p1.proj_weight, p1.proj_bias, dtype)
    middle = normalise(
        R.flat(x), p2.norm_weight, p2.norm_bias, spec2.norm, spec2.dtype,
        rows=x_rows, branch=branch, scale=p1.scale, factor=factor1, samples=samples,
    )  # fmt: skip
    del branch
    kept_dy = cotangent(dy, rows, factor2, p2.scale, samples, dtype)
    dn, grads2 = mlp_backward(kept_dy, middle, None if h is None else R.flat(h), p2, spec2, needs2[2:])
    del kept_dy
    d_middle, dnw, dnb = norm_backward(dn, middle, p2.norm_weight, p2.norm_bias, spec2.norm, needs2[:2], dy, rows)
    del middle, dn
    kept_dy = cotangent(d_middle, None, factor1, p1.scale, samples, dtype)
    qkv = None if q is None else QKV(q, k, v)
    dx, grads1 = attention_input_backward(kept_dy, x, rows, o, lse, qkv, p1, spec1, needs1, d_middle, dy, scope)
    return dx.view(shape), [*grads1, dnw, dnb, *grads2]


opaque.register("transformer_block", _transformer_block_backward, AttentionSpec, MLPSpec, Norm)
