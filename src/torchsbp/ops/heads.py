"""Queries, keys and values by head: projection, norm and rotation, and the parameters of selected heads."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import rows as R
from .device import device_of
from .layers import Grad, Norm, apart, linear, norm, norm_again, norm_backward, stacked
from .named import Needs
from .rotary import rope_gradient
from .rules import RULES, Rule
from .sdpa import attend, attend_backward
from .window_attention import Cut, Padding, WindowGradients


class AttentionParams(NamedTuple):
    """The parameters of an attention branch.

    ``qkv`` stacks the projections to queries, keys and values. If the model has three weights instead, ``qkv_weight``
    is that of queries, ``k_weight`` and ``v_weight`` are the others. ``inner_norm`` stands before the last projection,
    ``post_norm`` behind the branch, which then has no scale. ``score_bias [H, area, area]`` is added to the scores of a
    window; ``rope`` has the sines and cosines of rotary embeddings (``rotary.py``).
    """

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
    inner_norm_weight: Grad = None
    inner_norm_bias: Grad = None
    post_norm_weight: Grad = None
    post_norm_bias: Grad = None
    score_bias: Grad = None
    rope: Grad = None
    k_weight: Grad = None
    v_weight: Grad = None

    @property
    def qkv_weights(self) -> tuple[Any, ...]:
        """The stacked weight alone, or those of queries, keys and values."""
        return tuple(w for w in (self.qkv_weight, self.k_weight, self.v_weight) if w is not None)


class AttentionSpec(NamedTuple):
    """The static part of the branch. ``fused``: the model computes attention by ``F.scaled_dot_product_attention``.
    ``dtype`` is the precision of products; ``rotate_half`` says which pairs rotary embeddings turn (``rotary.py``).
    ``qk_norm``, ``inner_norm`` and ``post_norm`` are None where there is none."""

    heads: int
    softmax_scale: float
    norm: Norm = Norm()
    qk_norm: Norm | None = None
    fused: bool = True
    rule: Rule = RULES["query"]
    dtype: torch.dtype | None = None
    rotate_half: bool = False
    inner_norm: Norm | None = None
    post_norm: Norm | None = None


class AttentionWeights(NamedTuple):
    """Weights and biases in the precision of products; ``proj_bias`` only where the output is computed."""

    qkv_weight: Tensor
    qkv_bias: Grad
    proj_weight: Tensor
    proj_bias: Grad = None


def attention_weights(p: AttentionParams) -> tuple[Any, ...]:
    """Return the parameters that ``AttentionWeights`` holds, before they are cast."""
    return p.qkv_weights, p.qkv_bias, p.proj_weight, p.proj_bias


class QKV(NamedTuple):
    """Queries, keys, values ``[B, H, rows, D]``, before any norm of queries and keys."""

    q: Tensor
    k: Tensor
    v: Tensor


class HeadGradients(NamedTuple):
    """Gradients of the norms of queries and keys, the scores' bias, the key and value of padding, and the angles."""

    q_norm_weight: Grad = None
    q_norm_bias: Grad = None
    k_norm_weight: Grad = None
    k_norm_bias: Grad = None
    score_bias: Grad = None
    padding: Padding | None = None
    rope: Grad = None


def project(n: Tensor, weight: Tensor, bias: Grad, heads: int, parts: int = 3) -> tuple[Tensor, ...]:
    """Project normalised rows ``n [B, rows, C]`` to those of Q, K, V that the weight stacks: ``parts`` of them."""
    y = linear(n, weight, bias, n.dtype)
    return y.view(*n.shape[:2], parts, heads, -1).permute(2, 0, 3, 1, 4).unbind(0)


def project_kept(n_q: Tensor, n: Tensor, weight: Tensor, bias: Grad, heads: int) -> QKV:
    """Project the rows ``n_q [B, k, C]`` to queries, the rows ``n [B, N, C]`` to keys and values."""
    sizes = weight.shape[0] // 3, weight.shape[0] // 3 * 2
    weight_q, weight_kv = weight.split_with_sizes(sizes)
    bias_q, bias_kv = (None, None) if bias is None else bias.split_with_sizes(sizes)
    (q,) = project(n_q, weight_q, bias_q, heads, 1)
    return QKV(q, *project(n, weight_kv, bias_kv, heads, 2))


def normalised(qkv: QKV, p: AttentionParams, spec: AttentionSpec) -> QKV:
    """Return Q, K, V of all rows as attention takes them: Q and K normalised and rotated, where the branch does so."""
    q, k, v = qkv
    if spec.qk_norm is not None:
        q = norm(q, p.q_norm_weight, p.q_norm_bias, spec.qk_norm, spec.dtype)
        k = norm(k, p.k_norm_weight, p.k_norm_bias, spec.qk_norm, spec.dtype)
    if p.rope is not None:
        q, k = (device_of(t).rotate(t, p.rope, None, spec.rotate_half) for t in (q, k))
    return QKV(q, k, v)


