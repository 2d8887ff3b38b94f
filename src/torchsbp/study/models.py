"""Models of about 5 million parameters for images of 32 pixels, smaller ones for a CPU, and toys for tests.

Larger images have larger patches.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import nn

SIZES = ("full", "small", "toy")
Sizes = dict[str, dict[str, Any]]


@dataclass(frozen=True)
class Recipe:
    """How a model is built of (image size, classes, its sizes, further options); its learning rate for batches of 256;
    sizes by name."""

    build: Callable[..., nn.Module]
    lr: float
    sizes: Sizes


def vit(image: int, classes: int, **options: Any) -> nn.Module:
    from timm.models.vision_transformer import VisionTransformer

    return VisionTransformer(img_size=image, patch_size=max(4, image // 16), num_classes=classes, **options)


class Stem(nn.Sequential):
    """Two convolutions of 3 × 3 pixels, the first of stride 2."""

    def __init__(self, width: int) -> None:
        first, second = nn.Conv2d(3, width // 2, 3, 2, 1, bias=False), nn.Conv2d(width // 2, width, 3, 1, 1, bias=False)
        super().__init__(first, nn.BatchNorm2d(width // 2), nn.GELU(), second, nn.BatchNorm2d(width), nn.GELU())
        self.num_features = width


def hybrid(image: int, classes: int, stem: int, **options: Any) -> nn.Module:
    """A ViT whose patches are cut out of what a stem makes of the image: it learns sooner."""
    from timm.layers import HybridEmbed

    def embed(img_size: int, patch_size: int, embed_dim: int, **unused: Any) -> nn.Module:
        inner, features = patch_size // 2, (img_size // 2, img_size // 2)
        return HybridEmbed(Stem(stem), img_size, inner, feature_size=features, feature_ratio=2, embed_dim=embed_dim)

    return vit(image, classes, embed_layer=embed, **options)


def convnext(image: int, classes: int, stem: int = 1, scale: float = 1.0, **options: Any) -> nn.Module:
    from timm.models.convnext import ConvNeXt

    # From a stem of 2 pixels timm's first stage goes on to 4, and the mask of stage 3 would be drawn on 2×2 cells.
    return ConvNeXt(num_classes=classes, patch_size=stem * max(1, image // 32), ls_init_value=scale, **options)


def swin(image: int, classes: int, **options: Any) -> nn.Module:
    from timm.models.swin_transformer import SwinTransformer

    return SwinTransformer(
        img_size=image, patch_size=max(2, image // 16), window_size=4, num_classes=classes, **options
    )


def video(image: int, classes: int, drop_path_rate: float, **options: Any) -> nn.Module:
    from torchvision.models.video.swin_transformer import SwinTransformer3d

    return SwinTransformer3d(
        [2, 4, 4], window_size=[2, 4, 4], num_classes=classes, stochastic_depth_prob=drop_path_rate, **options
    )


CONVNEXT: Sizes = {
    "full": {"depths": (1, 2, 6, 2), "dims": (48, 96, 192, 384)},
    "small": {"depths": (1, 1, 4, 1), "dims": (16, 32, 64, 128)},
    "toy": {"depths": (1, 1, 1, 1), "dims": (8, 8, 16, 16)},
}
MODELS = {
    "vit": Recipe(
        vit, 5e-4,
        {
            "full": {"embed_dim": 192, "depth": 12, "num_heads": 3},
            "small": {"embed_dim": 64, "depth": 12, "num_heads": 2},
            "toy": {"embed_dim": 32, "depth": 3, "num_heads": 2},
        },
    ),
    "hybrid": Recipe(
        hybrid, 5e-4,
        {
            "full": {"embed_dim": 256, "depth": 7, "num_heads": 4, "stem": 64},
            "small": {"embed_dim": 64, "depth": 7, "num_heads": 2, "stem": 16},
            "toy": {"embed_dim": 32, "depth": 3, "num_heads": 2, "stem": 8},
        },
    ),
    "convnext": Recipe(convnext, 1e-3, CONVNEXT),
    "convnext2": Recipe(partial(convnext, stem=2, scale=1e-6), 1e-3, CONVNEXT),  # as for large images: an ablation
    "swin": Recipe(
        swin, 5e-4,
        {
            "full": {"embed_dim": 64, "depths": (2, 2, 6), "num_heads": (2, 4, 8)},
            "small": {"embed_dim": 32, "depths": (2, 2, 4), "num_heads": (1, 2, 4)},
            "toy": {"embed_dim": 8, "depths": (2, 2), "num_heads": (1, 2)},
        },
    ),
    "video": Recipe(
        video, 1e-3,
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
