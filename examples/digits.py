"""What the demo trains: scikit-learn's handwritten digits and a small timm ViT."""

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

SIZE, PATCH = 32, 4
GRID = SIZE // PATCH


def load() -> tuple[Tensor, Tensor]:
    """The 1797 images, enlarged from 8 × 8, and their labels, in a fixed random order."""
    data = load_digits()
    images = torch.from_numpy(data.images).float()[:, None]
    images = F.interpolate((images - images.mean()) / images.std(), (SIZE, SIZE), mode="bilinear")
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    return images[order], torch.from_numpy(data.target)[order]


def vit() -> nn.Module:
    """64 patches, 6 blocks of width 64. With timm's default weights a ViT this narrow would learn slowly."""
    model = VisionTransformer(
        img_size=SIZE,
        patch_size=PATCH,
        in_chans=1,
        num_classes=10,
        embed_dim=64,
        depth=6,
        num_heads=4,
        class_token=False,
        global_pool="avg",
        weight_init="jax",
    )
    nn.init.normal_(model.pos_embed)
    return model
