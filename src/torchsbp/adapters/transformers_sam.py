"""Hugging Face transformers: the image encoders of SAM, SAM-HQ and SAM 2, with attention in windows or among all
positions. No contest (docs/study) has been run for any of them."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from .base import Adapter, Plain
from .layouts import Grid, Layout, Stage, Stride, early_stages
from .names import find
from .queries import distance_bias
from .transformers import check_version, family, transformer
from .windowed import ScoreBias, Windowed


def sam_sizes(block: Any, grid: Grid) -> tuple[Grid, Grid]:
    """Return windows that are not shifted, or one window of all positions."""
    return (block.window_size,) * 2 if block.window_size else grid, (0, 0)


def sam_attention(m: Any, x: Tensor, everything: Tensor, added: ScoreBias, window: Grid) -> Tensor:
    """SAM's attention: scores are ``q · (scale · k + h + w)``, with h and w learned for distances in height and width.

    The layer ``qkv`` is called, instead of parts of its weight being read, as LoRA is often put on it.
    """
    projected = m.qkv(x).chunk(3, -1)[0], *m.qkv(everything).chunk(3, -1)[1:]
    q, k, v = (t.unflatten(-1, (m.num_attention_heads, -1)).transpose(1, 2) for t in projected)
    bias = distances(m, q, added, window) if getattr(m, "use_rel_pos", False) else None  # SAM 2 has none
    o = F.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=m.scale)
    return m.proj(o.transpose(1, 2).flatten(2))


def distances(m: Any, q: Tensor, added: ScoreBias, window: Grid) -> Tensor:
    """Return ``q · (h + w)`` for kept queries ``q [windows, heads, k, D]`` and all keys of their windows."""
    height, width = window
    # Of all queries, [area, height, D] and [area, width, D].
    to_rows = m.get_rel_pos(height, height, m.rel_pos_h).repeat_interleave(width, 0)
    to_columns = m.get_rel_pos(width, width, m.rel_pos_w).repeat(height, 1, 1)
    return distance_bias(q, *(added(table.movedim(1, 0)).transpose(1, 2) for table in (to_rows, to_columns)))


BLOCK = Windowed(
    attention="attn",
    attention_norm="layer_norm1",
    attention_drop="",
    mlp_norm="layer_norm2",
    mlp_drop="",
    sizes=sam_sizes,
    kept_query_attention=sam_attention,
)


def sam(name: str, module: str, prefix: str) -> Adapter:
    cls = family(module, f"{prefix}Vision")
    block = replace(BLOCK, idle=("attn.dropout",), classes={"attn": (f"{cls}SdpaAttention",)})
    return transformer(
        *(name, cls, block), models=("Encoder",), entry="patch_embed.projection", block="Layer", blocks=("layers",)
    )


@dataclass(frozen=True)
class Pooling(Plain):
    """The first block of a stage of SAM 2, which pools its queries or changes the number of channels."""

    def problems(self, block: nn.Module) -> Iterator[str]:
        if not pools(block):
            yield "it pools no queries and keeps its width"


def pools(block: Any) -> bool:
    return bool(block.query_stride) or block.dim != block.dim_out


def sam2_stages(model: nn.Module) -> list[Stage]:
    """Return SAM 2's stages. A block that pools begins a stage, whose grid is the one after pooling."""
    check_version()
    stages: list[Stage] = []
    for name, block in find(model, "blocks").named_children():
        if not stages or pools(block):
            stride = block.query_stride
            stages.append(Stage((), shrink=Stride(stride, stride, (0, 0)) if stride else None))
        stages[-1] = replace(stages[-1], blocks=(*stages[-1].blocks, f"blocks.{name}"))
    return stages


SAM = sam("SAM vision", "sam", "Sam")
SAM_HQ = sam("SAM-HQ vision", "sam_hq", "SamHQ")
SAM_2_CLASSES = family("sam2", "Sam2")
SAM_2 = Adapter(
    name="transformers SAM 2 vision",
    blocks={f"{SAM_2_CLASSES}MultiScaleBlock": (Pooling(), replace(BLOCK, idle=("query_stride", "proj")))},
    layouts=Layout(f"{SAM_2_CLASSES}HieraDetModel", "patch_embed.projection", stages=sam2_stages),
    default_blocks=early_stages,
)

ADAPTERS = (SAM, SAM_HQ, SAM_2)
