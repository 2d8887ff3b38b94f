"""Attention for kept queries: what each library's module computes, with keys and values from all rows.

Each ``*attention`` function takes the module, its input at kept rows ``x [B, k, C]`` and at all rows
``everything [B, N, C]``, the kept ``positions`` (``[B, k]``, or ``[1, k]`` if samples share them) and the module's
other arguments. It returns the module's output at kept rows. A module without such a function is run on all rows: that
gives the same gradients and takes longer.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .names import qualified

KeptQueryAttention = Callable[..., Any]


def kept_query_attention_of(module: nn.Module, arguments: dict[str, Any]) -> KeptQueryAttention | None:
    """Return the function that computes a module's attention for kept queries. None if the module must run on all rows:
    it is not known, it is called with a mask, or its projection was replaced."""
    masked = arguments.get("attn_mask") is not None or arguments.get("is_causal")
    plain = getattr(module, "qkv", None) is None or type(module.qkv) in (nn.Linear, nn.Conv2d)
    return KEPT_QUERY_ATTENTION.get(qualified(module)) if plain and not masked else None


def attention(m: Any, x: Tensor, everything: Tensor, positions: Tensor, **masks: Any) -> Tensor:
    return attend(m, x, *projections(m, x, everything))


def rotary_attention(
    m: Any, x: Tensor, everything: Tensor, positions: Tensor, rope: Tensor | None = None, **masks: Any
) -> Tensor:
    q, k, v = projections(m, x, everything)
    if rope is not None:
        prefix = m.num_prefix_tokens
        q = rotated(m, q, at(rope, positions[:, prefix:] - prefix)).type_as(v)
        k = rotated(m, k, rope).type_as(v)
    return attend(m, x, q, k, v)


def beit_attention(
    m: Any, x: Tensor, everything: Tensor, positions: Tensor, shared_rel_pos_bias: Tensor | None = None
) -> Tensor:
    return attend(m, x, *projections(m, x, everything), *bias_at(beit_bias(m, shared_rel_pos_bias), positions))


def beit_bias(m: Any, shared: Tensor | None) -> Tensor | None:
    own = None if m.relative_position_bias_table is None else m._get_rel_pos_bias()
    return shared if own is None else own if shared is None else own + shared


def relative_attention(
    m: Any, x: Tensor, everything: Tensor, positions: Tensor, shared_rel_pos: Tensor | None = None
) -> Tensor:
    return attend(m, x, *projections(m, x, everything), *bias_at(relative_bias(m, shared_rel_pos), positions))


def relative_bias(m: Any, shared: Tensor | None) -> Tensor | None:
    return shared if m.rel_pos is None else m.rel_pos.get_bias()


def bias_at(bias: Tensor | None, positions: Tensor) -> tuple[Tensor, ...]:
    return () if bias is None else (at(bias, positions),)


def differential_attention(m: Any, x: Tensor, everything: Tensor, positions: Tensor, **masks: Any) -> Tensor:
    (q1, q2), (k1, k2), v = projections(m, x, everything, pairs=True)
    first = F.scaled_dot_product_attention(q1, k1, v, scale=m.scale)
    second = F.scaled_dot_product_attention(q2, k2, v, scale=m.scale)
    o = m.sub_norm(first - m._compute_lambda().type_as(q1) * second) * (1 - m.lambda_init)
    return output(m, x, o)


def distance_bias(q: Tensor, to_rows: Tensor, to_columns: Tensor) -> Tensor:
    """Return SAM's bias of scores ``[windows, H, k, area]``: products of queries ``[windows, H, k, D]`` with embeddings
    of their distances to every row and to every column of a window, ``[windows, k, n, D]``."""
    by_row, by_column = (torch.einsum("whkd,wknd->whkn", q, table) for table in (to_rows, to_columns))
    return (by_row.unsqueeze(-1) + by_column.unsqueeze(-2)).flatten(-2)


def talking_heads_attention(m: Any, x: Tensor, everything: Tensor, positions: Tensor) -> Tensor:
    """CaiT's attention, in which heads are mixed before and after softmax."""
    q, k, v = projections(m, x, everything)
    scores = m.proj_l((m.scale * q @ k.mT).movedim(1, -1))
    weights = m.proj_w(scores.softmax(-2)).movedim(-1, 1)
    return output(m, x, weights @ v)


def map_attention(
    m: Any, x: Tensor, everything: Tensor, positions: Tensor, shared_rel_pos: Tensor | None = None
) -> Tensor:
    """Attention on maps: ``x [B, C, k, 1]``, ``everything [B, C, H, W]``."""
    weights = by_use(m, m.qkv.weight.flatten(1))
    biases = (None,) * 3 if m.qkv.bias is None else by_use(m, m.qkv.bias)
    q, k, v = (
        F.linear(rows.flatten(2).mT, weight, bias).unflatten(-1, (m.num_heads, m.dim_head)).transpose(1, 2)
        for rows, weight, bias in zip((x, everything, everything), weights, biases, strict=True)
    )
    (bias,) = bias_at(relative_bias(m, shared_rel_pos), positions) or (None,)
    o = F.scaled_dot_product_attention(q, k, v, attn_mask=bias)
    return m.proj(o.mT.flatten(1, 2).unsqueeze(-1))


