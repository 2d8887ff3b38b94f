"""torchvision: ConvNeXt."""

from torch import nn

from .base import Adapter, Stage, early_stages, no_prefix, output_grid
from .parts import ConvBlock, Downsample


def convnext_stages(model: nn.Module) -> list[Stage]:
    """``features`` alternates: stem, stage, down-sampling layer, stage, …"""
    features = list(model.features)  # type: ignore[arg-type]
    return [
        Stage(tuple(f"features.{i}.{j}" for j in range(len(features[i]))), f"features.{i - 1}" if i > 1 else "")
        for i in range(1, len(features), 2)
    ]


CONVNEXT = Adapter(
    name="torchvision ConvNeXt",
    model="torchvision.models.convnext.ConvNeXt",
    entry="features.0",
    grid=output_grid,
    stages=convnext_stages,
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
    recipe=early_stages,
    prefix=no_prefix,
    downsample=Downsample(),
)
