"""The models that are measured: the papers' Table 1, and one or two of every other family, at usual batch sizes."""

from dataclasses import dataclass
from typing import Any

import timm
import torch
import torchvision
from torch import nn

VIT = ("full", "checkpoint", "sbp query r=0.25", "sbp query r=0.25, saved")
CONVNEXT = ("full", "checkpoint", "sbp query r=0.5", "sbp query r=0.5, saved")
RATIOS = ("full", "sbp query r=0.5", "sbp query r=0.25")


@dataclass(frozen=True)
class Model:
    """``methods`` (none: all) and ``modes`` are what a run measures unless it is told otherwise. A model of videos has
    ``frames`` and is torchvision's, the others are timm's."""

    name: str
    batch: int
    size: int = 224
    channels_last: bool = False
    methods: tuple[str, ...] = ()
    modes: tuple[str, ...] = ("eager",)
    frames: int = 0

    def build(self, size: int | None = None, **options: Any) -> nn.Module:
        size = size or self.size
        if self.frames:
            return torchvision.models.get_model(self.name, num_classes=1000, **options).train()
        if "vit" in self.name:
            options["img_size"] = size
        model = timm.create_model(self.name, num_classes=1000, **options).train()
        return model.to(memory_format=torch.channels_last) if self.channels_last else model


MODELS = {
    "vit_base": Model("vit_base_patch16_224", 256, modes=("eager", "compiled")),
    "vit_tiny": Model("vit_tiny_patch16_224", 256, methods=VIT, modes=("compiled", "graphs")),
    "convnext_tiny": Model("convnext_tiny", 128, channels_last=True, methods=CONVNEXT, modes=("eager", "compiled")),
    "convnext_base": Model("convnext_base", 64, channels_last=True, methods=CONVNEXT, modes=("compiled", "graphs")),
    "dinov3_base": Model("vit_base_patch16_dinov3", 256, methods=VIT, modes=("compiled",)),
    "swin_tiny": Model("swin_tiny_patch4_window7_224", 128, methods=CONVNEXT, modes=("eager", "compiled")),
    "eva02_base": Model("eva02_base_patch14_224", 64, methods=RATIOS, modes=("eager", "compiled")),
    "video_swin_tiny": Model("swin3d_t", 8, methods=RATIOS, modes=("eager", "compiled"), frames=32),
    "test_vit": Model("test_vit", 2, 64),
    "test_convnext": Model("test_convnext", 2, 64, channels_last=True),
}
MEASURED = [name for name in MODELS if not name.startswith("test_")]
