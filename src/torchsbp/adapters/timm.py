"""timm: the families of ViT, EVA, BEiT, ViT with relative positions, MLP-Mixer, ConvNeXt, CoAtNet, MaxViT and Swin."""

from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor, nn

from . import windowed as W
from .base import Adapter, Plain
from .layouts import Grid, Layout, Stage, channels_last_grid, early_stages, halved
from .lean import LINEARS, ConvBlock, Downsample, TransformerBlock
from .names import find
from .rerun import Mixer, Patches, PointwiseBlock, Residual
from .windowed import Windowed

# Where timm keeps it, and where it was before.
ATTENTION = ("timm.layers.attention.Attention", "timm.models.vision_transformer.Attention")
MLP = ("timm.layers.mlp.Mlp",)


def patch_grid(embed: nn.Module, x: Tensor, y: Tensor) -> Grid:
    return tuple(embed.dynamic_feat_size(tuple(x.shape[-2:])))  # type: ignore[operator]


def prefix_tokens(model: nn.Module) -> int:
    return int(model.num_prefix_tokens)  # type: ignore[arg-type]


def convnext_stages(model: nn.Module) -> list[Stage]:
    stages = []
    for i, stage in enumerate(model.stages):  # type: ignore[arg-type]
        blocks = tuple(f"stages.{i}.blocks.{j}" for j in range(len(stage.blocks)))
        stages.append(Stage(blocks, "" if isinstance(stage.downsample, nn.Identity) else f"stages.{i}.downsample"))
    return stages


def hybrid_stages(model: nn.Module) -> list[Stage]:
    """The described blocks of every stage, also inside of others; its first block shrinks the grid."""
    stages = []
    for i, stage in enumerate(model.stages):  # type: ignore[arg-type]
        modules = list(stage.named_modules())
        blocks = tuple(f"stages.{i}.{name}" for name, module in modules if HYBRID.knows(module))
        shortcut = next(name for name, _ in modules if name.endswith("shortcut"))
        stages.append(Stage(blocks, f"stages.{i}.{shortcut}"))
    return stages


PRE_NORM = Residual()
POST_NORM = Residual(mixers=(Mixer("attn", ""),))
IN_ONE_PIECE = Residual(mixers=())

VIT_LAYOUT = Layout("timm.models.vision_transformer.VisionTransformer", grid=patch_grid, prefix=prefix_tokens)


def like_vit(model: str, **changes: Any) -> Layout:
    return replace(VIT_LAYOUT, model=f"timm.models.{model}", **changes)


VIT = Adapter(
    name="timm ViT",
    layouts=VIT_LAYOUT,
    blocks={
        "timm.models.vision_transformer.Block": (
            TransformerBlock(
                idle=(
                    *("attn.attn_drop", "attn.norm", "attn.gate", "attn.proj_drop"),
                    *("mlp.drop1", "mlp.norm", "mlp.drop2"),
                ),
                classes={"attn": ATTENTION, "mlp": MLP},
            ),
            PRE_NORM,
        ),
        "timm.models.vision_transformer.ResPostBlock": POST_NORM,
        "timm.models.vision_transformer.ParallelThingsBlock": Residual(mixers=(Mixer("attns.*.attn", "attns.*.norm"),)),
        "timm.models.vision_transformer.ParallelScalingBlock": IN_ONE_PIECE,
        "timm.models.vision_transformer.DiffParallelScalingBlock": IN_ONE_PIECE,
    },
)

EVA = Adapter(
    name="timm EVA",
    layouts=like_vit("eva.Eva"),
    blocks={"timm.models.eva.EvaBlock": PRE_NORM, "timm.models.eva.EvaBlockPostNorm": POST_NORM},
)

BEIT = Adapter(name="timm BEiT", layouts=like_vit("beit.Beit"), blocks={"timm.models.beit.Block": PRE_NORM})

RELATIVE_VIT = Adapter(
    name="timm ViT with relative positions",
    layouts=like_vit("vision_transformer_relpos.VisionTransformerRelPos"),
    blocks={
        "timm.models.vision_transformer_relpos.RelPosBlock": replace(PRE_NORM, constant=("attn.rel_pos",)),
        "timm.models.vision_transformer_relpos.ResPostRelPosBlock": replace(POST_NORM, constant=("attn.rel_pos",)),
    },
)

