"""The transformer block as one function: the attention branch, then the MLP branch, on the same kept rows.

Saved per block: x (all rows; under rule "qkv" the kept ones), and the attention output O and its log-sum-exp at kept
rows (at all rows under rule "exact", where only the MLP is sampled, and if backward chooses the rows). The rows between
the branches, ``x + s · γ ∘ (W_o O + b_o)``, are recomputed from these. docs/method.md, 3.6, has the bytes.
"""

from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import rows as R
from .attention import (
    AttentionSaved,
    attention_columns,
    attention_forward,
    attention_gradients,
    attention_input_backward,
    attention_kept,
    attention_saved,
)
from .attention_output import attention_last, attention_output, output_backward
from .captured import captured_backward, captured_forward
from .compiling import op
from .device import device_of
from .heads import AttentionParams, AttentionSpec, AttentionWeights, attention_weights
from .layers import BackwardOptions, Grad, Normed, autocast_dtype, parameter_gradients
from .mlp import (
    MLPParams,
    MLPSpec,
    MLPWeights,
    mlp_backward,
    mlp_columns,
    mlp_forward,
    mlp_gradients,
    mlp_norm,
    mlp_weights,
)
from .named import split
from .once import once
from .steps import Affine, Steps
from .window_attention import NO_WINDOWS, Cut, all_slots


def transformer_block(
    x: Tensor,
    rows: R.Rows,
    attention: AttentionParams,
    attention_spec: AttentionSpec,
    mlp: MLPParams,
    mlp_spec: MLPSpec,
    *,
    inverse: Tensor | None = None,
    marks: Tensor | None = None,
    factors: tuple[Tensor | None, Tensor | None] = (None, None),
    options: BackwardOptions = BackwardOptions(),
    cut: Cut = NO_WINDOWS,
) -> Tensor:
    """Return the block's output for ``x [B, ..., C]`` under any rule but "head". ``factors`` are stochastic depth's
    factors ``[B]`` of the two branches; ``inverse`` is that of ``rows`` if it is at hand; ``marks [B, k]`` stand for
    rows that backward chooses (``chosen.py``); ``cut`` describes the windows of attention, if it has any."""
    assert marks is None or (rows is None and cut.slots is None), "what is kept is not known yet"
    assert not attention_spec.rule.heads, "heads are sampled by attention_branch"
    dtype = autocast_dtype(x)
    specs = attention_spec._replace(dtype=dtype), mlp_spec._replace(dtype=dtype)
    inputs = BlockInputs(x, rows, inverse, marks, *factors, *specs, options)
    return _run_block(*inputs, *cut, *attention, *mlp)


class BlockInputs(NamedTuple):
    """The autograd function's arguments before the parameters; among its gradients, only that of x is not None."""

    x: Any
    rows: R.Rows = None
    inverse: Grad = None
    marks: Grad = None
    attention_factor: Grad = None
    mlp_factor: Grad = None
    attention_spec: AttentionSpec | None = None
    mlp_spec: MLPSpec | None = None
    options: BackwardOptions | None = None


class BlockSaved(NamedTuple):
    """What the function saves besides ``AttentionSaved``: the rows that the MLP keeps and their inverse, or the marks
    by which backward chooses them; unless recomputed, the hidden layer at these rows (at all rows if backward chooses
    them); and stochastic depth's factors per sample."""

    rows: R.Rows
    inverse: Grad
    marks: Grad
    h: Grad
    attention_factor: Grad
    mlp_factor: Grad


