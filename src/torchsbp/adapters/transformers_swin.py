"""Hugging Face transformers: Swin, Swin v2 and the Swins of MaskFormer and Donut."""

from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from ..sampling import recommended
from . import windowed as W
from .base import Adapter
from .layouts import Grid, Layout, Stage, early_stages, halved, member_names
from .lean import post_norms
from .transformers import BACKBONES, INTERMEDIATE, MLP, MODELS, Q_PROJ, Names, attention, family, layouts
from .windowed import InWindows, WindowBlock, Windowed


def swin_stages(model: nn.Module) -> list[Stage]:
    """Return Swin's stages. In the model, the layer into a stage is part of the stage before it."""
    names = member_names(model, "encoder.layers")
    blocks = [member_names(model, f"{name}.blocks") for name in names]
    between = [f"{name}.downsample" for name in names]
    return [Stage(its, between[i - 1], halved) if i else Stage(its) for i, its in enumerate(blocks)]


def given_grid(entry: nn.Module, x: Tensor, y: Any) -> Grid:
    """Return the grid, which the embedding returns after its tokens."""
    return tuple(y[1])


def clamped_sizes(block: Any, grid: Grid) -> tuple[Grid, Grid]:
    """Return square windows, no larger than the shorter side of the grid. If they are as large, there is no shift."""
    window, shift = W.own_sizes(block, grid)
    shorter = min(grid)
    return (window, shift) if shorter > window[0] else ((shorter,) * len(grid), (0,) * len(grid))


def swin(name: str, cls: str, *descriptions: InWindows, models: tuple[str, ...] = MODELS) -> Adapter:
    layout = Layout("", "embeddings", given_grid, swin_stages)
    classes = {"attention": (f"{cls}Attention",)}
    blocks = tuple(replace(its, classes=classes, pads_first=True, pair=True) for its in descriptions)
    return Adapter(
        name=f"transformers {name}",
        blocks={f"{cls}Layer": blocks},
        layouts=layouts(cls, models, layout),
        default_blocks=early_stages,
        recommended=recommended.SWIN,
    )


def swin_block(**names: Any) -> Windowed:
    """Describe a block that is run again."""
    return Windowed(
        attention="attention",
        attention_norm="layernorm_before",
        attention_drop="drop_path",
        mlp_norm="layernorm_after",
        **names,
    )


def lean_swin_block(*parts: Names, **names: Any) -> WindowBlock:
    """Describe the same block, known part by part. Only attention has stochastic depth, unless ``drop2`` is given."""
    for part in parts:
        names |= part
    both = {"norm1": "layernorm_before", "norm2": "layernorm_after", "drop2": ""}
    return WindowBlock(attention="attention", drop1="drop_path", **{**both, **names, "fused": ""})


SELF = attention(
    *("attention.self", ("query", "key", "value"), "attention.output.dense", "num_attention_heads", ""),
    *("attention.self.dropout", "attention.output.dropout", "output.dropout"),
)


def nested_swin_blocks(**windows: Any) -> tuple[InWindows, ...]:
    """Describe the blocks of MaskFormer's and Donut's Swin."""
    lean = lean_swin_block(SELF, INTERMEDIATE, softmax_scale="", score_bias=W.maskformer_bias, **windows)
    again = swin_block(
        idle=("attention.self.dropout",),
        mlp="intermediate output",
        mlp_drop="",
        kept_query_attention=W.maskformer_attention,
        **windows,
    )
    return lean, again


CLAMPED: Names = {"sizes": clamped_sizes, "fixed": "always_partition"}
SWIN = swin(
    "Swin",
    family("swin", "Swin"),
    lean_swin_block(Q_PROJ, MLP, score_bias=W.transformers_bias, **CLAMPED),
    swin_block(
        idle=("attention.attention_dropout",), mlp_drop="", kept_query_attention=W.transformers_attention, **CLAMPED
    ),
)
SWIN_V2 = swin(
    "Swin v2",
    family("swinv2", "Swinv2"),
    lean_swin_block(
        SELF,
        INTERMEDIATE,
        post_norms("layernorm_before", "layernorm_after"),
        drop2="drop_path",
        logit_scale="attention.self.logit_scale",
        score_bias=W.transformers_v2_bias,
    ),
    swin_block(
        mlp="intermediate output",
        mlp_drop="drop_path",
        post_norm=True,
        kept_query_attention=W.transformers_v2_attention,
    ),
    models=BACKBONES,
)
MASKFORMER_SWIN = swin(
    "MaskFormer Swin",
    "transformers.models.maskformer.modeling_maskformer_swin.MaskFormerSwin",
    *nested_swin_blocks(),
)
DONUT_SWIN = swin(
    "Donut Swin", "transformers.models.donut.modeling_donut_swin.DonutSwin", *nested_swin_blocks(**CLAMPED)
)

ADAPTERS = (SWIN, SWIN_V2, MASKFORMER_SWIN, DONUT_SWIN)
