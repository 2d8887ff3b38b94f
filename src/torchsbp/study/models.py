"""Models of 5 to 7 million parameters for images of 32 pixels, smaller ones for a CPU, and toys for tests.

Larger images have larger patches.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from torch import nn

SIZES = ("full", "small", "toy")
TITLES = {
    "vit": "ViT", "hybrid": "hybrid ViT", "pooled": "hybrid ViT, pooled", "convnext": "ConvNeXt",
    "convnext2": "ConvNeXt, coarse stem", "swin": "Swin", "video": "Video Swin",
}  # fmt: skip
"""Names of models in figures."""
Sizes = dict[str, dict[str, Any]]


@dataclass(frozen=True)
class Recipe:
    """``build`` makes a model of (image size, number of classes, sizes, further options). ``lr`` has the learning rate
    for batches of 256, by optimizer; ``sizes`` has the options of every size, by name."""

    build: Callable[..., nn.Module]
    lr: dict[str, float]
    sizes: Sizes


def vit(image: int, classes: int, **options: Any) -> nn.Module:
    from timm.models.vision_transformer import VisionTransformer

    return VisionTransformer(img_size=image, patch_size=max(4, image // 16), num_classes=classes, **options)


class Stem(nn.Sequential):
    """3 × 3 convolutions from the image's colours to these widths, the second one with the stride. Small models learn
    faster behind a stem than directly on patches."""

    def __init__(self, widths: Sequence[int], stride: int) -> None:
        layers: list[nn.Module] = []
        for i, (before, after) in enumerate(pairwise((3, *widths))):
            convolution = nn.Conv2d(before, after, 3, stride if i == 1 else 1, 1, bias=False)
            layers += [convolution, nn.BatchNorm2d(after), nn.GELU()]
        super().__init__(*layers)
        self.num_features = widths[-1]


def behind(stem: Sequence[int], stride: int) -> Any:
    """Return a constructor of patch embeddings that cut the output of a stem into patches."""
    from timm.layers import HybridEmbed

    def embed(img_size: int, patch_size: int, embed_dim: int, output_fmt: str = "NLC", **unused: Any) -> nn.Module:
        side = img_size // stride
        return HybridEmbed(
            Stem(stem, stride), img_size, patch_size // stride, feature_size=(side, side), feature_ratio=stride,
            embed_dim=embed_dim, output_fmt=output_fmt,
        )  # fmt: skip

    return embed


def hybrid(image: int, classes: int, embed_dim: int, **options: Any) -> nn.Module:
    """A ViT behind a stem."""
    stem = behind((embed_dim // 8, embed_dim // 4, embed_dim // 2), 2)
    return vit(image, classes, embed_dim=embed_dim, embed_layer=stem, **options)


def pooled(image: int, classes: int, embed_dim: int, **options: Any) -> nn.Module:
    """The hybrid ViT, with the mean over positions in place of a class token."""
    return hybrid(image, classes, embed_dim, global_pool="avg", class_token=False, **options)


def convnext(image: int, classes: int, dims: Sequence[int], **options: Any) -> nn.Module:
    """A ConvNeXt behind a stem."""
    result = patched_convnext(image, classes, patch=1, scale=1.0, dims=dims, **options)
    result.stem = Stem((dims[0] // 2, dims[0]), max(1, image // 32))
    return result


def patched_convnext(image: int, classes: int, patch: int = 2, scale: float = 1e-6, **options: Any) -> nn.Module:
    """A ConvNeXt built as for large images. Its patches have 2 pixels, and timm's first stage goes on to 4, so that the
    mask of stage 3 is drawn on 2×2 cells."""
    from timm.models.convnext import ConvNeXt

    return ConvNeXt(num_classes=classes, patch_size=patch * max(1, image // 32), ls_init_value=scale, **options)


def swin(image: int, classes: int, embed_dim: int, **options: Any) -> nn.Module:
    """A Swin behind a stem. Its stages have the ConvNeXt's side lengths, the third one 8 for images of 32 pixels: with
    fewer positions a sampled share would say little."""
    from timm.models.swin_transformer import SwinTransformer

    stem = behind((embed_dim // 2, embed_dim), 1)
    return SwinTransformer(
        img_size=image, patch_size=max(1, image // 32), window_size=4, num_classes=classes, embed_dim=embed_dim,
        embed_layer=stem, **options,
    )  # fmt: skip


def video(image: int, classes: int, drop_path_rate: float, **options: Any) -> nn.Module:
    from torchvision.models.video.swin_transformer import SwinTransformer3d

    return SwinTransformer3d(
        [2, 4, 4], window_size=[2, 4, 4], num_classes=classes, stochastic_depth_prob=drop_path_rate, **options
    )


HYBRID: Sizes = {
    "full": {"embed_dim": 256, "depth": 7, "num_heads": 4},
    "small": {"embed_dim": 64, "depth": 7, "num_heads": 2},
    "toy": {"embed_dim": 32, "depth": 3, "num_heads": 2},
}
CONVNEXT: Sizes = {
    "full": {"depths": (1, 2, 6, 2), "dims": (48, 96, 192, 384)},
    "small": {"depths": (1, 1, 4, 1), "dims": (16, 32, 64, 128)},
    "toy": {"depths": (1, 1, 1, 1), "dims": (8, 8, 16, 16)},
}
TRANSFORMERS, CONVOLUTIONS = {"muon": 2e-3, "adamw": 5e-4}, {"muon": 4e-3, "adamw": 1e-3}
MODELS = {
    "vit": Recipe(
        vit, TRANSFORMERS,
        {
            "full": {"embed_dim": 192, "depth": 12, "num_heads": 3},
            "small": {"embed_dim": 64, "depth": 12, "num_heads": 2},
            "toy": {"embed_dim": 32, "depth": 3, "num_heads": 2},
        },
    ),
    "hybrid": Recipe(hybrid, TRANSFORMERS, HYBRID),
    "pooled": Recipe(pooled, TRANSFORMERS, HYBRID),
    "convnext": Recipe(convnext, CONVOLUTIONS, CONVNEXT),
    "convnext2": Recipe(patched_convnext, CONVOLUTIONS, CONVNEXT),
    "swin": Recipe(
        swin, TRANSFORMERS,
        {
            "full": {"embed_dim": 48, "depths": (2, 2, 6, 2), "num_heads": (2, 4, 8, 16)},
            "small": {"embed_dim": 16, "depths": (2, 2, 4, 2), "num_heads": (1, 2, 4, 8)},
            "toy": {"embed_dim": 8, "depths": (2, 2), "num_heads": (1, 2)},
        },
    ),
    "video": Recipe(
        video, TRANSFORMERS,
        {
            "full": {"embed_dim": 48, "depths": [2, 2, 6, 2], "num_heads": [2, 4, 8, 16]},
            "small": {"embed_dim": 24, "depths": [2, 2, 6, 2], "num_heads": [1, 2, 4, 8]},
            "toy": {"embed_dim": 8, "depths": [2, 2], "num_heads": [1, 2]},
        },
    ),
}  # fmt: skip


def build(name: str, size: str, image: int, classes: int, **options: Any) -> nn.Module:
    recipe = MODELS[name]
    return recipe.build(image, classes, **recipe.sizes[size], **options)
