"""Models of about 5 million parameters for images of 32 pixels, smaller ones for a CPU, and toys for tests.

Larger images have larger patches.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

from torch import nn

SIZES = ("full", "small", "toy")
Sizes = dict[str, dict[str, Any]]


@dataclass(frozen=True)
class Recipe:
    """How a model is built of (image size, classes, its sizes, further options); its learning rate for batches of 256,
    by optimizer; sizes by name."""

    build: Callable[..., nn.Module]
    lr: dict[str, float]
    sizes: Sizes


def vit(image: int, classes: int, **options: Any) -> nn.Module:
    from timm.models.vision_transformer import VisionTransformer

    return VisionTransformer(img_size=image, patch_size=max(4, image // 16), num_classes=classes, **options)


class Stem(nn.Sequential):
    """Three convolutions of 3 × 3 pixels, the second of stride 2, each as wide as two before it."""

    def __init__(self, width: int) -> None:
        widths, layers = (3, width, 2 * width, 4 * width), []
        for i, (before, after) in enumerate(pairwise(widths)):
            convolution = nn.Conv2d(before, after, 3, 2 if i == 1 else 1, 1, bias=False)
            layers += [convolution, nn.BatchNorm2d(after), nn.GELU()]
        super().__init__(*layers)
        self.num_features = widths[-1]


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
    "hybrid": Recipe(
        hybrid, TRANSFORMERS,
        {
            "full": {"embed_dim": 256, "depth": 7, "num_heads": 4, "stem": 32},
            "small": {"embed_dim": 64, "depth": 7, "num_heads": 2, "stem": 8},
            "toy": {"embed_dim": 32, "depth": 3, "num_heads": 2, "stem": 4},
        },
    ),
    "convnext": Recipe(convnext, CONVOLUTIONS, CONVNEXT),
    "convnext2": Recipe(partial(convnext, stem=2, scale=1e-6), CONVOLUTIONS, CONVNEXT),  # as for large images
    "swin": Recipe(
        swin, TRANSFORMERS,
        {
            "full": {"embed_dim": 64, "depths": (2, 2, 6), "num_heads": (2, 4, 8)},
            "small": {"embed_dim": 32, "depths": (2, 2, 4), "num_heads": (1, 2, 4)},
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
