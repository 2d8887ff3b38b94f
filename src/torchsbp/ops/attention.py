"""Attention branch: ``y = x + s · gate(γ ∘ (W_o attention(norm(x)) + b_o))`` under one of three rules.

- ``"query"``: kept output rows; K and V of all rows receive what the kept queries send (Eq. 19–23).
- ``"qkv"``: additionally, no gradient reaches a key or value outside the kept rows.
- ``"head"``: all rows, but only the contribution of the kept heads.

The probabilities are those of the full softmax in all of them. Saved: the attention output and log-sum-exp of kept rows
(heads), and x: all rows where K and V of all rows are needed, kept rows under ``"qkv"``.
"""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from . import opaque
from . import rows as R
from .fused import Cotangent, cotangent, norm_backward, norm_backward_spread, normalise
from .layers import (
    Backward,
    Grad,
    Norm,
    Normed,
    autocast_dtype,
    bias_gradient,
    cast,
    linear,
    norm,
    norm_again,
    scaled,
    scaled_linear_gradients,
    weight_gradient,
)
from .layers import norm_backward as head_norm_backward
from .sdpa import attend, attend_backward

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
    heads: Tensor | None = None,
    factor: Tensor | None = None,
    how: Backward = Backward(),
) -> Tensor:
    """The branch on ``x [B, N, C]``. Rules "query" and "qkv" take ``rows``, rule "head" takes ``heads``: indices."""
    spec = spec._replace(dtype=autocast_dtype(x))
    return _AttentionBranch.apply(x, rows, heads, factor, spec, how, *params)


def project(n: Tensor, p: Attention, spec: AttentionSpec) -> QKV:
    """Queries, keys and values of normalised rows ``n [B, rows, C]``."""
    qkv = linear(n, p.qkv_weight, p.qkv_bias, spec.dtype)
    return QKV(*qkv.view(*n.shape[:2], 3, spec.heads, -1).permute(2, 0, 3, 1, 4).unbind(0))


def project_apart(n_q: Tensor, n_kv: Tensor, p: Attention, spec: AttentionSpec) -> QKV:
    """Queries of some rows, keys and values of others."""
    width = p.qkv_weight.shape[0] // 3
    bias_q, bias_kv = (None, None) if p.qkv_bias is None else (p.qkv_bias[:width], p.qkv_bias[width:])
    q = linear(n_q, p.qkv_weight[:width], bias_q, spec.dtype)
    kv = linear(n_kv, p.qkv_weight[width:], bias_kv, spec.dtype)
    q = q.view(*n_q.shape[:2], spec.heads, -1).transpose(1, 2)
    k, v = kv.view(*n_kv.shape[:2], 2, spec.heads, -1).permute(2, 0, 3, 1, 4).unbind(0)
    return QKV(q, k, v)


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
    dq, dqw, dqb = head_norm_backward(dq, q, p.q_norm_weight, p.q_norm_bias, spec.qk_norm, needs[:2])
    dk, dkw, dkb = head_norm_backward(dk, k, p.k_norm_weight, p.k_norm_bias, spec.qk_norm, needs[2:])
    return QKV(dq, dk, dv), (dqw, dqb, dkw, dkb)


def to_rows(x: Tensor) -> Tensor:
    """``[B, H, N, D] -> [B, N, H * D]``."""
    return x.transpose(1, 2).flatten(2)


