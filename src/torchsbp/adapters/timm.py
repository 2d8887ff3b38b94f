"""timm: the families of ViT, EVA, BEiT, ViT with relative positions, MLP-Mixer, ConvNeXt, CoAtNet and MaxViT."""

from dataclasses import replace

from torch import Tensor, nn

from .base import Adapter, Stage, early_stages
from .parts import ConvBlock, Downsample, TransformerBlock, qualified
from .residual import Mixer, Patches, PointwiseBlock, Residual

# Where timm keeps it, and where it was before.
ATTENTION = ("timm.layers.attention.Attention", "timm.models.vision_transformer.Attention")
MLP = ("timm.layers.mlp.Mlp",)


def patch_grid(embed: nn.Module, x: Tensor, y: Tensor) -> tuple[int, ...]:
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
        blocks = tuple(f"stages.{i}.{name}" for name, module in modules if qualified(module) in HYBRID.blocks)
        shortcut = next(name for name, _ in modules if name.endswith("shortcut"))
        stages.append(Stage(blocks, f"stages.{i}.{shortcut}"))
    return stages


PRE_NORM = Residual()
POST_NORM = Residual(mixers=(Mixer("attn", ""),))
IN_ONE_PIECE = Residual(mixers=())

VIT = Adapter(
    name="timm ViT",
    model="timm.models.vision_transformer.VisionTransformer",
    grid=patch_grid,
    prefix=prefix_tokens,
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

EVA = replace(
    VIT,
    name="timm EVA",
    model="timm.models.eva.Eva",
    blocks={"timm.models.eva.EvaBlock": PRE_NORM, "timm.models.eva.EvaBlockPostNorm": POST_NORM},
)

BEIT = replace(VIT, name="timm BEiT", model="timm.models.beit.Beit", blocks={"timm.models.beit.Block": PRE_NORM})

RELATIVE_VIT = replace(
    VIT,
    name="timm ViT with relative positions",
    model="timm.models.vision_transformer_relpos.VisionTransformerRelPos",
    blocks={
        "timm.models.vision_transformer_relpos.RelPosBlock": replace(PRE_NORM, constant=("attn.rel_pos",)),
        "timm.models.vision_transformer_relpos.ResPostRelPosBlock": replace(POST_NORM, constant=("attn.rel_pos",)),
    },
)

MIXER = replace(
    VIT,
    name="timm MLP-Mixer",
    model="timm.models.mlp_mixer.MlpMixer",
    entry="stem",
    prefix=0,
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
    model="timm.models.convnext.ConvNeXt",
    entry="stem",
    stages=convnext_stages,
    blocks={
        "timm.models.convnext.ConvNeXtBlock": (
            ConvBlock(
                shortcut="shortcut", idle=("mlp.drop1", "mlp.norm", "mlp.grn", "mlp.drop2"), classes={"mlp": MLP}
            ),
            PointwiseBlock(shortcut="shortcut"),
        )
    },
    recipe=early_stages,
    downsample=(Downsample(), Patches()),
)

WINDOWS = Residual(mixers=(Mixer("ls1", "norm1", whole=True),), constant=("attn.rel_pos",))

HYBRID = Adapter(
    name="timm CoAtNet and MaxViT",
    model="timm.models.maxxvit.MaxxVit",
    entry="stem",
    stages=hybrid_stages,
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
    },
    recipe=early_stages,
)
