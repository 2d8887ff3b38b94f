"""What every op computes, written densely with ``gate``. Slow, short and obviously right: the tests' oracle.

``gate`` is the identity in forward; in backward it zeroes the rows outside the kept set. Everything else in this
package is an optimisation of it. Parameters are the named tuples of the fast ops; precision is that of the operands.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from .activations import activation_named
from .downsample import DownsampleParams, DownsampleSpec
from .heads import AttentionParams, AttentionSpec, padding_of
from .layers import norm, stacked
from .mlp import MLPParams, MLPSpec
from .rotary import turned
from .rows import RowWeight, Weight
from .window_attention import MASKED, NO_WINDOWS, Cut, Padding


def gate(y: Tensor, rows: Tensor | None, weight: Weight = None) -> Tensor:
    """Return ``y [B, ..., C]``. Its gradient is zero outside ``rows`` (None: all are kept), and multiplied by how often
    they count inside."""
    if rows is None:
        return y
    kept = torch.where(mask(rows, y.shape[:-1]).unsqueeze(-1), y, y.detach())
    if weight is None:
        return kept
    count = torch.full(y.shape[:-1], 1.0, dtype=y.dtype, device=y.device).flatten(1)
    if isinstance(weight, RowWeight):
        count[:, weight.prefix :] = weight.weight
    else:
        count.view(-1)[rows] = weight.to(y.dtype)
    return y.detach() + count.view(y.shape[:-1]).unsqueeze(-1) * (kept - y.detach())


def mask(rows: Tensor, shape: torch.Size) -> Tensor:
    """True at the kept rows."""
    return torch.zeros(shape.numel(), dtype=torch.bool, device=rows.device).index_fill(0, rows, True).view(shape)


def per_sample(y: Tensor, factor: Tensor | None) -> Tensor:
    return y if factor is None else y * factor.view(-1, *[1] * (y.dim() - 1))


def mlp(x: Tensor, p: MLPParams, spec: MLPSpec) -> Tensor:
    h = F.linear(norm(x, p.norm_weight, p.norm_bias, spec.norm), stacked(p.weights1), p.bias1)
    g = activation_named(spec.act).forward(h)
    if spec.inner_norm is not None:
        g = norm(g, p.inner_norm_weight, p.inner_norm_bias, spec.inner_norm)
    y = F.linear(g, p.weight2, p.bias2)
    if spec.post_norm is not None:
        return norm(y, p.post_norm_weight, p.post_norm_bias, spec.post_norm)
    return y if p.scale is None else y * p.scale


def mlp_branch(
    x: Tensor,
    rows: Tensor | None,
    p: MLPParams,
    spec: MLPSpec,
    factor: Tensor | None = None,
    scope: str = "branch",
    weight: Weight = None,
) -> Tensor:
    """``x + gate(f(x))``, or ``gate(x + f(x))`` in scope "block" (Eq. 4, 5)."""
    y = per_sample(mlp(x, p, spec), factor)
    return x + gate(y, rows, weight) if scope == "branch" else gate(x + y, rows)


def attention(
    x: Tensor, rows: Tensor | None, heads: Tensor | None, p: AttentionParams, spec: AttentionSpec, cut: Cut = NO_WINDOWS
) -> Tensor:
    """Softmax attention with its map written out (Eq. 14, 15); the rule's gates inside attention are applied."""
    n = norm(x, p.norm_weight, p.norm_bias, spec.norm)
    q, k, v = F.linear(n, stacked(p.qkv_weights), p.qkv_bias).unflatten(-1, (3, spec.heads, -1)).permute(2, 0, 3, 1, 4)
    if spec.qk_norm is not None:
        q = norm(q, p.q_norm_weight, p.q_norm_bias, spec.qk_norm)
        k = norm(k, p.k_norm_weight, p.k_norm_bias, spec.qk_norm)
    if p.rope is not None:
        sin, cos = p.rope.chunk(2, -1)
        q, k = (t * cos + turned(t, spec.rotate_half) * sin for t in (q, k))
    if cut.places is not None:
        assert p.score_bias is not None
        kept_keys = rows if spec.rule.key_rows else None
        o = window_attention(q, k, v, p.score_bias, padding_of(p, spec), cut, spec.softmax_scale, kept_keys)
        return project_heads(o, heads if spec.rule.heads else None, p, spec)
    m = q @ k.transpose(-2, -1) * spec.softmax_scale
    if spec.rule.key_rows and rows is not None:
        m, v = drop_qkv(m, v, mask(rows, x.shape[:2])[:, None])
    return project_heads(m.softmax(-1) @ v, heads if spec.rule.heads else None, p, spec)


