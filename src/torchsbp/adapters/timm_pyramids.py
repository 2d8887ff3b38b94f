"""timm: families with attention in windows of a map, or with other mixers: HieraDet (SAM 2), the ViT of SAM, GCViT,
Twins, VOLO, MViT v2, MetaFormer (CAFormer, ConvFormer), FocalNet, MambaOut and EdgeNeXt."""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from . import windowed as W
from .base import Adapter, Plain
from .layouts import Grid, Layout, Stage, channels_last_grid, early_stages, member_names
from .lean import LINEARS, ConvBlock, Downsample, TransformerBlock
from .names import bare_name, find
from .queries import at, attend, distance_bias, projections
from .rerun import Mixer, Patches, PointwiseBlock, Residual
from .timm import DROPOUTS, MLP, WINDOWS, prefix_tokens, stages, with_features
from .timm_vits import cut_at_ends
from .windowed import ScoreBias, WindowBlock, Windowed

UNUSED = (*DROPOUTS, "mlp.norm")


def still_sizes(block: Any, grid: Grid) -> tuple[Grid, Grid]:
    """Return windows that are never shifted; the whole grid as one window if the block has none."""
    window = W.in_each(block.window_size, grid)
    return window if any(window) else grid, (0,) * len(grid)


def no_bias(m: Any, window: Grid) -> Tensor:
    return m.qkv.weight.new_zeros(m.num_heads, *[window[0] * window[1]] * 2)


def pooling_stages(model: Any) -> list[Stage]:
    """Return HieraDet's stages. The first block of a stage may pool."""
    return [
        Stage(blocks, f"{blocks[0]}.pool" if find(model, f"{blocks[0]}.pool") is not None else "")
        for blocks in cut_at_ends(model)
    ]


HIERA_DET = Adapter(
    name="timm HieraDet",
    layouts=Layout("timm.models.hieradet_sam2.HieraDet", grid=channels_last_grid, stages=pooling_stages),
    blocks={
        "timm.models.hieradet_sam2.MultiScaleBlock": (
            Plain(where="proj"),  # the residual path is proj(norm1(x)), pooled: not the block's input
            TransformerBlock(idle=("is_windowed", *UNUSED), classes={"mlp": MLP}),
            WindowBlock(
                sizes=still_sizes,
                score_bias=no_bias,
                scale1="ls1.gamma",
                scale2="ls2.gamma",
                idle=UNUSED,
                classes={"mlp": MLP},
            ),
            WINDOWS,
        )
    },
    default_blocks=early_stages,
)


def sam_attention(m: Any, x: Tensor, everything: Tensor, added: ScoreBias, window: Grid) -> Tensor:
    """SAM's attention. A query's bias depends on the query and on its place in the window, which ``added`` selects."""
    q, k, v = projections(m, x, everything)
    slots = added(torch.arange(window[0] * window[1], device=x.device).view(1, -1, 1)).flatten(1)
    if m.use_rel_pos:
        return attend(m, x, q, k, v, decomposed_bias(m, q, slots, window))
    if m.rope is not None:
        from timm.layers import apply_rot_embed_cat

        rope = m.rope.get_embed()
        q, k = apply_rot_embed_cat(q, at(rope, slots)).type_as(v), apply_rot_embed_cat(k, rope).type_as(v)
    return attend(m, x, q, k, v)