def padding_of(p: AttentionParams, spec: AttentionSpec) -> Padding | None:
    """Return the key and value of slots outside of the grid (None: zeros). The projection's input is zero there, so
    they are its bias."""
    if p.qkv_bias is None:
        return None
    _, k, v = normalised(QKV(*p.qkv_bias.view(3, 1, spec.heads, 1, -1).unbind(0)), p, spec)
    return Padding(k[0, :, 0], v[0, :, 0])


def attend_normalised(qkv: QKV, p: AttentionParams, spec: AttentionSpec, cut: Cut) -> tuple[Tensor, Tensor]:
    """Return the output and log-sum-exp of attention, in windows if ``cut`` has any."""
    q, k, v = normalised(qkv, p, spec)
    if cut.places is None:
        return attend(q, k, v, spec.softmax_scale, spec.fused)
    assert p.score_bias is not None
    return device_of(q).windows(q).forward(q, k, v, p.score_bias, padding_of(p, spec), cut, spec.softmax_scale)


def attend_normalised_backward(
    do: Tensor,
    qkv: QKV,
    o: Tensor,
    lse: Tensor,
    rows: R.Rows,
    cut: Cut,
    p: AttentionParams,
    spec: AttentionSpec,
    needs: Needs,
    overwrite: bool,
) -> tuple[QKV, HeadGradients]:
    """Return the gradients of Q, K, V before norms and rotation, and those of ``HeadGradients``. The queries are those
    of ``rows``. Q and K may be overwritten if ``overwrite``."""
    if spec.qk_norm is None and p.rope is None and cut.places is None:  # nothing but attention
        return QKV(*attend_backward(do, *qkv, o, lse, spec.softmax_scale, spec.fused)), HeadGradients()
    overwrite = overwrite and not needs.rope
    q = Turned(qkv.q, p.q_norm_weight, p.q_norm_bias, rows, p, spec, overwrite)
    k = Turned(qkv.k, p.k_norm_weight, p.k_norm_bias, rows if spec.rule.key_rows else None, p, spec, overwrite)
    d_bias: Grad = None
    d_padding: Padding | None = None
    if cut.places is None:
        dq, dk, dv = attend_backward(do, q.y, k.y, qkv.v, o, lse, spec.softmax_scale, spec.fused)
    else:
        dq, dk, dv, d_bias, d_padding = in_windows_backward(
            do, QKV(q.y, k.y, qkv.v), o, lse, rows, cut, p, spec, needs.score_bias
        )
    dq, dqw, dqb, dq_rope = q.backward(dq, needs.q_norm_weight, needs.q_norm_bias, needs.rope)
    dk, dkw, dkb, dk_rope = k.backward(dk, needs.k_norm_weight, needs.k_norm_bias, needs.rope)
    d_rope = None if dq_rope is None or dk_rope is None else dq_rope + dk_rope
    return QKV(dq, dk, dv), HeadGradients(dqw, dqb, dkw, dkb, d_bias, padding_backward(d_padding, p, spec), d_rope)


def in_windows_backward(
    do: Tensor,
    qkv: QKV,
    o: Tensor,
    lse: Tensor,
    rows: R.Rows,
    cut: Cut,
    p: AttentionParams,
    spec: AttentionSpec,
    needs_bias: bool,
) -> WindowGradients:
    """Backward of attention in windows. If windows keep unequally many queries, these are put where they are among all
    rows, and windows are taken whole."""
    assert p.score_bias is not None
    (q, k, v), unequal = qkv, cut.kept is None and rows is not None
    if unequal:
        n = k.shape[2]
        do, q, o = (put_head_rows(t, rows, n) for t in (do, q, o))
        lse = put_head_rows(lse.unsqueeze(-1), rows, n, torch.inf).squeeze(-1)  # no query there, no probabilities
    found = device_of(do).windows(do).backward(
        do, q, k, v, o, lse, p.score_bias, padding_of(p, spec), cut, spec.softmax_scale, spec.rule.key_rows, needs_bias
    )  # fmt: skip
    return found._replace(q=take_head_rows(found.q, rows)) if unequal else found


def padding_backward(d_padding: Padding | None, p: AttentionParams, spec: AttentionSpec) -> Padding | None:
    """Backpropagate through the norm of keys to padding's key."""
    if d_padding is None or spec.qk_norm is None or p.qkv_bias is None:
        return d_padding
    assert p.k_norm_weight is None, "padding's part in the gradient of a norm of keys is not computed"
    k = p.qkv_bias.view(3, 1, spec.heads, 1, -1)[1]
    dk, *_ = Turned(k, None, None, None, p, spec).backward(d_padding.k[None, :, None], False, False, False)
    return Padding(dk[0, :, 0], d_padding.v)


