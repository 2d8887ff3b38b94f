"""Attention branch: ``y = x + s · gate(γ ∘ (W_o attention(norm(x)) + b_o))`` under one of three rules.

- ``"query"``: kept output rows; K and V of all rows receive what the kept queries send (Eq. 19–23).
- ``"qkv"``: additionally, no gradient reaches a key or value outside the kept rows.
- ``"head"``: all rows, but only the contribution of the kept heads.

The probabilities are those of the full softmax in all of them. Saved: the attention output and log-sum-exp of kept rows
(heads), and x: all rows where K and V of all rows are needed, kept rows under ``"qkv"``.
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
    autocast_dtype,
    last_layer_gradients,
    linear,
    norm,
    norm_again,
    norm_backward,
    parameter_gradients,
    saved_dtype,
    weight_gradient,
)
from .sdpa import attend, attend_backward
from .steps import Affine, Cotangent, Steps, keep, steps_for

RULES = ("query", "qkv", "head")


class Attention(NamedTuple):
    """The parameters of the branch; ``qkv`` stacks the projections to queries, keys and values."""

    norm_weight: Grad
    norm_bias: Grad
    qkv_weight: Tensor
    qkv_bias: Grad
    q_norm_weight: Grad
    q_norm_bias: Grad
    k_norm_weight: Grad
    k_norm_bias: Grad
    proj_weight: Tensor
    proj_bias: Grad
    scale: Grad = None


class AttentionSpec(NamedTuple):
    """What is static about the branch. ``qk_norm`` is None where queries and keys are not normalised."""

    heads: int
    softmax_scale: float
    norm: Norm = Norm()
    qk_norm: Norm | None = None
    fused: bool = True
    rule: str = "query"
    dtype: torch.dtype | None = None


class QKV(NamedTuple):
    """Queries, keys, values ``[B, H, rows, D]``, before any norm of queries and keys."""

    q: Tensor
    k: Tensor
    v: Tensor


def attention_branch(
    x: Tensor,
    rows: R.Rows,
    params: Attention,
    spec: AttentionSpec,
    *,
    places: Tensor | None = None,
    heads: Tensor | None = None,
    factor: Tensor | None = None,
    how: Backward = Backward(),
) -> Tensor:
    """The branch on ``x [B, N, C]``. Rules "query" and "qkv" take ``rows`` (and ``places``, their inverse, if it is at
    hand), rule "head" takes ``heads``: indices."""
    spec = spec._replace(dtype=autocast_dtype(x))
    return _AttentionBranch.apply(x, rows, places, heads, factor, spec, how, *params)


def project(n: Tensor, weight: Tensor, bias: Grad, heads: int, parts: int = 3) -> tuple[Tensor, ...]:
    """Projections of normalised rows ``n [B, rows, C]`` to queries, keys, values: as many as the weight has."""
    y = linear(n, weight, bias, n.dtype)
    return y.view(*n.shape[:2], parts, heads, -1).permute(2, 0, 3, 1, 4).unbind(0)


def normalised(qkv: QKV, p: Attention, spec: AttentionSpec) -> QKV:
    """Q, K, V as the attention kernel takes them."""
    if spec.qk_norm is None:
        return qkv
    q = norm(qkv.q, p.q_norm_weight, p.q_norm_bias, spec.qk_norm, spec.dtype)
    k = norm(qkv.k, p.k_norm_weight, p.k_norm_bias, spec.qk_norm, spec.dtype)
    return QKV(q, k, qkv.v)


def attend_normalised_backward(
    do: Tensor, qkv: QKV, o: Tensor, lse: Tensor, p: Attention, spec: AttentionSpec, needs: Sequence[bool]
) -> tuple[QKV, tuple[Grad, ...]]:
    """Gradients of Q, K, V before their norms, and of these norms' parameters."""
    if spec.qk_norm is None:
        return QKV(*attend_backward(do, *qkv, o, lse, spec.softmax_scale, spec.fused)), (None,) * 4
    q = norm_again(qkv.q, p.q_norm_weight, p.q_norm_bias, spec.qk_norm, spec.dtype)
    k = norm_again(qkv.k, p.k_norm_weight, p.k_norm_bias, spec.qk_norm, spec.dtype)
    dq, dk, dv = attend_backward(do, q.y, k.y, qkv.v, o, lse, spec.softmax_scale, spec.fused)
    dq, dqw, dqb = norm_backward(dq, q, p.q_norm_weight, p.q_norm_bias, spec.qk_norm, needs[:2])
    dk, dkw, dkb = norm_backward(dk, k, p.k_norm_weight, p.k_norm_bias, spec.qk_norm, needs[2:])
    return QKV(dq, dk, dv), (dqw, dqb, dkw, dkb)


