"""Hugging Face transformers: the image encoders of SAM and SAM-HQ, with attention in windows and of all positions."""

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..sampling import recommended
from .base import Adapter
from .layouts import Grid
from .transformers import family, transformer
from .windowed import ScoreBias, Windowed


def sam_sizes(block: Any, grid: Grid) -> tuple[Grid, Grid]:
    """Windows that are not shifted, or one of all positions."""
    return (block.window_size,) * 2 if block.window_size else grid, (0, 0)


def sam_attention(m: Any, x: Tensor, everything: Tensor, added: ScoreBias, window: Grid) -> Tensor:
    """Scores are ``q · (scale · k + h + w)``: h and w are learned for the distance in height and in width.

    The layer of queries, keys and values is called as a whole: LoRA is often put on it.
    """
    projected = m.qkv(x).chunk(3, -1)[0], *m.qkv(everything).chunk(3, -1)[1:]
    q, k, v = (t.unflatten(-1, (m.num_attention_heads, -1)).transpose(1, 2) for t in projected)
    bias = distances(m, q, added, window) if m.use_rel_pos else None
    o = F.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=m.scale)
    return m.proj(o.transpose(1, 2).flatten(2))


def distances(m: Any, q: Tensor, added: ScoreBias, window: Grid) -> Tensor:
    """``q · (h + w)`` for kept queries ``q [windows, heads, k, D]`` and all keys of their windows."""
    height, width = window
    of_rows = m.get_rel_pos(height, height, m.rel_pos_h).repeat_interleave(
        width, 0
    )  # of all queries: [area, height, D]
    of_columns = m.get_rel_pos(width, width, m.rel_pos_w).repeat(height, 1, 1)
    h, w = (torch.einsum("nhqd,ntqd->nhqt", q, added(table.movedim(1, 0))) for table in (of_rows, of_columns))
    return (h.unsqueeze(-1) + w.unsqueeze(-2)).flatten(-2)


def sam(name: str, module: str, prefix: str) -> Adapter:
    cls = family(module, f"{prefix}Vision")
    block = Windowed(
        attention="attn",
        attention_norm="layer_norm1",
        attention_drop="",
        mlp_norm="layer_norm2",
        mlp_drop="",
        idle=("attn.dropout",),
        classes={"attn": (f"{cls}SdpaAttention",)},
        sizes=sam_sizes,
        kept_query_attention=sam_attention,
    )
    adapter = transformer(
        *(name, cls, block), models=("Encoder",), entry="patch_embed.projection", block="Layer", blocks=("layers",)
    )
    return replace(adapter, recommended=recommended.UNTRIED)


SAM = sam("SAM vision", "sam", "Sam")
SAM_HQ = sam("SAM-HQ vision", "sam_hq", "SamHQ")

ADAPTERS = (SAM, SAM_HQ)