class _TransformerBlock(torch.autograd.Function):
    @staticmethod
    @partial(captured_forward, compiled=True)
    def forward(ctx: Any, *flat: Any) -> Tensor:
        inputs, cut, p1, p2 = split(flat, BlockInputs, Cut, AttentionParams, MLPParams)
        x, rows, inverse, marks, factor1, factor2, spec1, spec2, options = inputs
        shape, kept, place = x.shape, rows, inverse
        x = R.in_rows(x.flatten(1, -2))
        if not spec1.rule.query_rows:  # attention keeps all rows, and all slots of its windows
            kept, place, cut = None, None, all_slots(cut)
        device = device_of(x)
        weights = device.cast(spec1.dtype, *attention_weights(p1), *mlp_weights(p2))
        weights1, weights2 = split(weights, AttentionWeights, MLPWeights)
        o, lse, qkv = attention_forward(x, p1, weights1, spec1, cut)
        saved = attention_saved(x, o, lse, qkv, kept, place, None, spec1, options.recompute)
        del lse, qkv  # what is not saved: the MLP needs the room
        y = attention_output(o, p1, weights1, spec1)
        del o
        x = x + (y if factor1 is None else y * factor1.view(-1, 1, 1))
        del y
        y, kept_h = mlp_forward(x, rows, p2, weights2, spec2, options.recompute)
        ctx.save_for_backward(*saved, *BlockSaved(rows, inverse, marks, kept_h, factor1, factor2), *cut, *p1, *p2)
        ctx.static = spec1, spec2, options, x.dtype
        y = y if factor2 is None else y * factor2.view(-1, 1, 1)
        return x + y if len(shape) == 3 else x.view(shape) + y.view(shape)  # not a view: FSDP warns of those

    @staticmethod
    @once
    @captured_backward
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        parts = AttentionSaved, BlockSaved, Cut, AttentionParams, MLPParams
        saved, more, cut, p1, p2 = split(ctx.saved_tensors, *parts)
        _, _, needs1, needs2 = split(ctx.needs_input_grad, BlockInputs, Cut, AttentionParams, MLPParams)
        rows, inverse, marks, h, factor1, factor2 = more
        spec1, spec2, options, x_dtype = ctx.static
        shape, samples, dtype, dy = dy.shape, dy.shape[0], saved.o.dtype, R.flat(dy)
        device = device_of(saved.x)
        steps = device.steps(saved.x, mlp_columns(p2, spec2) + attention_columns(p1, spec1))

        weight: R.Weight = options.row_weight
        if marks is not None:
            rows, inverse, weight = device.choose(dy, marks, options)
            h = None if h is None else R.take(h, rows)
            if spec1.rule.query_rows:
                saved = attention_kept(saved, rows, inverse)
        kept_dy = steps.cotangent(dy, rows, factor2, p2.scale, samples, dtype, total="mlp_output", weight=weight)
        weights = device.cast(dtype, *attention_weights(p1), *mlp_weights(p2)[:3], None, after=dy)
        weights1, weights2 = split(weights, AttentionWeights, MLPWeights)
        affine = mlp_norm(p2, spec2)
        middle = middle_again(steps, saved, rows, weights1, p1, spec1, factor1, affine, dy)
        dn, products2 = mlp_backward(steps, kept_dy, middle, h, weights2, p2, spec2, needs2, options.spare)
        del kept_dy, weights, weights2
        d_middle: Grad = None
        if spec1.rule.query_rows:
            d_middle, kept_dy = steps.norm_backward_middle(
                dn, middle, affine, dy, rows, factor1, p1.scale, samples, dtype,
                norm_total="mlp_norm", total="attention_output", weight=weight,
            )  # fmt: skip
        else:  # attention has gradients at all rows
            dy = steps.norm_backward_input(
                dn, middle, affine, dy.dtype, rows=rows, inverse=inverse, size=dy.shape[0],
                base=dy, gated=options.scope == "block", norm_total="mlp_norm",
            )  # fmt: skip
            kept_dy = steps.cotangent(dy, None, factor1, p1.scale, samples, dtype, total="attention_output")
        del middle, dn
        do, output = output_backward(kept_dy, saved.o, weights1.proj_weight, p1, spec1, needs1)
        del kept_dy
        dx, products1 = attention_input_backward(
            steps, do, output, saved, weights1, p1, spec1, needs1,
            kept=d_middle, base=dy, scope=options.scope, dtype=x_dtype, cut=cut,
        )  # fmt: skip
        totals = steps.totals()
        grads1, grads2 = attention_gradients(products1, totals, p1), mlp_gradients(products2, totals, p2)
        sampled = spec1.rule.query_rows or options.scope == "block"  # else attention's cotangent was complete
        return (
            *BlockInputs(dx.view(shape)),
            *NO_WINDOWS,
            *parameter_gradients(grads1, p1, needs1, options.weight_scale if sampled else 1.0),
            *parameter_gradients(grads2, p2, needs2, options.weight_scale),
        )


_run_block = op(_TransformerBlock)


def middle_again(
    steps: Steps,
    saved: AttentionSaved,
    rows: R.Rows,
    weights: AttentionWeights,
    p1: AttentionParams,
    spec1: AttentionSpec,
    factor1: Grad,
    norm: Affine,
    dy: Tensor,
) -> Normed:
    """Recompute the kept rows between the branches, and their norm, from what the attention branch saved. The result
    depends on ``dy``, so that no compiler saves it (``rows.after``)."""
    o = saved.o if spec1.rule.query_rows else R.take(saved.o, rows)
    if weights.proj_weight.dtype == p1.proj_weight.dtype:  # had it been cast, it would depend on dy
        weights = weights._replace(proj_weight=R.after(dy, weights.proj_weight))
    return steps.normalise(
        R.flat(saved.x), norm, spec1.dtype, after=dy,
        rows=None if spec1.rule.key_rows else rows,
        branch=attention_last(o, p1, weights, spec1),
        scale=p1.scale, factor=factor1, samples=saved.x.shape[0],
    )  # fmt: skip
