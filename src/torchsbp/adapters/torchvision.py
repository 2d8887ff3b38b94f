"""torchvision: ViT, ConvNeXt, Swin and Video Swin."""

from dataclasses import replace
from functools import partial
from typing import Any

from torch import nn

from . import windowed as W
from .base import Adapter
from .layouts import Grid, Layout, Stage, channels_last_grid, early_stages, halved
from .lean import LINEARS, ConvBlock, Downsample, TransformerBlock
from .names import find
from .windowed import Windowed

VIT = Adapter(
    name="torchvision ViT",
    layouts=Layout(
        "torchvision.models.vision_transformer.VisionTransformer", "conv_proj", stages="encoder.layers", prefix=1
    ),
    blocks={
        "torchvision.models.vision_transformer.EncoderBlock": TransformerBlock(
            idle=(
                *("dropout", "mlp.2", "mlp.4", "self_attention.dropout"),
                *("self_attention.bias_k", "self_attention.bias_v", "self_attention.add_zero_attn"),
            ),
            classes={
                "self_attention": ("torch.nn.modules.activation.MultiheadAttention",),
                "mlp": ("torchvision.models.vision_transformer.MLPBlock",),
            },
            norm1="ln_1",
            heads="self_attention.num_heads",
            softmax_scale="",
            fused="",
            qkv="self_attention.in_proj_weight",
            q_norm="",
            k_norm="",
            proj="self_attention.out_proj",
            scale1="",
            drop1="",
            norm2="ln_2",
            fc1="mlp.0",
            act="mlp.1",
            fc2="mlp.3",
            scale2="",
            drop2="",
        )
    },
)


def convnext_stages(model: nn.Module) -> list[Stage]:
    """``features`` alternates: stem, stage, down-sampling layer, stage, …"""
    features = list(model.features)  # type: ignore[arg-type]
    return [
        Stage(tuple(f"features.{i}.{j}" for j in range(len(features[i]))), f"features.{i - 1}" if i > 1 else "")
        for i in range(1, len(features), 2)
    ]


CONVNEXT = Adapter(
    name="torchvision ConvNeXt",
    layouts=Layout("torchvision.models.convnext.ConvNeXt", "features.0", stages=convnext_stages),
    blocks={
        "torchvision.models.convnext.CNBlock": ConvBlock(
            conv="block.0",
            norm="block.2",
            fc1="block.3",
            act="block.4",
            fc2="block.5",
            scale="layer_scale",
            drop="stochastic_depth",
        )
    },
    default_blocks=early_stages,
    downsample=Downsample(),
)


def swin_stages(first: int, model: nn.Module) -> list[Stage]:
    """``features`` alternates: blocks of a stage, patch merging, …"""
    features = find(model, "features")
    stages = []
    for i in range(first, len(features), 2):
        blocks = tuple(f"features.{i}.{j}" for j in range(len(features[i])))
        stages.append(Stage(blocks) if i == first else Stage(blocks, f"features.{i - 1}", halved))
    return stages


def unshifted_sizes(block: Any, grid: Grid) -> tuple[Grid, Grid]:
    """A grid of one window is not shifted."""
    window = tuple(block.attn.window_size)
    return window, tuple(0 if n <= w else s for n, w, s in zip(grid, window, block.attn.shift_size, strict=True))


def shrunk_sizes(block: Any, grid: Grid) -> tuple[Grid, Grid]:
    """Video Swin: nor is its window larger than the grid."""
    window, shift = unshifted_sizes(block, grid)
    return tuple(min(n, w) for n, w in zip(grid, window, strict=True)), shift


def swin_block(attention: str, **changes: Any) -> Windowed:
    """Attention is of that class; its projection is a linear layer."""
    description = Windowed(
        idle=("attn.attention_dropout", "attn.dropout"),
        classes={"attn": (f"torchvision.models.{attention}",), "attn.qkv": LINEARS},
        attention_drop="stochastic_depth",
        mlp_drop="stochastic_depth",
        sizes=unshifted_sizes,
        pads_first=True,
        kept_query_attention=W.torchvision_attention,
    )
    return replace(description, **changes)


BLOCK = "torchvision.models.swin_transformer.SwinTransformerBlock"

SWIN = Adapter(
    name="torchvision Swin",
    layouts=Layout(
        "torchvision.models.swin_transformer.SwinTransformer", "features.0", channels_last_grid, partial(swin_stages, 1)
    ),
    default_blocks=early_stages,
    blocks={
        BLOCK: swin_block("swin_transformer.ShiftedWindowAttention"),
        f"{BLOCK}V2": swin_block(
            "swin_transformer.ShiftedWindowAttentionV2",
            post_norm=True,
            kept_query_attention=W.torchvision_v2_attention,
        ),
    },
)

VIDEO_SWIN = Adapter(
    name="torchvision Video Swin",
    layouts=Layout(
        "torchvision.models.video.swin_transformer.SwinTransformer3d",
        grid=channels_last_grid,
        stages=partial(swin_stages, 0),
    ),
    default_blocks=early_stages,
    blocks={
        BLOCK: swin_block(
            "video.swin_transformer.ShiftedWindowAttention3d",
            sizes=shrunk_sizes,
            kept_query_attention=W.torchvision_3d_attention,
        )
    },
)

ADAPTERS = (VIT, CONVNEXT, SWIN, VIDEO_SWIN)
