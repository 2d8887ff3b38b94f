"""Swin and Swin v2 of timm, torchvision and transformers; torchvision's Video Swin."""

from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor, nn

from ..partitions import Grid
from . import windows as W
from .base import Adapter, Stage, early_stages
from .parts import LINEARS, find
from .windows import Windowed

TIMM, TORCHVISION, TRANSFORMERS = "timm.models.", "torchvision.models.", "transformers.models."


def merged(grid: Grid) -> Grid:
    """The grid behind patch merging: height and width halved, odd ones padded."""
    return (*grid[:-2], *(-(-n // 2) for n in grid[-2:]))


def stages_in(chain: str, ends: bool, model: nn.Module) -> list[Stage]:
    """The stages of a chain; patch merging begins a stage, or ends the one before."""
    stages = []
    for i, stage in enumerate(find(model, chain)):
        blocks = tuple(f"{chain}.{i}.blocks.{j}" for j in range(len(stage.blocks)))
        stages.append(Stage(blocks, f"{chain}.{i - ends}.downsample", merged) if i else Stage(blocks))
    return stages


def stages_of_features(first: int, model: nn.Module) -> list[Stage]:
    """torchvision's: blocks of a stage and patch merging by turns."""
    features = find(model, "features")
    stages = []
    for i in range(first, len(features), 2):
        blocks = tuple(f"features.{i}.{j}" for j in range(len(features[i])))
        stages.append(Stage(blocks) if i == first else Stage(blocks, f"features.{i - 1}", merged))
    return stages


def channels_last_grid(entry: nn.Module, x: Tensor, y: Tensor) -> Grid:
    return tuple(y.shape[1:-1])


def given_grid(entry: nn.Module, x: Tensor, y: Any) -> Grid:
    """Behind its tokens, transformers' embedding gives their grid."""
    return tuple(y[1])


def unshifted_sizes(block: Any, grid: Grid) -> tuple[Grid, Grid]:
    """torchvision: a grid of one window is not shifted."""
    window = tuple(block.attn.window_size)
    return window, tuple(0 if n <= w else s for n, w, s in zip(grid, window, block.attn.shift_size, strict=True))


def shrunk_sizes(block: Any, grid: Grid) -> tuple[Grid, Grid]:
    """Video Swin: nor is its window larger than the grid."""
    window, shift = unshifted_sizes(block, grid)
    return tuple(min(n, w) for n, w in zip(grid, window, strict=True)), shift


def clamped_sizes(block: Any, grid: Grid) -> tuple[Grid, Grid]:
    """transformers: square windows, no larger than the shorter side; then there is no shift at all."""
    window, shift = W.own_sizes(block, grid)
    shorter = min(grid)
    return (window, shift) if shorter > window[0] else ((shorter,) * len(grid), (0,) * len(grid))


TIMM_SWIN = Adapter(
    name="timm Swin",
    model=f"{TIMM}swin_transformer.SwinTransformer",
    grid=channels_last_grid,
    stages=partial(stages_in, "layers", False),
    recipe=early_stages,
    blocks={
        f"{TIMM}swin_transformer.SwinTransformerBlock": Windowed(
            classes={"attn": (f"{TIMM}swin_transformer.WindowAttention",), "attn.qkv": LINEARS}
        )
    },
)

TIMM_SWIN_V2 = replace(
    TIMM_SWIN,
    name="timm Swin v2",
    model=f"{TIMM}swin_transformer_v2.SwinTransformerV2",
    blocks={
        f"{TIMM}swin_transformer_v2.SwinTransformerV2Block": Windowed(
            classes={"attn": (f"{TIMM}swin_transformer_v2.WindowAttention",), "attn.qkv": LINEARS},
            post_norm=True,
            answer=W.timm_v2_attention,
        )
    },
)

TIMM_SWIN_CR = Adapter(
    name="timm Swin v2 CR",
    model=f"{TIMM}swin_transformer_v2_cr.SwinTransformerV2Cr",
    stages=partial(stages_in, "stages", False),
    recipe=early_stages,
    blocks={
        f"{TIMM}swin_transformer_v2_cr.SwinTransformerV2CrBlock": Windowed(
            classes={"attn": (f"{TIMM}swin_transformer_v2_cr.WindowMultiHeadAttention",), "attn.qkv": LINEARS},
            constant=("attn.meta_mlp",),
            post_norm=True,
            last="norm3",
            answer=W.timm_cr_attention,
        )
    },
)

TORCHVISION_BLOCK = Windowed(
    idle=("attn.attention_dropout", "attn.dropout"),
    classes={"attn": (f"{TORCHVISION}swin_transformer.ShiftedWindowAttention",), "attn.qkv": LINEARS},
    attention_drop="stochastic_depth",
    mlp_drop="stochastic_depth",
    sizes=unshifted_sizes,
    pads_first=True,
    answer=W.torchvision_attention,
)

TORCHVISION_SWIN = Adapter(
    name="torchvision Swin",
    model=f"{TORCHVISION}swin_transformer.SwinTransformer",
    entry="features.0",
    grid=channels_last_grid,
    stages=partial(stages_of_features, 1),
    recipe=early_stages,
    blocks={
        f"{TORCHVISION}swin_transformer.SwinTransformerBlock": TORCHVISION_BLOCK,
        f"{TORCHVISION}swin_transformer.SwinTransformerBlockV2": replace(
            TORCHVISION_BLOCK,
            classes={"attn": (f"{TORCHVISION}swin_transformer.ShiftedWindowAttentionV2",), "attn.qkv": LINEARS},
            post_norm=True,
            answer=W.torchvision_v2_attention,
        ),
    },
)

TORCHVISION_VIDEO_SWIN = Adapter(
    name="torchvision Video Swin",
    model=f"{TORCHVISION}video.swin_transformer.SwinTransformer3d",
    grid=channels_last_grid,
    stages=partial(stages_of_features, 0),
    recipe=early_stages,
    blocks={
        f"{TORCHVISION}swin_transformer.SwinTransformerBlock": replace(
            TORCHVISION_BLOCK,
            classes={"attn": (f"{TORCHVISION}video.swin_transformer.ShiftedWindowAttention3d",), "attn.qkv": LINEARS},
            sizes=shrunk_sizes,
            answer=W.torchvision_3d_attention,
        )
    },
)

TRANSFORMERS_SWIN = Adapter(
    name="transformers Swin",
    model=f"{TRANSFORMERS}swin.modeling_swin.SwinModel",
    entry="embeddings",
    grid=given_grid,
    stages=partial(stages_in, "encoder.layers", True),
    recipe=early_stages,
    blocks={
        f"{TRANSFORMERS}swin.modeling_swin.SwinLayer": Windowed(
            idle=("attention.attention_dropout",),
            classes={"attention": (f"{TRANSFORMERS}swin.modeling_swin.SwinAttention",)},
            attention="attention",
            attention_norm="layernorm_before",
            attention_drop="drop_path",
            mlp_norm="layernorm_after",
            mlp_drop="",
            sizes=clamped_sizes,
            pads_first=True,
            answer=W.transformers_attention,
            pair=True,
            fixed="always_partition",
        )
    },
)

TRANSFORMERS_SWIN_V2 = replace(
    TRANSFORMERS_SWIN,
    name="transformers Swin v2",
    model=f"{TRANSFORMERS}swinv2.modeling_swinv2.Swinv2Model",
    blocks={
        f"{TRANSFORMERS}swinv2.modeling_swinv2.Swinv2Layer": Windowed(
            classes={"attention": (f"{TRANSFORMERS}swinv2.modeling_swinv2.Swinv2Attention",)},
            attention="attention",
            attention_norm="layernorm_before",
            attention_drop="drop_path",
            mlp="intermediate output",
            mlp_norm="layernorm_after",
            mlp_drop="drop_path",
            post_norm=True,
            pads_first=True,
            answer=W.transformers_v2_attention,
            pair=True,
        )
    },
)

ADAPTERS = (
    *(TIMM_SWIN, TIMM_SWIN_V2, TIMM_SWIN_CR),
    *(TORCHVISION_SWIN, TORCHVISION_VIDEO_SWIN),
    *(TRANSFORMERS_SWIN, TRANSFORMERS_SWIN_V2),
)
