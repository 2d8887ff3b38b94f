"""torchvision: ViT, ConvNeXt, Swin, Video Swin and MaxViT."""

from dataclasses import replace
from functools import partial
from typing import Any

from torch import nn

from ..sampling import recommended
from . import windowed as W
from .base import Adapter, Plain
from .layouts import Grid, Layout, Shrink, Stage, channels_last_grid, early_stages, halved, member_names, output_grid
from .lean import LINEARS, ConvBlock, Downsample, TransformerBlock, post_norms
from .windowed import PartitionBlock, WindowBlock, Windowed

TRACED = "torchvision.models.feature_extraction.DualGraphModule"
FEATURES = ("torchvision.models._utils.IntermediateLayerGetter", "torch.nn.modules.container.Sequential")


def stages(first: int, shrink: Shrink | None, model: nn.Module, head: str = "features.") -> list[Stage]:
    """Return the stages in ``features``, which alternates between the blocks of a stage and the layer into the next
    stage; ``first`` is the index of the first stage."""
    count, found = len(member_names(model, head.rstrip(".")) if head else model._modules), []
    for i in range(first, count, 2):
        blocks = member_names(model, f"{head}{i}")
        found.append(Stage(blocks, f"{head}{i - 1}", shrink) if i > first else Stage(blocks))
    return found


def with_wrappers(layout: Layout, **traced: Any) -> tuple[Layout, ...]:
    """Return the layout, and those of the same model in a feature extractor, where the fields ``traced`` differ, and of
    ``model.features`` on its own: as it is, or as the body of a detector."""
    entry: Any = layout.entry
    stages: Any = layout.stages
    extractor = replace(layout, model=TRACED, holds_any=True, **traced)
    bare = replace(layout, entry=entry.removeprefix("features."), stages=partial(stages, head=""), holds_any=True)
    return layout, extractor, *(replace(bare, model=model) for model in FEATURES)


