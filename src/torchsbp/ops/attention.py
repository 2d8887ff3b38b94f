"""Attention branch: ``y = x + s · gate(γ ∘ (W_o attention(norm(x)) + b_o))`` under one of the rules of ``rules.py``.

- Rule "query": gradients flow from kept output rows; K and V of all rows receive what these send (Eq. 19–23).
- Rule "qkv": in addition, no gradient reaches a key or value outside the kept rows.
- Rule "head": gradients flow from all rows, but only through the kept heads.
- Rule "exact": nothing is dropped.

Under every rule the probabilities are those of the full softmax. The norm may be behind the branch instead of before
it. Saved: x (all rows, as K and V of all rows are recomputed from it; under "qkv" the kept rows), and the attention
output and log-sum-exp of kept rows or heads; with ``recompute=False`` Q, K and V too.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import rows as R
from .attention_output import OutputProducts, attention_output, output_backward
from .captured import captured_backward, captured_forward
from .compiling import op
from .device import device_of, weight_gradient
from .heads import (
    QKV,
    AttentionParams,
    AttentionSpec,
    AttentionWeights,
    HeadGradients,
    attend_normalised,
    attend_normalised_backward,
    attention_weights,
    project,
    project_kept,
    scatter_heads,
    select_heads,
    take_head_rows,
    to_heads,
    to_rows,
)
from .layers import (
    BackwardOptions,
    Grad,
    Normed,
    apart,
    autocast_dtype,
    cast,
    norm,
    norm_columns,
    parameter_gradients,
    saved_dtype,
)
from .named import Needs, split
from .once import once
from .steps import Affine, Steps
from .window_attention import NO_WINDOWS, Cut, Padding, all_slots


class AttentionProducts(NamedTuple):
    """What ``attention_backward`` returns for the parameters: the gradient of the stacked qkv weights, the products of
    the last layer, and the gradients of ``HeadGradients``."""

    qkv_weight: Any
    output: OutputProducts
    heads: HeadGradients


class AttentionSaved(NamedTuple):
    """What backward needs: x, the attention output, its log-sum-exp and, unless recomputed, Q, K, V. Of each, only the
    rows and heads that backward reads. ``rows`` are the kept ones, ``inverse`` is their inverse if it is at hand."""

    x: Tensor
    o: Tensor
    lse: Tensor
    q: Any
    k: Any
    v: Any
    rows: R.Rows
    inverse: Grad


def attention_branch(
    x: Tensor,
    rows: R.Rows,
    params: AttentionParams,
    spec: AttentionSpec,
    *,
    heads: Tensor | None = None,
    factor: Tensor | None = None,
    options: BackwardOptions = BackwardOptions(),
    cut: Cut = NO_WINDOWS,
) -> Tensor:
    """Return the branch's output for ``x [B, N, C]``. ``rows`` and ``heads`` are indices of what is kept; one that the
    rule does not sample is ignored. ``cut`` describes windows."""
    rule, dtype = spec.rule, autocast_dtype(x)
    if not rule.query_rows:
        rows, cut = None, all_slots(cut)
    heads = heads if rule.heads else None
    inputs = AttentionInputs(x, rows, heads, factor, spec._replace(dtype=dtype), options)
    return _run_attention(*inputs, *cut, *params)


def attention_forward(
    x: Tensor, p: AttentionParams, weights: AttentionWeights, spec: AttentionSpec, cut: Cut
) -> tuple[Tensor, Tensor, QKV]:
    """Attention output ``[B, N, H * D]`` before its projection, log-sum-exp ``[B, H, N]``, and Q, K, V."""
    n = norm(x, p.norm_weight, p.norm_bias, spec.norm, spec.dtype)
    qkv = QKV(*project(n, weights.qkv_weight, weights.qkv_bias, spec.heads))
    o, lse = attend_normalised(qkv, p, spec, cut)
    return to_rows(o), lse, qkv


def attention_saved(
    x: Tensor,
    o: Tensor,
    lse: Tensor,
    qkv: QKV,
    rows: R.Rows,
    inverse: Grad,
    heads: Tensor | None,
    spec: AttentionSpec,
    recompute: bool,
) -> AttentionSaved:
    """Return what backward needs of the results of ``attention_forward``."""
    if heads is not None:
        o = o.view(*o.shape[:2], spec.heads, -1).index_select(2, heads).flatten(2)
        lse = lse.index_select(1, heads)
    kv_rows = rows if spec.rule.key_rows else None
    dtype = saved_dtype(x, spec.dtype, recompute)
    kept_x, o, lse = device_of(x).save_attention(x, o, lse, rows, dtype, spec.rule.key_rows)
    x = kept_x.view(x.shape[0], -1, x.shape[-1])
    saved = AttentionSaved(x, o, lse, None, None, None, rows, inverse)
    if recompute:
        return saved
    q, k, v = (t if heads is None else t.index_select(1, heads) for t in qkv)
    return saved._replace(q=take_head_rows(q, rows), k=take_head_rows(k, kv_rows), v=take_head_rows(v, kv_rows))


def attention_kept(saved: AttentionSaved, rows: Tensor, inverse: Grad) -> AttentionSaved:
    """Reduce o, lse and q, which were saved for all rows, to the rows that were chosen in backward."""
    x, o, lse, q, *_ = saved
    _, o, lse = device_of(x).save_attention(x, o.view(*x.shape[:2], -1), lse, rows, x.dtype, False)
    q = None if q is None else take_head_rows(q, rows)
    return saved._replace(o=o, lse=lse, q=q, rows=rows, inverse=inverse)


def attention_columns(p: AttentionParams, spec: AttentionSpec) -> int:
    """Count the columns of the branch's totals: "attention_output", "attention_qkv", "attention_norm_weight",
    "attention_norm_bias"."""
    width = sum(weight.shape[0] for weight in p.qkv_weights)
    return p.proj_weight.shape[0] + width + norm_columns(spec.norm, p.qkv_weight.shape[1])


def attention_backward(
    steps: Steps,
    do: Tensor,
    output: OutputProducts,
    n: Normed,
    rows: R.Rows,
    saved: AttentionSaved,
    cast_weights: AttentionWeights,
    p: AttentionParams,
    spec: AttentionSpec,
    needs: Needs,
    cut: Cut,
) -> tuple[Tensor, Grad, AttentionProducts]:
    """Backpropagate ``do``, the gradient of the attention output (from ``output_backward``), to the normalised x.

    Returns the gradient of ``n.y [B * m, C]``, what to add to it at the query rows (None: nothing), and the products
    for the parameters. All rows of ``n.y`` give keys and values; its rows ``rows`` (None: all, in order), which
    ``n.y_kept`` holds, give queries. Rows of ``do`` and ``o [B * k, H * D]`` and of ``lse [B, H, k]`` belong to the
    queries. Q, K, V are recomputed unless saved.
    """
    weight, bias, *_ = cast_weights
    samples, heads, width = saved.x.shape[0], spec.heads, weight.shape[0] // 3
    n_q = n.y_kept
    if saved.q is not None:
        qkv = QKV(saved.q, saved.k, saved.v)
    else:
        n_kv = n.y.view(samples, -1, n.y.shape[1])
        if rows is None:
            qkv = QKV(*project(n_kv, weight, bias, heads))
        else:
            qkv = project_kept(n_q.view(samples, -1, n_q.shape[1]), n_kv, weight, bias, heads)

    do, o = to_heads(do, samples, heads), to_heads(saved.o, samples, heads)
    if cut.places is not None:
        p = p._replace(qkv_bias=bias)
    dqkv, of_heads = attend_normalised_backward(
        do, qkv, o, saved.lse, saved.rows, cut, p, spec, needs, overwrite=saved.q is None
    )
    del qkv, do, o
    dq, dk, dv = (cast(g.transpose(1, 2).reshape(-1, width), n.y.dtype) for g in dqkv)
    del dqkv

    if rows is None:
        d = steps.stack(dq, dk, dv, total="attention_qkv")
        dw = weight_gradient(d, n.y, p.qkv_weight, any(needs.qkv_weights))
        return d @ weight, None, AttentionProducts(dw, output, of_heads)
    d, dw = steps.stack(dk, dv, apart=dq, total="attention_qkv"), None
    if any(needs.qkv_weights):
        dw = device_of(d).weight_gradient(p.qkv_weight, (dq, n_q), (d, n.y))
    of_q, of_kv = weight.split_with_sizes((width, 2 * width))
    return d @ of_kv, dq @ of_q, AttentionProducts(dw, output, of_heads)


def attention_input_backward(
    steps: Steps,
    do: Tensor,
    output: OutputProducts,
    saved: AttentionSaved,
    cast_weights: AttentionWeights,
    p: AttentionParams,
    spec: AttentionSpec,
    needs: Needs,
    *,
    kept: Grad,
    base: Tensor,
    scope: str,
    dtype: torch.dtype,
    cut: Cut,
) -> tuple[Tensor, AttentionProducts]:
    """Backpropagate ``do`` to x on all rows, ``[B * N, C]``: ``attention_backward``, then the norm before it. The
    residual path's cotangent is added: ``kept`` at kept rows (None: ``base`` there too), and at the others ``base``,
    or nothing in scope "block"."""
    x_rows = None if spec.rule.key_rows else saved.rows  # which rows of the saved x are the kept ones
    affine = Affine(p.norm_weight, p.norm_bias, spec.norm)
    n = steps.normalise(R.flat(saved.x), affine, spec.dtype, after=base, kept=x_rows, inverse=saved.inverse)
    dn, dn_kept, products = attention_backward(steps, do, output, n, x_rows, saved, cast_weights, p, spec, needs, cut)
    dx = steps.norm_backward_input(
        dn, n, affine, dtype, rows=saved.rows, inverse=saved.inverse, size=base.shape[0],
        dn_kept=dn_kept, kept=kept, base=base, gated=scope == "block", norm_total="attention_norm",
    )  # fmt: skip
    return dx, products


def attention_gradients(products: AttentionProducts, totals: dict[str, Tensor], p: AttentionParams) -> AttentionParams:
    """Return the gradients of all parameters, which ``parameter_gradients`` has yet to cast and scale."""
    heads, (product, dw_inner, db_inner, post) = products.heads, products.output
    total = totals["attention_output"] if post.total is None else post.total
    last = device_of(p.proj_weight).last_layer(product, total, p.proj_weight, p.proj_bias, p.scale)
    dq, dk, dv = (*apart(products.qkv_weight, p.qkv_weights), None, None)[:3]
    return AttentionParams(
        norm_weight=totals.get("attention_norm_weight"),
        norm_bias=totals.get("attention_norm_bias"),
        qkv_weight=dq,
        qkv_bias=with_padding(totals["attention_qkv"], heads.padding),
        q_norm_weight=heads.q_norm_weight,
        q_norm_bias=heads.q_norm_bias,
        k_norm_weight=heads.k_norm_weight,
        k_norm_bias=heads.k_norm_bias,
        proj_weight=last.weight,
        proj_bias=last.bias,
        scale=last.scale,
        inner_norm_weight=dw_inner,
        inner_norm_bias=db_inner,
        post_norm_weight=post.weight,
        post_norm_bias=post.bias,
        score_bias=heads.score_bias,
        rope=heads.rope,
        k_weight=dk,
        v_weight=dv,
    )


def with_padding(total: Tensor, padding: Padding | None) -> Tensor:
    """Return the gradient of the qkv bias: its sum over all rows, plus what it gets from padding."""
    if padding is None:
        return total
    k, v = padding.k.flatten().to(total.dtype), padding.v.flatten().to(total.dtype)
    return total + torch.cat([torch.zeros_like(k), k, v])


class AttentionInputs(NamedTuple):
    """The autograd function's arguments before the parameters; among its gradients, only that of x is not None."""

    x: Any
    rows: R.Rows = None
    heads: Grad = None
    factor: Grad = None
    spec: AttentionSpec | None = None
    options: BackwardOptions | None = None