def to_heads(x: Tensor, samples: int, heads: int) -> Tensor:
    """``[B * N, H * D] -> [B, H, N, D]``."""
    return x.view(samples, -1, heads, x.shape[-1] // heads).transpose(1, 2)


def attention_forward(x: Tensor, p: Attention, spec: AttentionSpec) -> tuple[Tensor, Tensor, QKV]:
    """Attention output ``[B, N, H * D]`` before its projection, log-sum-exp ``[B, N, H]``, and Q, K, V."""
    qkv = project(norm(x, p.norm_weight, p.norm_bias, spec.norm, spec.dtype), p, spec)
    o, lse = attend(*normalised(qkv, p, spec), spec.softmax_scale, spec.fused)
    return to_rows(o), lse.transpose(1, 2), qkv


def attention_output(o: Tensor, p: Attention, spec: AttentionSpec) -> Tensor:
    z = linear(o, p.proj_weight, p.proj_bias, spec.dtype)
    return z if p.scale is None else z * p.scale


def attention_backward(
    dy: Cotangent,
    x: Tensor,
    rows: R.Rows,
    o: Tensor,
    lse: Tensor,
    qkv: QKV | None,
    p: Attention,
    spec: AttentionSpec,
    needs: Sequence[bool],
) -> tuple[Tensor, Grad, Normed, tuple[Grad, ...]]:
    """From the cotangent of queries and ``x [B, m, C]``: the gradient of normalised x, what to add to it at the query
    rows, normalised x itself, and the gradients of all parameters but its norm's, in their order; ``needs`` for them.

    Rows of ``dy``, ``o [B * k, H * D]`` and ``lse [B * k, H]`` are the queries; ``rows`` says which rows of x they are
    (None: all of them, in order). All rows of x are keys and values. ``qkv`` is recomputed unless given.
    """
    samples, dtype = x.shape[0], dy.dy.dtype
    do = dy.dz @ cast(p.proj_weight, dtype)
    d_proj = scaled_linear_gradients(dy.dy, dy.total, o, p.proj_weight, p.proj_bias, p.scale, needs[6:])
    del dy
    n = normalise(R.flat(x), p.norm_weight, p.norm_bias, spec.norm, spec.dtype)
    n_q = R.take(n.y, rows)
    weight = cast(p.qkv_weight, dtype)
    if qkv is None:
        half, channels = p._replace(qkv_weight=weight), x.shape[-1]
        n_kv, n_q3 = n.y.view(samples, -1, channels), n_q.view(samples, -1, channels)
        qkv = project(n_kv, half, spec) if rows is None else project_apart(n_q3, n_kv, half, spec)

    lse = lse.view(samples, -1, spec.heads).transpose(1, 2)
    do, o = to_heads(do, samples, spec.heads), to_heads(o, samples, spec.heads)
    dqkv, d_norms = attend_normalised_backward(do, qkv, o, lse, p, spec, needs[2:6])
    del qkv, do, o
    dq, dk, dv = (R.flat(to_rows(g)).to(dtype) for g in dqkv)
    del dqkv

    need_weight, need_bias = needs[:2]
    if rows is None:
        d = torch.cat([dq, dk, dv], 1)
        dw, db = weight_gradient(d, n.y, p.qkv_weight, need_weight), bias_gradient(d, p.qkv_weight, need_bias)
        return d @ weight, None, n, (dw, db, *d_norms, *d_proj)
    width = weight.shape[0] // 3
    d = torch.cat([dk, dv], 1)
    dw = stack(weight_gradient(g, m, p.qkv_weight, need_weight) for g, m in ((dq, n_q), (d, n.y)))
    db = stack(bias_gradient(g, p.qkv_weight, need_bias) for g in (dq, d))
    return d @ weight[width:], dq @ weight[:width], n, (dw, db, *d_norms, *d_proj)


def stack(grads: Iterable[Grad]) -> Grad:
    given = [g for g in grads if g is not None]
    return torch.cat(given) if given else None


class _AttentionBranch(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        rows: R.Rows,
        heads: Tensor | None,
        factor: Grad,
        spec: AttentionSpec,
        how: Backward,
        *params: Grad,
    ) -> Tensor:
        p = Attention(*params)  # type: ignore[arg-type]
        o, lse, qkv = attention_forward(x, p, spec)
        kept = saved(x, o, lse, None if how.recompute else qkv, rows, heads, spec)
        ctx.save_for_backward(*kept, rows, heads, factor, *params)
        ctx.static, ctx.weight_scale = (spec, how.scope), how.weight_scale
        y = attention_output(o, p, spec)
        if factor is not None:
            y = y * factor.view(-1, 1, 1)
        return x + y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        tensors = ctx.saved_tensors  # read once: checkpointing unpacks each tensor a single time
        needs = ctx.needs_input_grad[6:]
        dx, grads = opaque.backward("attention_branch", dy, tensors[:9], tensors[9:], needs, dy.shape, ctx.static)
        return dx, *[None] * 5, *scaled(grads, ctx.weight_scale)


def _attention_branch_backward(
    dy: Tensor,
    saved: Sequence[Any],
    params: Sequence[Any],
    needs: Sequence[bool],
    shape: Sequence[int],
    static: tuple[AttentionSpec, str],
) -> tuple[Tensor, opaque.Grads]:
    x, o, lse, q, k, v, rows, heads, factor = saved
    spec, scope = static
    p = Attention(*params)
    kept_p, kept_spec = (p, spec) if heads is None else select_heads(p, spec, heads)
    dy = R.flat(dy)
    kept_dy = cotangent(dy, rows, factor, p.scale, x.shape[0], o.dtype)
    qkv = None if q is None else QKV(q, k, v)
    dx, grads = attention_input_backward(kept_dy, x, rows, o, lse, qkv, kept_p, kept_spec, needs, None, dy, scope)
    if heads is not None:
        grads = scatter_heads(grads, p, spec, heads)
    return dx.view(shape), list(grads)


def attention_input_backward(
    dy: Cotangent,
    x: Tensor,
    rows: R.Rows,
    o: Tensor,
    lse: Tensor,
    qkv: QKV | None,
    p: Attention,
    spec: AttentionSpec,
    needs: Sequence[bool],
    kept: Grad,
    base: Tensor,
    scope: str,
) -> tuple[Tensor, Attention]:
    """``attention_backward`` down to x ``[R, C]``, all rows: the norm's part too, and the residual path's cotangent:
    ``kept`` at kept rows (None: ``base`` there too), ``base`` elsewhere, unless the scope is "block"."""
    x_rows = rows if spec.rule == "query" else None  # which rows of the saved x are the kept ones
    dn, dn_q, n, grads = attention_backward(dy, x, x_rows, o, lse, qkv, p, spec, needs[2:])
    norm_args = (dn, n, p.norm_weight, p.norm_bias, spec.norm, needs[:2])
    if rows is None:
        dx, dnw, dnb = norm_backward(*norm_args, base if kept is None else kept)
    else:
        dx, dnw, dnb = norm_backward_spread(
            *norm_args, rows, base.shape[0], x.dtype, dn_kept=dn_q, kept=kept, base=base, gated=scope == "block"
        )
    return dx.to(x.dtype), Attention(dnw, dnb, *grads)  # type: ignore[arg-type]


opaque.register("attention_branch", _attention_branch_backward, AttentionSpec, Norm)


def saved(
    x: Tensor, o: Tensor, lse: Tensor, qkv: QKV | None, rows: R.Rows, heads: Tensor | None, spec: AttentionSpec
) -> tuple[Grad, ...]:
    """What backward needs: x, o, lse and, unless recomputed, Q, K, V; only the rows and heads that it reads."""
    if heads is not None:
        o = o.view(*o.shape[:2], spec.heads, -1).index_select(2, heads).flatten(2)
        lse = lse.index_select(2, heads)
    if spec.rule == "qkv" and rows is not None:
        x = R.take(x, rows).view(x.shape[0], -1, x.shape[-1])
    kept = (x, R.take(o, rows), R.take(lse, rows))
    if qkv is None:
        return *kept, None, None, None
    q, k, v = (t if heads is None else t.index_select(1, heads) for t in qkv)
    kv_rows = rows if spec.rule == "qkv" else None
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