def drop_qkv(m: Tensor, v: Tensor, kept: Tensor) -> tuple[Tensor, Tensor]:
    """Make ``M_ij`` a constant unless i and j are kept, and ``V_j`` unless j is; ``kept [B, 1, N]``."""
    rows, columns = kept.unsqueeze(-1), kept.unsqueeze(-2)
    return torch.where(rows & columns, m, m.detach()), torch.where(rows, v, v.detach())


def project_heads(o: Tensor, heads: Tensor | None, p: AttentionParams, spec: AttentionSpec) -> Tensor:
    """``γ ∘ (Σ_h o_h W_h + b)``; outside ``heads`` the contribution of a head is a constant."""
    if spec.inner_norm is not None:
        whole = o.transpose(1, 2).flatten(2)
        whole = norm(whole, p.inner_norm_weight, p.inner_norm_bias, spec.inner_norm)
        o = whole.unflatten(2, (spec.heads, -1)).transpose(1, 2)
    weights = p.proj_weight.unflatten(1, (spec.heads, -1))
    scale = 1 if p.scale is None else p.scale
    y = o.new_zeros(()) if p.proj_bias is None else p.proj_bias * scale
    for h in range(spec.heads):
        part = F.linear(o[:, h], weights[:, h]) * scale
        y = y + (part if heads is None or bool((heads == h).any()) else part.detach())
    return y if spec.post_norm is None else norm(y, p.post_norm_weight, p.post_norm_bias, spec.post_norm)


def attention_branch(
    x: Tensor,
    rows: Tensor | None,
    p: AttentionParams,
    spec: AttentionSpec,
    heads: Tensor | None = None,
    factor: Tensor | None = None,
    scope: str = "branch",
    weight: Weight = None,
    cut: Cut = NO_WINDOWS,
) -> Tensor:
    """``x + gate(attention(x))``, or ``gate(x + attention(x))`` in scope "block"; the rule says what is gated."""
    y = per_sample(attention(x, rows, heads, p, spec, cut), factor)
    rows = rows if spec.rule.query_rows else None
    return x + gate(y, rows, weight) if scope == "branch" else gate(x + y, rows)


def transformer_block(
    x: Tensor,
    rows: Tensor | None,
    p1: AttentionParams,
    spec1: AttentionSpec,
    p2: MLPParams,
    spec2: MLPSpec,
    factors: tuple[Tensor | None, Tensor | None] = (None, None),
    scope: str = "branch",
    weight: Weight = None,
    cut: Cut = NO_WINDOWS,
) -> Tensor:
    """The attention branch, then the MLP branch, on the same kept rows: y. With a weight, ``x + gate(y − x)``.

    Under rule "exact" only the MLP branch is gated and weighted.
    """
    attention_factor, mlp_factor = factors
    middle = attention_branch(x, rows, p1, spec1, None, attention_factor, scope, cut=cut)
    if not spec1.rule.query_rows:
        return mlp_branch(middle, rows, p2, spec2, mlp_factor, scope, weight)
    y = mlp_branch(middle, rows, p2, spec2, mlp_factor, scope)
    return y if weight is None else x + gate(y - x, rows, weight)


def downsample(
    x: Tensor, rows: Tensor | None, p: DownsampleParams, spec: DownsampleSpec, weight: Weight = None
) -> Tensor:
    """``gate(conv(norm(x)))`` on ``x [B, C, H, W]``; ``rows`` are output positions. Patches do not overlap (Eq. 6)."""
    n = norm(x.permute(0, 2, 3, 1), p.norm_weight, p.norm_bias, spec.norm).permute(0, 3, 1, 2)
    y = F.conv2d(n, p.weight, p.bias, spec.stride).permute(0, 2, 3, 1)
    return gate(y, rows, weight).permute(0, 3, 1, 2)


