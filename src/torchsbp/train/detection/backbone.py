"""A timm backbone and a feature pyramid: maps of strides 4, 8, 16 and 32, and a fifth of half that resolution."""

from collections import OrderedDict
from pathlib import Path
from typing import Any

import timm
import torch
from timm.layers import LayerNorm2d
from torch import Tensor, nn
from torchvision.ops.feature_pyramid_network import FeaturePyramidNetwork, LastLevelMaxPool

from ...errors import CheckpointError, UsageError
from ..data.seeds import generators_kept
from ..runs.weights import read_weights

STRIDES = (4, 8, 16, 32)
LEVELS = ("0", "1", "2", "3")
"""names of the pyramid's maps from which proposals are pooled; the fifth map is for large anchors alone"""


class Backbone(nn.Module):
    """``body`` makes feature maps, and ``pyramid`` turns them into maps of ``width`` channels."""

    def __init__(self, body: nn.Module, width: int) -> None:
        super().__init__()
        info: Any = body.feature_info
        strides, channels = info.reduction(), info.channels()
        self.body, self.width = body, width
        self.channels_last = body.output_fmt == "NHWC"
        if len(set(strides)) == 1:  # a plain ViT: its last map in four sizes
            self.maps: tuple[int, ...] = (len(strides) - 1,)
            self.spread: nn.Module = SimplePyramid(channels[-1], strides[-1])
            channels = self.spread.channels
        else:
            self.maps = tuple(strides.index(stride) for stride in STRIDES if stride in strides)
            if len(self.maps) != len(STRIDES):
                raise UsageError(f"a pyramid needs maps of strides {STRIDES}, this backbone has {tuple(strides)}")
            channels = [channels[i] for i in self.maps]
            self.spread = nn.Identity()
        self.pyramid = Pyramid(channels, width)

    def forward(self, images: Tensor) -> OrderedDict[str, Tensor]:
        maps = self.body(images)
        maps = [maps[i].permute(0, 3, 1, 2) if self.channels_last else maps[i] for i in self.maps]
        maps = self.spread(maps)
        return self.pyramid(OrderedDict(zip(LEVELS, maps, strict=True)))


class Pyramid(FeaturePyramidNetwork):
    """torchvision's feature pyramid, with a norm before each lateral convolution."""

    def __init__(self, channels: list[int], width: int) -> None:
        super().__init__(channels, width, LastLevelMaxPool())
        self.norms = nn.ModuleList(LayerNorm2d(number) for number in channels)

    def get_result_from_inner_blocks(self, x: Tensor, idx: int) -> Tensor:
        return self.inner_blocks[idx](self.norms[idx](x))


class SimplePyramid(nn.Module):
    """Four sizes of the one map of a plain ViT: enlarged by strided deconvolutions, as it is, and pooled."""

    def __init__(self, channels: int, stride: int) -> None:
        super().__init__()
        if stride not in (8, 16):
            raise UsageError(f"a simple pyramid needs a map of stride 8 or 16, this backbone has {stride}")
        half, quarter = channels // 2, channels // 4
        double = nn.ConvTranspose2d(channels, half, 2, 2)
        again = nn.Sequential(
            nn.ConvTranspose2d(channels, half, 2, 2),
            LayerNorm2d(half),
            nn.GELU(),
            nn.ConvTranspose2d(half, quarter, 2, 2),
        )
        same, pool = nn.Identity(), nn.MaxPool2d(2)
        if stride == 16:
            self.sizes = nn.ModuleList((again, double, same, pool))
            self.channels = [quarter, half, channels, channels]
        else:
            self.sizes = nn.ModuleList((double, same, pool, nn.MaxPool2d(4)))
            self.channels = [half, channels, channels, channels]

    def forward(self, maps: list[Tensor]) -> list[Tensor]:
        return [size(maps[0]) for size in self.sizes]


def body(name: str, options: dict[str, Any], pretrained: bool, weights: Path | None, multiple: int) -> nn.Module:
    """Make timm's model as a feature extractor, for images whose sides are multiples of ``multiple``."""
    try:
        found: nn.Module = timm.create_model(name, features_only=True, pretrained=pretrained, **options)
        with torch.no_grad(), generators_kept():
            found.eval()(torch.zeros(1, 3, 2 * multiple, 3 * multiple))
    except Exception as error:  # an unknown name, an option it does not have, sizes it can't take
        raise UsageError(
            f"task.model.name {name} with {options} as a backbone for images of any size: {error}. A ViT needs "
            "task.model.options.dynamic_img_size=true, a Swin strict_img_size=false and always_partition=true"
        ) from error
    if weights is not None:
        load(found, weights)
    return found.train()


def load(found: nn.Module, path: Path) -> None:
    """Load weights of the same model: from a classifier of ours or timm's (without its head), or from our detector."""
    given, own = read_weights(path), found.state_dict()
    given = {name.removeprefix("backbone.body."): value for name, value in given.items()}
    chosen = {}
    for name, value in own.items():
        match = next((given[each] for each in names_of(name) if each in given), None)
        if match is None:
            raise CheckpointError(f"{path} is of another model: it has no {names_of(name)[1]}")
        if match.shape != value.shape:
            raise CheckpointError(
                f"{path} is of a model of another size: {name} {tuple(match.shape)}, here {tuple(value.shape)}"
            )
        chosen[name] = match
    found.load_state_dict(chosen)


def names_of(name: str) -> tuple[str, str]:
    """Return a weight's names in a detector's body and in the classifier: ``features_only`` flattens the first level
    (``stem.0`` becomes ``stem_0``), or holds the model as ``model``."""
    first, _, rest = name.partition(".")
    if first == "model":
        return name, rest
    chain, _, number = first.rpartition("_")
    return name, f"{chain}.{number}.{rest}" if number.isdigit() else name