def to_rows(x: Tensor) -> Tensor:
    """``[B, H, N, D] -> [B, N, H * D]``."""
    return x.transpose(1, 2).flatten(2)


def to_heads(x: Tensor, samples: int, heads: int) -> Tensor:
    """``[B * N, H * D] -> [B, H, N, D]``."""
    return x.view(samples, -1, heads, x.shape[-1] // heads).transpose(1, 2)


def attention_forward(x: Tensor, p: Attention, spec: AttentionSpec) -> tuple[Tensor, Tensor, QKV]:
    """Attention output ``[B, N, H * D]`` before its projection, log-sum-exp ``[B, N, H]``, and Q, K, V."""
    n = norm(x, p.norm_weight, p.norm_bias, spec.norm, spec.dtype)
    qkv = QKV(*project(n, p.qkv_weight, p.qkv_bias, spec.heads))
    o, lse = attend(*normalised(qkv, p, spec), spec.softmax_scale, spec.fused)
    return to_rows(o), lse.transpose(1, 2), qkv


def attention_output(o: Tensor, p: Attention, spec: AttentionSpec) -> Tensor:
    z = linear(o, p.proj_weight, p.proj_bias, spec.dtype)
    return z if p.scale is None else z * p.scale


def attention_backward(
    steps: Steps,
    dy: Cotangent,
    n: Normed,
    rows: R.Rows,
    o: Tensor,
    lse: Tensor,
    qkv: QKV | None,
    halves: Sequence[Any],
    p: Attention,
    spec: AttentionSpec,
    samples: int,
    needs: Sequence[bool],
) -> tuple[Tensor, Grad, Grad, Grad, tuple[Grad, ...]]:
    """From the cotangent of queries and normalised ``x [B * m, C]``: its gradient, what to add to it at the query rows,
    the gradient of qkv_weight, ``dyᵀ o`` for proj_weight, and the gradients of the norms of queries and keys.

    Rows of ``dy``, ``o [B * k, H * D]`` and ``lse [B * k, H]`` are the queries; ``rows`` says which rows of x they are
    (None: all of them, in order). All rows of x are keys and values. ``qkv`` is recomputed unless given. ``halves`` are
    (qkv_weight, qkv_bias, proj_weight) in the precision of products; ``needs`` as in Attention.
    """
    weight, bias, proj_weight = halves
    width = weight.shape[0] // 3
    do, product = dy.dz @ proj_weight, weight_gradient(dy.dy, o, p.proj_weight, needs[8] or needs[10])
    del dy
    n_q = R.take(n.y, rows)
    if qkv is None:
        n_kv = n.y.view(samples, -1, n.y.shape[1])
        if rows is None:
            qkv = QKV(*project(n_kv, weight, bias, spec.heads))
        else:
            bias_q, bias_kv = (None, None) if bias is None else (bias[:width], bias[width:])
            (q,) = project(n_q.view(samples, -1, n_q.shape[1]), weight[:width], bias_q, spec.heads, 1)
            qkv = QKV(q, *project(n_kv, weight[width:], bias_kv, spec.heads, 2))

    lse = lse.view(samples, -1, spec.heads).transpose(1, 2)
    do, o = to_heads(do, samples, spec.heads), to_heads(o, samples, spec.heads)
    dqkv, d_norms = attend_normalised_backward(do, qkv, o, lse, p, spec, needs[4:8])
    del qkv, do, o
    dq, dk, dv = (R.flat(to_rows(g)).to(n.y.dtype) for g in dqkv)
    del dqkv

    if rows is None:
        d = steps.stack(dq, dk, dv)
        return d @ weight, None, weight_gradient(d, n.y, p.qkv_weight, needs[2]), product, d_norms
    steps.stack(dq)
    d = steps.stack(dk, dv, more=True)
    products = [weight_gradient(g, m, p.qkv_weight, needs[2]) for g, m in ((dq, n_q), (d, n.y))]
    dw = torch.cat(products) if needs[2] else None  # type: ignore[arg-type]
    return d @ weight[width:], dq @ weight[:width], dw, product, d_norms


def attention_input_backward(
    steps: Steps,
    dy: Cotangent,
    tensors: Sequence[Any],
    halves: Sequence[Any],
    p: Attention,
    spec: AttentionSpec,
    needs: Sequence[bool],
    *,
    kept: Grad,
    base: Tensor,
    scope: str,
    dtype: torch.dtype,
) -> tuple[Tensor, Grad, Grad, tuple[Grad, ...]]:
    """``attention_backward`` down to x ``[R, C]``, all rows, the residual path's cotangent included: ``kept`` at kept
    rows (None: ``base`` there too), ``base`` elsewhere unless the scope is "block". With it the gradient of qkv_weight,
    ``dyᵀ o``, and the gradients of the norms of queries and keys. ``tensors``: x, o, lse, q, k, v, rows, places."""
    x, o, lse, q, k, v, rows, places = tensors
    x_rows = rows if spec.rule == "query" else None  # which rows of the saved x are the kept ones
    affine = Affine(p.norm_weight, p.norm_bias, spec.norm)
    n = steps.normalise(R.flat(x), affine, spec.dtype, after=base)
    qkv = None if q is None else QKV(q, k, v)
    dn, dn_q, *grads, d_norms = attention_backward(
        steps, dy, n, x_rows, o, lse, qkv, halves, p, spec, x.shape[0], needs
    )
    dx = steps.norm_backward_input(
        dn, n, affine, dtype, rows=rows, places=places, size=base.shape[0],
        dn_kept=dn_q, kept=kept, base=base, gated=scope == "block",
    )  # fmt: skip
    return dx, *grads, d_norms  # type: ignore[return-value]


def attention_columns(p: Attention) -> int:
    """Of the totals that ``attention_input_backward`` leaves: Σ dQ, dK, dV, and the norm's weight and bias."""
    return p.qkv_weight.shape[0] + 2 * p.qkv_weight.shape[1]


class _AttentionBranch(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        rows: R.Rows,
        places: Grad,
        heads: Tensor | None,
        factor: Grad,
        spec: AttentionSpec,
        how: Backward,
        *params: Grad,
    ) -> Tensor:
        p = Attention(*params)  # type: ignore[arg-type]
        o, lse, qkv = attention_forward(x, p, spec)
        kept = saved(x, o, lse, qkv, rows, heads, spec, how.recompute)
        ctx.save_for_backward(*kept, rows, places, heads, factor, *params)
        ctx.static, ctx.weight_scale = (spec, how.scope, x.dtype), how.weight_scale
        y = attention_output(o, p, spec)
        if factor is not None:
            y = y * factor.view(-1, 1, 1)
        return x + y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        tensors = ctx.saved_tensors  # read once: checkpointing unpacks each tensor a single time
        kept, (heads, factor), p = tensors[:8], tensors[8:10], Attention(*tensors[10:])
        x, o, rows = kept[0], kept[1], kept[6]
        needs = ctx.needs_input_grad[7:]
        spec, scope, dtype = ctx.static
        kept_p, kept_spec = (p, spec) if heads is None else select_heads(p, spec, heads)
        shape, dy = dy.shape, R.flat(dy)
        steps = steps_for(x, x.shape[-1] + attention_columns(kept_p))
        kept_dy = steps.cotangent(dy, rows, factor, p.scale, x.shape[0], o.dtype)
        halves = steps.cast(o.dtype, kept_p.qkv_weight, kept_p.qkv_bias, kept_p.proj_weight)
        dx, dw, product, d_norms = attention_input_backward(
            steps, kept_dy, kept, halves, kept_p, kept_spec, needs, kept=None, base=dy, scope=scope, dtype=dtype
        )
        total, db, dnw, dnb = steps.totals()
        last = last_layer_gradients(product, total, kept_p.proj_weight, p.proj_bias, p.scale, needs[8:])
        grads = Attention(dnw, dnb, dw, db, *d_norms, *last)  # type: ignore[arg-type, call-arg]
        if heads is not None:
            grads = scatter_heads(grads, p, spec, heads)
        return dx.view(shape), *[None] * 6, *parameter_gradients(grads, p, needs, ctx.weight_scale)


def saved(
    x: Tensor,
    o: Tensor,
    lse: Tensor,
    qkv: QKV,
    rows: R.Rows,
    heads: Tensor | None,
    spec: AttentionSpec,
    recompute: bool,
) -> tuple[Grad, ...]:
    """What backward needs: x, o, lse and, unless recomputed, Q, K, V; only the rows and heads that it reads."""
    if heads is not None:
        o = o.view(*o.shape[:2], spec.heads, -1).index_select(2, heads).flatten(2)
        lse = lse.index_select(2, heads)
    kv_rows = rows if spec.rule == "qkv" else None
    x = keep(x, kv_rows, saved_dtype(x, spec.dtype, recompute)).view(x.shape[0], -1, x.shape[-1])
    kept = (x, keep(o, rows), R.take(lse, rows))
    if recompute:
        return *kept, None, None, None
    q, k, v = (t if heads is None else t.index_select(1, heads) for t in qkv)
    return *kept, take_head_rows(q, rows), take_head_rows(k, kv_rows), take_head_rows(v, kv_rows)


def take_head_rows(x: Tensor, rows: R.Rows) -> Tensor:
    """The given rows of ``[B, H, N, D]``."""
    return x if rows is None else to_heads(R.take(to_rows(x), rows), x.shape[0], x.shape[1])


def select_heads(p: Attention, spec: AttentionSpec, heads: Tensor) -> tuple[Attention, AttentionSpec]:
    """The parameters of the given heads alone."""
    weight = p.qkv_weight.view(3, spec.heads, -1, p.qkv_weight.shape[1])
    proj = p.proj_weight.view(p.proj_weight.shape[0], spec.heads, -1)
    bias = p.qkv_bias
    return (
        p._replace(
            qkv_weight=weight.index_select(1, heads).flatten(0, 2),
            qkv_bias=None if bias is None else bias.view(3, spec.heads, -1).index_select(1, heads).flatten(),
            proj_weight=proj.index_select(1, heads).flatten(1),
        ),
        spec._replace(heads=heads.shape[0]),
    )


def scatter_heads(grads: Attention, p: Attention, spec: AttentionSpec, heads: Tensor) -> Attention:
    """Gradients of all heads' parameters: zero outside the given heads."""

    def spread(grad: Grad, param: Grad, shape: tuple[int, ...], dim: int) -> Any:
        if grad is None or param is None:
            return None
        full = torch.zeros_like(param).view(shape)
        kept = grad.view(*shape[:dim], heads.shape[0], *shape[dim + 1 :])
        return full.index_copy(dim, heads, kept).view(param.shape)

    width, channels = p.proj_weight.shape[1] // spec.heads, p.qkv_weight.shape[1]
    shape = (3, spec.heads, width)
    return grads._replace(
        qkv_weight=spread(grads.qkv_weight, p.qkv_weight, (*shape, channels), 1),
        qkv_bias=spread(grads.qkv_bias, p.qkv_bias, shape, 1),
        proj_weight=spread(grads.proj_weight, p.proj_weight, (p.proj_weight.shape[0], spec.heads, width), 1),
    )