def decomposed_bias(m: Any, q: Tensor, slots: Tensor, window: Grid) -> Tensor:
    from timm.models.vision_transformer_sam import get_rel_pos

    to_rows = get_rel_pos(window[0], window[0], m.rel_pos_h)[slots // window[1]]
    to_columns = get_rel_pos(window[1], window[1], m.rel_pos_w)[slots % window[1]]
    return distance_bias(q, to_rows, to_columns)


SAM = Adapter(
    name="timm SAM ViT",
    layouts=Layout("timm.models.vision_transformer_sam.VisionTransformerSAM", grid=channels_last_grid),
    blocks={
        "timm.models.vision_transformer_sam.Block": Windowed(
            sizes=still_sizes,
            kept_query_attention=sam_attention,
            mlp="mlp ls2",
            idle=("ls1",),
            classes={"attn": ("timm.models.vision_transformer_sam.Attention",), "attn.qkv": LINEARS},
        )
    },
)

GLOBAL_CONTEXT = Adapter(
    name="timm GCViT",
    layouts=with_features(
        Layout("timm.models.gcvit.GlobalContextVit", entry="stem", stages=partial(stages, "stages", None))
    ),
    blocks={"timm.models.gcvit.GlobalContextVitBlock": WINDOWS},
    default_blocks=early_stages,
)


def grid_beside(embed: nn.Module, x: Tensor, y: Any) -> Grid:
    """Return the grid of an entry that returns tokens and their grid."""
    return tuple(y[1])


def twins_stages(model: nn.Module) -> list[Stage]:
    """Return Twins' stages, each of which begins with a patch embedding."""
    names = member_names(model, "blocks")
    return [Stage(member_names(model, name), f"patch_embeds.{i}" if i else "") for i, name in enumerate(names)]


TWINS = Adapter(
    name="timm Twins",
    layouts=Layout("timm.models.twins.Twins", entry="patch_embeds.0", grid=grid_beside, stages=twins_stages),
    blocks={"timm.models.twins.Block": Residual()},
    default_blocks=early_stages,
)


def volo_stages(model: nn.Module) -> list[Stage]:
    """Return VOLO's stages: chains of blocks, with layers between them that shrink the grid."""
    found, down = [], ""
    for name, layer in model.network.named_children():  # type: ignore[union-attr]
        name = f"network.{name}"
        if bare_name(layer) == "Downsample":
            down = name
        else:
            found.append(Stage(member_names(model, name), down))
            down = ""
    return found


VOLO = Adapter(
    name="timm VOLO",
    layouts=Layout("timm.models.volo.VOLO", stages=volo_stages),
    blocks={
        "timm.models.volo.Outlooker": Residual(),
        "timm.models.volo.Transformer": (TransformerBlock(idle=UNUSED, classes={"mlp": MLP}), Residual()),
    },
    default_blocks=early_stages,
)


def mvit_stages(model: nn.Module) -> list[Stage]:
    """Return MViT's stages. The first block of a stage may pool."""
    chains = [member_names(model, f"{name}.blocks") for name in member_names(model, "stages")]
    return [Stage(blocks, f"{blocks[0]}.shortcut_pool_attn") for blocks in chains]


MVIT = Adapter(
    name="timm MViT v2",
    layouts=Layout("timm.models.mvitv2.MultiScaleVit", grid=grid_beside, stages=mvit_stages, prefix=prefix_tokens),
    blocks={
        "timm.models.mvitv2.MultiScaleBlock": (
            *(Plain(where=name) for name in ("shortcut_pool_attn", "shortcut_proj_attn", "shortcut_proj_mlp")),
            Residual(passes=True),
        )
    },
    default_blocks=early_stages,
)

PATH = "timm.models.metaformer."
NORMS = ("LayerNormNoBias", "LayerNorm2dNoBias")
ROWS_ALONE = (
    *(PATH + name for name in NORMS),
    *("timm.layers.norm.LayerNorm", "timm.layers.norm.LayerNorm2d", "torch.nn.modules.normalization.LayerNorm"),
)
"""Norms of one row. PoolFormer's norms, over whole maps, are not among them."""

METAFORMER = Adapter(
    name="timm MetaFormer",
    layouts=with_features(Layout(PATH + "MetaFormer", entry="stem", stages=partial(stages, "stages", None))),
    blocks={
        PATH + "MetaFormerBlock": (
            Plain(where="res_scale1"),  # scales the residual path, so that the block is not x + …
            Residual(
                mixers=(Mixer("token_mixer"),),
                classes={"norm1": ROWS_ALONE, "norm2": ROWS_ALONE, "token_mixer": (PATH + "Attention",)},
            ),
            Residual(
                mixers=(Mixer("token_mixer.dwconv", dim=2, whole=True),),
                dim=2,
                classes={"norm1": ROWS_ALONE, "norm2": ROWS_ALONE},
            ),
        )
    },
    default_blocks=early_stages,
)

FOCALNET = Adapter(
    name="timm FocalNet",
    layouts=with_features(
        Layout("timm.models.focalnet.FocalNet", entry="stem", stages=partial(stages, "layers", None))
    ),
    blocks={
        "timm.models.focalnet.FocalNetBlock": Residual(mixers=(Mixer("modulation", dim=2, whole=True),), dim=2),
    },
    default_blocks=early_stages,
)


@dataclass(frozen=True)
class LastChannels(Mixer):
    """A mixer that sees the last channels of its source's output; the block's code splits them off, channels first."""

    def input_of(self, block: nn.Module, x: Tensor) -> Tensor:
        norm, layer = (find(block, name) for name in self.source.split())
        width = find(block, self.name).in_channels
        if type(layer) is not nn.Linear:  # such as LoRA
            return layer(norm(x))[..., -width:].movedim(-1, 1)
        bias = None if layer.bias is None else layer.bias[-width:]
        return F.linear(norm(x), layer.weight[-width:], bias).movedim(-1, 1)


MAMBAOUT = Adapter(
    name="timm MambaOut",
    layouts=with_features(
        Layout(
            "timm.models.mambaout.MambaOut",
            entry="stem",
            grid=channels_last_grid,
            stages=partial(stages, "stages", None),
        )
    ),
    blocks={"timm.models.mambaout.GatedConvBlock": Residual(mixers=(LastChannels("conv", "norm fc1", dim=2),))},
    default_blocks=early_stages,
)


def edge_stages(model: nn.Module) -> list[Stage]:
    """Return EdgeNeXt's stages. A layer before the stage shrinks the grid, or the convolution of its first block."""
    found = stages("stages", None, model)
    return [its if its.downsample else replace(its, downsample=f"{its.blocks[0]}.conv_dw") for its in found]


CONV_BLOCK = ConvBlock(idle=("mlp.drop1", "mlp.norm", "mlp.drop2"), classes={"mlp": MLP})
EDGENEXT = Adapter(
    name="timm EdgeNeXt",
    layouts=with_features(Layout("timm.models.edgenext.EdgeNeXt", entry="stem", stages=edge_stages)),
    blocks={
        "timm.models.edgenext.ConvBlock": (
            Plain(where="shortcut_after_dw"),
            CONV_BLOCK,
            PointwiseBlock(response=""),
        ),
        "timm.models.edgenext.SplitTransposeBlock": Plain(),  # rows meet in convolutions, then in channel attention
    },
    default_blocks=early_stages,
    downsample=(Downsample(), Patches()),
)

ADAPTERS = (HIERA_DET, SAM, GLOBAL_CONTEXT, TWINS, VOLO, MVIT, METAFORMER, FOCALNET, MAMBAOUT, EDGENEXT)
