"""The pre-norm transformer block as one function: the attention branch, then the MLP branch, on the same kept rows.

Saved per block: x (all rows; under rule "qkv" the kept ones), and the kept rows of the attention output and its
log-sum-exp. The rows between the two branches are recomputed from these, so they need not be saved.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from . import rows as R
from .attention import (
    Attention,
    AttentionSpec,
    attention_columns,
    attention_forward,
    attention_input_backward,
    attention_output,
    saved,
)
from .layers import Backward, Grad, autocast_dtype, last_layer_gradients, linear, parameter_gradients
from .mlp import MLP, MLPSpec, mlp_backward, mlp_hidden, mlp_output
from .steps import Affine, keep, steps_for


def transformer_block(
    x: Tensor,
    rows: R.Rows,
    attention: Attention,
    attention_spec: AttentionSpec,
    mlp: MLP,
    mlp_spec: MLPSpec,
    *,
    places: Tensor | None = None,
    factors: tuple[Tensor | None, Tensor | None] = (None, None),
    how: Backward = Backward(),
) -> Tensor:
    """The block on ``x [B, N, C]``, rule "query" or "qkv"; ``factors``: stochastic depth of the two branches;
    ``places``: the inverse of ``rows`` if it is at hand."""
    assert attention_spec.rule != "head", "heads are sampled by attention_branch"
    dtype = autocast_dtype(x)
    specs = attention_spec._replace(dtype=dtype), mlp_spec._replace(dtype=dtype)
    return _TransformerBlock.apply(x, rows, places, *factors, *specs, how, *attention, *mlp)


ATTENTION_PARAMS = len(Attention._fields)


class _TransformerBlock(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        rows: R.Rows,
        places: Grad,
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
        kept = saved(x, o, lse, qkv, rows, None, spec1, how.recompute)
        y = attention_output(o, p1, spec1)
        x = x + (y if factor1 is None else y * factor1.view(-1, 1, 1))
        h = mlp_hidden(x, p2, spec2)
        kept_h = None if how.recompute else keep(h, rows)
        y = mlp_output(h, p2, spec2)
        ctx.save_for_backward(*kept, rows, places, kept_h, factor1, factor2, *params)
        ctx.static, ctx.weight_scale = (spec1, spec2, how.scope, x.dtype), how.weight_scale
        return x + (y if factor2 is None else y * factor2.view(-1, 1, 1))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        tensors = ctx.saved_tensors  # read once: checkpointing unpacks each tensor a single time
        kept, (h, factor1, factor2), params = tensors[:8], tensors[8:11], tensors[11:]
        x, o, rows = kept[0], kept[1], kept[6]
        spec1, spec2, scope, x_dtype = ctx.static
        p1, p2 = Attention(*params[:ATTENTION_PARAMS]), MLP(*params[ATTENTION_PARAMS:])
        needs = ctx.needs_input_grad[8:]
        needs1, needs2 = needs[:ATTENTION_PARAMS], needs[ATTENTION_PARAMS:]
        shape, samples, dtype, dy = dy.shape, dy.shape[0], o.dtype, R.flat(dy)
        affine = Affine(p2.norm_weight, p2.norm_bias, spec2.norm)
        steps = steps_for(x, 4 * shape[-1] + p2.weight1.shape[0] + attention_columns(p1))

        kept_dy = steps.cotangent(dy, rows, factor2, p2.scale, samples, dtype)
        proj_bias, *halves = steps.cast(
            dtype, p1.proj_bias, p1.qkv_weight, p1.qkv_bias, p1.proj_weight, p2.weight1, p2.bias1, p2.weight2
        )
        middle = steps.normalise(
            R.flat(x), affine, spec2.dtype, after=dy,
            rows=rows if spec1.rule == "query" else None,
            branch=linear(o, R.after(dy, halves[2]), proj_bias, None), scale=p1.scale, factor=factor1, samples=samples,
        )  # fmt: skip
        dn, dw1, product2 = mlp_backward(steps, kept_dy, middle, h, halves[3:], p2, spec2, needs2)
        del kept_dy
        d_middle, kept_dy = steps.norm_backward_middle(dn, middle, affine, dy, rows, factor1, p1.scale, samples, dtype)
        del middle, dn
        dx, dw, product1, d_norms = attention_input_backward(
            steps, kept_dy, kept, halves[:3], p1, spec1, needs1, kept=d_middle, base=dy, scope=scope, dtype=x_dtype
        )
        total2, db1, dnw2, dnb2, total1, db, dnw1, dnb1 = steps.totals()
        last1 = last_layer_gradients(product1, total1, p1.proj_weight, p1.proj_bias, p1.scale, needs1[8:])
        last2 = last_layer_gradients(product2, total2, p2.weight2, p2.bias2, p2.scale, needs2[4:])
        grads = dnw1, dnb1, dw, db, *d_norms, *last1, dnw2, dnb2, dw1, db1, *last2
        return dx.view(shape), *[None] * 7, *parameter_gradients(grads, params, needs, ctx.weight_scale)