VIT_LAYOUT = Layout(
    "torchvision.models.vision_transformer.VisionTransformer", "conv_proj", stages="encoder.layers", prefix=1
)
VIT = Adapter(
    name="torchvision ViT",
    layouts=(VIT_LAYOUT, replace(VIT_LAYOUT, model=TRACED, holds_any=True)),
    recommended=recommended.VIT,
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


CONVNEXT = Adapter(
    name="torchvision ConvNeXt",
    layouts=with_wrappers(
        Layout("torchvision.models.convnext.ConvNeXt", "features.0", stages=partial(stages, 1, None))
    ),
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
    recommended=recommended.CONVNEXT,
)


def unshifted_sizes(block: Any, grid: Grid) -> tuple[Grid, Grid]:
    """Return window and shift. Where the grid is not larger than a window, there is no shift."""
    window = tuple(block.attn.window_size)
    return window, tuple(0 if n <= w else s for n, w, s in zip(grid, window, block.attn.shift_size, strict=True))


def shrunk_sizes(block: Any, grid: Grid) -> tuple[Grid, Grid]:
    """Return Video Swin's window and shift: the window is not larger than the grid either."""
    window, shift = unshifted_sizes(block, grid)
    return tuple(min(n, w) for n, w in zip(grid, window, strict=True)), shift


CUT: dict[str, Any] = {"sizes": unshifted_sizes, "pads_first": True}


def swin_attention(attention: str) -> dict[str, tuple[str, ...]]:
    """Return the classes of its parts. It does not call its layers, but reads their weights: no LoRA."""
    return {"attn": (f"torchvision.models.{attention}",), "attn.qkv": LINEARS, "attn.proj": LINEARS}


def swin_block(attention: str, **changes: Any) -> Windowed:
    """Describe a block that is run again. Its attention is of the class ``attention``."""
    description = Windowed(
        idle=("attn.attention_dropout", "attn.dropout"),
        classes=swin_attention(attention),
        attention_drop="stochastic_depth",
        mlp_drop="stochastic_depth",
        kept_query_attention=W.torchvision_attention,
        **CUT,
    )
    return replace(description, **changes)


def lean_swin_block(attention: str, **changes: Any) -> WindowBlock:
    """Describe the same block, known part by part."""
    description = WindowBlock(
        idle=("attn.attention_dropout", "attn.dropout", "mlp.2", "mlp.4"),
        classes=swin_attention(attention) | {"mlp": ("torchvision.ops.misc.MLP",)},
        softmax_scale="",
        drop1="stochastic_depth",
        fc1="mlp.0",
        act="mlp.1",
        fc2="mlp.3",
        drop2="stochastic_depth",
        score_bias=W.torchvision_bias,
        **CUT,
    )
    return replace(description, **changes)


BLOCK = "torchvision.models.swin_transformer.SwinTransformerBlock"
ATTENTION_3D = "video.swin_transformer.ShiftedWindowAttention3d"

SWIN = Adapter(
    name="torchvision Swin",
    layouts=with_wrappers(
        Layout(
            *("torchvision.models.swin_transformer.SwinTransformer", "features.0"),
            *(channels_last_grid, partial(stages, 1, halved)),
        ),
        entry="features.0.0",  # the convolution, as the chain around it is not called
        grid=output_grid,
    ),
    default_blocks=early_stages,
    recommended=recommended.SWIN,
    blocks={
        BLOCK: (
            lean_swin_block("swin_transformer.ShiftedWindowAttention"),
            swin_block("swin_transformer.ShiftedWindowAttention"),
        ),
        f"{BLOCK}V2": (
            lean_swin_block(
                "swin_transformer.ShiftedWindowAttentionV2",
                logit_scale="attn.logit_scale",
                key_bias=False,
                score_bias=W.v2_bias,
                **post_norms(),
            ),
            swin_block(
                "swin_transformer.ShiftedWindowAttentionV2",
                post_norm=True,
                kept_query_attention=W.torchvision_v2_attention,
            ),
        ),
    },
)

VIDEO_SWIN = Adapter(
    name="torchvision Video Swin",
    layouts=Layout(
        "torchvision.models.video.swin_transformer.SwinTransformer3d",
        grid=channels_last_grid,
        stages=partial(stages, 0, halved),
    ),
    default_blocks=early_stages,
    blocks={
        BLOCK: (
            lean_swin_block(ATTENTION_3D, sizes=shrunk_sizes, score_bias=W.torchvision_3d_bias),
            swin_block(ATTENTION_3D, sizes=shrunk_sizes, kept_query_attention=W.torchvision_3d_attention),
        )
    },
)


def maxvit_stages(model: nn.Module) -> list[Stage]:
    """Return MaxViT's stages. A layer has a convolution, attention in windows and attention across a grid; the first
    convolution of a stage shrinks the map."""
    found = []
    for stage in member_names(model, "blocks"):
        layers = member_names(model, f"{stage}.layers")
        blocks = [name for layer in layers for name in member_names(model, f"{layer}.layers")]
        found.append(Stage(tuple(blocks), f"{layers[0]}.layers.MBconv.proj"))
    return found


def partition_sizes(block: Any, grid: Grid) -> tuple[Grid, Grid]:
    return W.whole_windows(block, grid, (block.g if is_grid(block) else block.p,) * len(grid))


def is_grid(block: Any) -> bool:
    return bool(block.partition_type == "grid")


MAXVIT = Adapter(
    name="torchvision MaxViT",
    layouts=Layout("torchvision.models.maxvit.MaxVit", "stem", stages=maxvit_stages),
    default_blocks=early_stages,
    blocks={
        "torchvision.models.maxvit.PartitionAttentionLayer": PartitionBlock(
            idle=("attn_layer.2", "mlp_layer.4"),
            classes={"attn_layer.1": ("torchvision.models.maxvit.RelativePositionalMultiHeadAttention",)},
            norm1="attn_layer.0",
            attention="attn_layer.1",
            heads="attn_layer.1.n_heads",
            softmax_scale="attn_layer.1.scale_factor",
            qkv="attn_layer.1.to_qkv",
            proj="attn_layer.1.merge",
            drop1="stochastic_dropout",
            norm2="mlp_layer.0",
            fc1="mlp_layer.1",
            act="mlp_layer.2",
            fc2="mlp_layer.3",
            drop2="stochastic_dropout",
            dim=2,
            sizes=partition_sizes,
            strided=is_grid,
            score_bias=W.positional_bias,
        ),
        "torchvision.models.maxvit.MBConv": Plain(),  # batch norm, squeeze and excitation
    },
)

ADAPTERS = (VIT, CONVNEXT, SWIN, VIDEO_SWIN, MAXVIT)