class Turned:
    """Queries or keys ``x [B, H, m, D]`` normalised and rotated again for backward, where the branch does so: ``y``. x
    may be overwritten if ``overwrite``."""

    def __init__(
        self,
        x: Tensor,
        weight: Grad,
        bias: Grad,
        rows: R.Rows,
        p: AttentionParams,
        spec: AttentionSpec,
        overwrite: bool = False,
    ) -> None:
        self.weight, self.bias, self.rows, self.rope, self.spec = weight, bias, rows, p.rope, spec
        self.norm = None if spec.qk_norm is None else norm_again(x, weight, bias, spec.qk_norm, spec.dtype)
        self.x = x if self.norm is None else self.norm.y
        self.y = self.x
        if p.rope is not None:
            self.y = device_of(x).rotate(self.x, p.rope, rows, spec.rotate_half, overwrite=overwrite)

    def backward(
        self, dy: Tensor, needs_weight: bool, needs_bias: bool, needs_rope: bool
    ) -> tuple[Tensor, Grad, Grad, Grad]:
        """Return the gradients of the input, the norm's weight and bias, and the angles."""
        d_rope, half = None, self.spec.rotate_half
        if self.rope is not None:
            d_rope = rope_gradient(dy, self.x, self.rope, self.rows, half) if needs_rope else None
            dy = device_of(dy).rotate(dy, self.rope, self.rows, half, back=True, overwrite=True)
        if self.norm is None or self.spec.qk_norm is None:
            return dy, None, None, d_rope
        return *norm_backward(
            dy, self.norm, self.weight, self.bias, self.spec.qk_norm, needs_weight, needs_bias
        ), d_rope


def to_rows(x: Tensor) -> Tensor:
    """``[B, H, N, D] -> [B, N, H * D]``."""
    return x.transpose(1, 2).flatten(2)


def to_heads(x: Tensor, samples: int, heads: int) -> Tensor:
    """``[B * N, H * D] -> [B, H, N, D]``."""
    return x.view(samples, -1, heads, x.shape[-1] // heads).transpose(1, 2)


def take_head_rows(x: Tensor, rows: R.Rows) -> Tensor:
    """The given rows of ``[B, H, N, D]``."""
    return x if rows is None else to_heads(R.take(to_rows(x), rows), x.shape[0], x.shape[1])


def put_head_rows(x: Tensor, rows: R.Rows, n: int, beyond: float = 0.0) -> Tensor:
    """Undo ``take_head_rows``: return ``[B, H, n, D]`` with ``beyond`` in all other rows."""
    if rows is None:
        return x
    batch, heads, _, width = x.shape
    base = x.new_full((batch, n, heads * width), beyond)
    return to_heads(R.flat(R.put(base, rows, R.flat(to_rows(x)))), batch, heads)


def select_heads(p: AttentionParams, spec: AttentionSpec, heads: Tensor) -> tuple[AttentionParams, AttentionSpec]:
    """Return the parameters, and the spec, of the given heads alone."""
    weight = stacked(p.qkv_weights).view(3, spec.heads, -1, p.qkv_weight.shape[1])
    proj = p.proj_weight.view(p.proj_weight.shape[0], spec.heads, -1)
    bias = p.qkv_bias
    return (
        p._replace(
            qkv_weight=weight.index_select(1, heads).flatten(0, 2),
            qkv_bias=None if bias is None else bias.view(3, spec.heads, -1).index_select(1, heads).flatten(),
            proj_weight=proj.index_select(1, heads).flatten(1),
            score_bias=None if p.score_bias is None else p.score_bias.index_select(0, heads),
            rope=p.rope if p.rope is None or p.rope.dim() == 2 else p.rope.index_select(0, heads),
            k_weight=None,
            v_weight=None,
        ),
        spec._replace(heads=heads.shape[0]),
    )


def scatter_heads(grads: AttentionParams, p: AttentionParams, spec: AttentionSpec, heads: Tensor) -> AttentionParams:
    """Undo ``select_heads`` for gradients: those of all heads' parameters, zero outside the given heads."""

    def spread(grad: Grad, param: Grad, shape: tuple[int, ...], dim: int) -> Any:
        if grad is None or param is None:
            return None
        full = torch.zeros_like(param).view(shape)
        kept = grad.to(param.dtype).view(*shape[:dim], heads.shape[0], *shape[dim + 1 :])
        return full.index_copy(dim, heads, kept).view(param.shape)

    width, channels = p.proj_weight.shape[1] // spec.heads, p.qkv_weight.shape[1]
    shape = (3, spec.heads, width)
    d_qkv = spread(grads.qkv_weight, stacked(p.qkv_weights), (*shape, channels), 1)
    dq, dk, dv = (*apart(d_qkv, p.qkv_weights), None, None)[:3]
    return grads._replace(
        qkv_weight=dq,
        k_weight=dk,
        v_weight=dv,
        qkv_bias=spread(grads.qkv_bias, p.qkv_bias, shape, 1),
        proj_weight=spread(grads.proj_weight, p.proj_weight, (p.proj_weight.shape[0], spec.heads, width), 1),
        score_bias=None if p.score_bias is None else spread(grads.score_bias, p.score_bias, p.score_bias.shape, 0),
        rope=grads.rope if p.rope is None or p.rope.dim() == 2 else spread(grads.rope, p.rope, p.rope.shape, 0),
    )