def by_use(m: Any, parameter: Tensor) -> tuple[Tensor, ...]:
    """Split a parameter of the joint projection into those of queries, keys and values."""
    if m.head_first:
        return tuple(part.flatten(0, 1) for part in parameter.unflatten(0, (m.num_heads, 3, m.dim_head)).unbind(1))
    return parameter.chunk(3)


def multihead_attention(
    m: Any, x: Tensor, everything: Tensor, positions: Tensor, key: Tensor, value: Tensor, *masks: Any, **more: Any
) -> Any:
    return nn.MultiheadAttention.forward(m, x, key, value, *masks, **more)


KEPT_QUERY_ATTENTION: dict[str, KeptQueryAttention] = {
    "timm.layers.attention.Attention": attention,
    "timm.models.vision_transformer.Attention": attention,
    "timm.layers.attention.AttentionRope": rotary_attention,
    "timm.models.eva.EvaAttention": rotary_attention,
    "timm.models.beit.Attention": beit_attention,
    "timm.models.vision_transformer_relpos.RelPosAttention": relative_attention,
    "timm.layers.diff_attention.DiffAttention": differential_attention,
    "timm.models.cait.TalkingHeadAttn": talking_heads_attention,
    "timm.models.metaformer.Attention": attention,
    "timm.models.maxxvit.Attention2d": map_attention,
    "torch.nn.modules.activation.MultiheadAttention": multihead_attention,
}


def projections(
    m: Any, x: Tensor, everything: Tensor, pairs: bool = False, bias: Tensor | None = None
) -> tuple[Any, Any, Tensor]:
    """Return queries ``[B, H, k, D]`` of kept rows, keys and values ``[B, H, N, D]`` of all rows. With ``pairs``, each
    head's queries and keys come as two halves. ``bias`` is used in place of the module's."""
    if m.qkv is None:
        q, k, v = m.q_proj(x), m.k_proj(everything), m.v_proj(everything)
    else:
        if bias is None:
            separate = getattr(m, "q_bias", None) is not None
            bias = torch.cat((m.q_bias, m.k_bias, m.v_bias)) if separate else m.qkv.bias
        width = m.qkv.out_features // 3
        q = F.linear(x, m.qkv.weight[:width], None if bias is None else bias[:width])
        k, v = F.linear(everything, m.qkv.weight[width:], None if bias is None else bias[width:]).chunk(2, -1)
    q, k, v = (t.unflatten(-1, (-1, v.shape[-1] // kv_heads(m))).transpose(1, 2) for t in (q, k, v))
    if pairs:
        return [m.q_norm(t) for t in q.chunk(2, -1)], [m.k_norm(t) for t in k.chunk(2, -1)], v
    return getattr(m, "q_norm", same)(q), getattr(m, "k_norm", same)(k), v


def attend(m: Any, x: Tensor, q: Tensor, k: Tensor, v: Tensor, *biases: Tensor, scale: float | None = None) -> Tensor:
    """Return softmax attention followed by the module's ``output``. ``scale`` is used in place of the module's."""
    groups = m.num_heads // kv_heads(m)
    if groups > 1:
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    bias = sum(biases[1:], biases[0]) if biases else None
    scale = getattr(m, "scale", None) if scale is None else scale
    return output(m, x, F.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=scale))


def output(m: Any, x: Tensor, o: Tensor) -> Tensor:
    """Apply the layers after attention: a norm and a gate, if the module has them, and the projection."""
    o = getattr(m, "norm", same)(o.transpose(1, 2).flatten(2))
    gate = getattr(m, "gate", None)
    return m.proj(o if gate is None else o * gate(x).sigmoid())


def kv_heads(m: Any) -> int:
    return getattr(m, "num_kv_heads", m.num_heads)


def same(x: Tensor) -> Tensor:
    return x


def at(table: Tensor, positions: Tensor) -> Tensor:
    """Return rows of ``table [(B,) (H,) N, D]`` at the kept positions, for every sample if their positions differ."""
    if positions.shape[0] == 1:
        return table.index_select(-2, positions[0])
    table = table.reshape(*[1] * (4 - table.dim()), *table.shape).expand(positions.shape[0], -1, -1, -1)
    return table.take_along_dim(positions[:, None, :, None], 2)


def rotated(m: Any, x: Tensor, rope: Tensor) -> Tensor:
    """Return ``x [B, H, rows, D]`` with all rows but the prefix turned by their rotary embeddings."""
    from timm.layers import apply_rot_embed_cat

    prefix = m.num_prefix_tokens
    turned = apply_rot_embed_cat(x[:, :, prefix:], rope, half=getattr(m, "rotate_half", False))
    return torch.cat([x[:, :, :prefix], turned], 2)