MIXER = Adapter(
    name="timm MLP-Mixer",
    layouts=like_vit("mlp_mixer.MlpMixer", entry="stem", prefix=0),
    blocks={
        "timm.models.mlp_mixer.MixerBlock": Residual(mixers=(Mixer("mlp_tokens", "norm1", dim=2),)),
        "timm.models.mlp_mixer.ResBlock": Residual(mixers=(Mixer("linear_tokens", "norm1", dim=2),)),
        "timm.models.mlp_mixer.SpatialGatingBlock": Residual(
            mixers=(Mixer("mlp_channels.gate", "norm mlp_channels.fc1 mlp_channels.act"),)
        ),
    },
)

CONVNEXT = Adapter(
    name="timm ConvNeXt",
    layouts=Layout("timm.models.convnext.ConvNeXt", entry="stem", stages=convnext_stages),
    blocks={
        "timm.models.convnext.ConvNeXtBlock": (
            ConvBlock(
                shortcut="shortcut", idle=("mlp.drop1", "mlp.norm", "mlp.grn", "mlp.drop2"), classes={"mlp": MLP}
            ),
            PointwiseBlock(shortcut="shortcut"),
        )
    },
    default_blocks=early_stages,
    downsample=(Downsample(), Patches()),
)

WINDOWS = Residual(mixers=(Mixer("ls1", "norm1", whole=True),), constant=("attn.rel_pos",))

HYBRID = Adapter(
    name="timm CoAtNet and MaxViT",
    layouts=Layout("timm.models.maxxvit.MaxxVit", entry="stem", stages=hybrid_stages),
    blocks={
        "timm.models.maxxvit.TransformerBlock2d": Residual(
            mixers=(Mixer("attn", "norm1", dim=2, whole=True),),
            constant=("attn.rel_pos",),
            shortcut="shortcut",
            dim=2,
        ),
        "timm.models.maxxvit.PartitionAttentionCl": WINDOWS,
        "timm.models.maxxvit.PartitionAttention2d": replace(
            WINDOWS, mixers=(Mixer("ls1", "norm1", dim=2, whole=True),), dim=2
        ),
        "timm.models.maxxvit.ParallelPartitionAttention": replace(
            WINDOWS, constant=("attn_block.rel_pos", "attn_grid.rel_pos")
        ),
        "timm.models.maxxvit.ConvNeXtBlock": ConvBlock(
            pool="down",
            scale="ls.gamma",
            shortcut="shortcut",
            idle=("mlp.norm", "mlp.drop"),
            classes={"mlp": ("timm.layers.mlp.ConvMlp",)},
        ),
        "timm.models.maxxvit.MbConvBlock": Plain(),  # batch norm, squeeze and excitation
    },
    default_blocks=early_stages,
)


def swin_stages(chain: str, model: nn.Module) -> list[Stage]:
    """The stages of a chain; patch merging begins a stage."""
    stages = []
    for i, stage in enumerate(find(model, chain)):
        blocks = tuple(f"{chain}.{i}.blocks.{j}" for j in range(len(stage.blocks)))
        stages.append(Stage(blocks, f"{chain}.{i}.downsample", halved) if i else Stage(blocks))
    return stages


def swin(
    name: str, file: str, model: str, block: str, layout: Layout, description: Windowed, attention: str
) -> Adapter:
    """Attention is of that class; its projection is a linear layer."""
    path = f"timm.models.{file}."
    classes = {"attn": (path + attention,), "attn.qkv": LINEARS}
    return Adapter(
        name=name,
        layouts=replace(layout, model=path + model),
        default_blocks=early_stages,
        blocks={path + block: replace(description, classes=classes)},
    )


LAYERS = Layout("", grid=channels_last_grid, stages=partial(swin_stages, "layers"))

SWIN = swin(
    *("timm Swin", "swin_transformer", "SwinTransformer", "SwinTransformerBlock"),
    *(LAYERS, Windowed(), "WindowAttention"),
)
SWIN_V2 = swin(
    *("timm Swin v2", "swin_transformer_v2", "SwinTransformerV2", "SwinTransformerV2Block"),
    *(LAYERS, Windowed(post_norm=True, kept_query_attention=W.timm_v2_attention), "WindowAttention"),
)
SWIN_V2_CR = swin(
    *("timm Swin v2 CR", "swin_transformer_v2_cr", "SwinTransformerV2Cr", "SwinTransformerV2CrBlock"),
    Layout("", stages=partial(swin_stages, "stages")),
    Windowed(constant=("attn.meta_mlp",), post_norm=True, last="norm3", kept_query_attention=W.timm_cr_attention),
    "WindowMultiHeadAttention",
)

ADAPTERS = (VIT, EVA, BEIT, RELATIVE_VIT, MIXER, CONVNEXT, HYBRID, SWIN, SWIN_V2, SWIN_V2_CR)