class Sampled(NamedTuple):
    """What the function saves besides ``AttentionSaved``: kept heads, and stochastic depth's factor per sample."""

    heads: Grad
    factor: Grad


class _AttentionBranch(torch.autograd.Function):
    @staticmethod
    @captured_forward
    def forward(ctx: Any, *flat: Any) -> Tensor:
        (x, rows, heads, factor, spec, options), cut, p = split(flat, AttentionInputs, Cut, AttentionParams)
        x = R.in_rows(x)
        weights = AttentionWeights(*device_of(x).cast(spec.dtype, *attention_weights(p)))
        o, lse, qkv = attention_forward(x, p, weights, spec, cut)
        saved = attention_saved(x, o, lse, qkv, rows, None, heads, spec, options.recompute)
        ctx.save_for_backward(*saved, *Sampled(heads, factor), *cut, *p)
        ctx.static = spec, options, x.dtype
        y = attention_output(o, p, weights, spec)
        if factor is not None:
            y = y * factor.view(-1, 1, 1)
        return x + y

    @staticmethod
    @once
    @captured_backward
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        saved, (heads, factor), cut, p = split(ctx.saved_tensors, AttentionSaved, Sampled, Cut, AttentionParams)
        _, _, needs = split(ctx.needs_input_grad, AttentionInputs, Cut, AttentionParams)
        spec, options, x_dtype = ctx.static
        dtype, shape, dy = saved.o.dtype, dy.shape, R.flat(dy)
        kept_p, kept_spec = (p, spec) if heads is None else select_heads(p, spec, heads)
        device = device_of(saved.x)
        steps = device.steps(saved.x, attention_columns(kept_p, spec))
        weight = options.row_weight
        kept_dy = steps.cotangent(
            dy, saved.rows, factor, p.scale, shape[0], dtype, total="attention_output", weight=weight
        )
        cast_weights = AttentionWeights(*device.cast(dtype, *attention_weights(kept_p)[:3], after=dy))
        do, output = output_backward(kept_dy, saved.o, cast_weights.proj_weight, kept_p, kept_spec, needs)
        del kept_dy
        dx, products = attention_input_backward(
            steps, do, output, saved, cast_weights, kept_p, kept_spec, needs,
            kept=None, base=dy, scope=options.scope, dtype=x_dtype, cut=cut,
        )  # fmt: skip
        grads = attention_gradients(products, steps.totals(), kept_p)
        if heads is not None:
            grads = scatter_heads(grads, p, spec, heads)
        found = parameter_gradients(grads, p, needs, options.weight_scale)
        return *AttentionInputs(dx.view(shape)), *NO_WINDOWS, *found


_run_attention = op(_AttentionBranch)