def patch_embedding(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The convolution whose stride is its kernel, of ``x [B, C, *size]``; not gated."""
    conv = F.conv3d if weight.dim() == 5 else F.conv2d
    return conv(x, weight, bias, stride=weight.shape[2:])


def rerun(
    block: Callable[[Tensor], Tensor],
    x: Tensor,
    residual: Tensor | None,
    rows: Tensor | None,
    scope: str = "branch",
    weight: Weight = None,
) -> Tensor:
    """``gate(block(x))``, but in scope "branch" the residual path, a part of the block, keeps its gradient at dropped
    rows. With a weight, ``residual + gate(block(x) − residual)``.
    """
    y = block(x)
    if rows is None or residual is None or scope == "block":
        return gate(y, rows, weight)
    if weight is not None:
        return residual + gate(y - residual, rows, weight)
    path = residual - residual.detach()  # zero, with a gradient
    return torch.where(mask(rows, y.shape[:-1]).unsqueeze(-1), y, y.detach() + path)


def window_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor,
    padding: Padding | None,
    cut: Cut,
    scale: float,
    kept_keys: Tensor | None = None,
) -> Tensor:
    """Attention of rows ``[B, heads, n, D]`` in their windows, as one map over all slots of all windows.

    A row sees the slots of its own window, padding included. ``bias [heads, area, area]`` is indexed by slots of a
    window; scores across regions get −100 added. Under rule "qkv", ``kept_keys`` are the kept rows: a score is a
    constant unless its query and its key are kept, a value unless it is.
    """
    assert cut.places is not None
    places, area, n = cut.places.flatten(), bias.shape[-1], q.shape[2]
    slots, slot = torch.arange(len(places), device=q.device), places.argsort()[:n]
    k, v = (in_slots(t, places, None if padding is None else padding[i]) for i, t in enumerate((k, v)))
    m = q @ k.mT * scale + bias[:, (slot % area)[:, None], slots % area]
    if cut.regions is not None:
        regions = cut.regions.flatten()
        m = m + MASKED * (regions[slot][:, None] != regions)
    if kept_keys is not None:
        rows = mask(kept_keys, torch.Size((q.shape[0], n)))
        columns = F.pad(rows, (0, len(places) - n))[:, places]
        m = torch.where((rows[:, :, None] & columns[:, None])[:, None], m, m.detach())
        v = torch.where(columns[:, None, :, None], v, v.detach())
    outside = (slot // area)[:, None] != slots // area
    return m.masked_fill(outside, -torch.inf).softmax(-1) @ v


def in_slots(x: Tensor, places: Tensor, padding: Tensor | None) -> Tensor:
    """Rows ``[B, heads, n, D]`` in the order of slots; slots without a row hold ``padding`` (default: zeros)."""
    beyond = x.new_zeros(x.shape[1], x.shape[3]) if padding is None else padding
    extra = beyond[:, None].expand(x.shape[0], -1, len(places) - x.shape[2], -1)
    return torch.cat([x, extra], 2)[:, :, places]


def encode_frames(encoder: Callable[[Tensor], Tensor], video: Tensor, keep: Tensor) -> Tensor:
    """The encoder on every frame of ``video [B, T, ...]``, gated to the kept frames."""
    return sbp(lambda v: encoder(v.flatten(0, 1)).unflatten(0, v.shape[:2]), video, keep, 1)


def sbp(fn: Callable[[Tensor], Tensor], x: Tensor, keep: Tensor, dim: int) -> Tensor:
    """``gate(fn(x))`` along ``dim``: positions outside ``keep`` are constants (Algorithm 1)."""
    y = fn(x)
    kept = torch.zeros(x.shape[dim], dtype=torch.bool).index_fill(0, keep, True)
    return torch.where(kept.view(-1, *[1] * (y.dim() - 1 - dim % y.dim())), y, y.detach())
