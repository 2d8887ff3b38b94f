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
    QKV,
    Attention,
    AttentionSpec,
    attention_backward,
    attention_forward,
    attention_output,
    join,
    saved,
)
from .layers import Backward, Grad, autocast_dtype, scaled
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
        ctx.specs, ctx.how = (spec1, spec2), how
        return x + (y if factor2 is None else y * factor2.view(-1, 1, 1))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        tensors = ctx.saved_tensors  # read once: checkpointing unpacks each tensor a single time
        x, o, lse, *qkv, h, rows, factor1, factor2 = tensors[:10]
        params = tensors[10:]
        p1, p2 = Attention(*params[:ATTENTION_PARAMS]), MLP(*params[ATTENTION_PARAMS:])
        (spec1, spec2), how = ctx.specs, ctx.how
        needs = ctx.needs_input_grad[7:]
        x_rows = rows if spec1.rule == "query" else None  # which rows of the saved x are the kept ones

        kept_dy = R.take(dy, rows)
        x = R.after(kept_dy, x)
        kept_x = R.take(x, x_rows) + R.per_sample(attention_output(o, p1, spec1), factor1)
        extra, grads2 = mlp_backward(R.per_sample(kept_dy, factor2), kept_x, h, p2, spec2, needs[ATTENTION_PARAMS:])
        dx, grads1 = attention_backward(
            R.per_sample(kept_dy + extra, factor1),
            x,
            x_rows,
            o,
            lse,
            None if how.recompute else QKV(*qkv),
            p1,
            spec1,
            needs[:ATTENTION_PARAMS],
        )
        dx = join(dy, extra, dx, rows, spec1.rule, how.scope)
        return dx, *[None] * 6, *scaled((*grads1, *grads2), how.weight_scale)
