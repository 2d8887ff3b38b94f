"""timm: the ViT family of ``vision_transformer.Block`` and ConvNeXt."""

from torch import Tensor, nn

from .base import Adapter, Stage, early_stages, last_blocks, no_prefix, output_grid
from .parts import ConvBlock, Downsample, TransformerBlock

# Where timm keeps it, and where it was before.
ATTENTION = ("timm.layers.attention.Attention", "timm.models.vision_transformer.Attention")
MLP = ("timm.layers.mlp.Mlp",)


def patch_grid(embed: nn.Module, x: Tensor, y: Tensor) -> tuple[int, ...]:
    return tuple(embed.dynamic_feat_size(tuple(x.shape[-2:])))  # type: ignore[operator]


def prefix_tokens(model: nn.Module) -> int:
    return int(model.num_prefix_tokens)  # type: ignore[arg-type]


def vit_stages(model: nn.Module) -> list[Stage]:
    return [Stage(tuple(f"blocks.{i}" for i in range(len(model.blocks))))]  # type: ignore[arg-type]


def convnext_stages(model: nn.Module) -> list[Stage]:
    stages = []
    for i, stage in enumerate(model.stages):  # type: ignore[arg-type]
        blocks = tuple(f"stages.{i}.blocks.{j}" for j in range(len(stage.blocks)))
        stages.append(Stage(blocks, "" if isinstance(stage.downsample, nn.Identity) else f"stages.{i}.downsample"))
    return stages


VIT = Adapter(
    name="timm ViT",
    model="timm.models.vision_transformer.VisionTransformer",
    entry="patch_embed",
    grid=patch_grid,
    stages=vit_stages,
    blocks={
        "timm.models.vision_transformer.Block": TransformerBlock(
            idle=(
                *("attn.attn_drop", "attn.norm", "attn.gate", "attn.proj_drop"),
                *("mlp.drop1", "mlp.norm", "mlp.drop2"),
            ),
            classes={"attn": ATTENTION, "mlp": MLP},
        )
    },
    recipe=last_blocks,
    prefix=prefix_tokens,
)

CONVNEXT = Adapter(
    name="timm ConvNeXt",
    model="timm.models.convnext.ConvNeXt",
    entry="stem",
    grid=output_grid,
    stages=convnext_stages,
    blocks={
        "timm.models.convnext.ConvNeXtBlock": ConvBlock(
            idle=("shortcut", "mlp.drop1", "mlp.norm", "mlp.grn", "mlp.drop2"), classes={"mlp": MLP}
        )
    },
    recipe=early_stages,
    prefix=no_prefix,
    downsample=Downsample(),
)
