"""The models that are measured: the papers' Table 1 and two whose blocks are run again, at usual batch sizes."""

from dataclasses import dataclass
from typing import Any

import timm
import torch
from torch import nn

VIT = ("full", "checkpoint", "sbp query r=0.25", "sbp query r=0.25, saved")
CONVNEXT = ("full", "checkpoint", "sbp query r=0.5", "sbp query r=0.5, saved")


@dataclass(frozen=True)
class Model:
    """``methods`` (none: all) and ``modes`` are what a run measures unless it is told otherwise."""

    name: str
    batch: int
    size: int = 224
    channels_last: bool = False
    methods: tuple[str, ...] = ()
    modes: tuple[str, ...] = ("eager",)

    def build(self, size: int | None = None, **options: Any) -> nn.Module:
        size = size or self.size
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
    "test_vit": Model("test_vit", 2, 64),
    "test_convnext": Model("test_convnext", 2, 64, channels_last=True),
}
MEASURED = [name for name in MODELS if not name.startswith("test_")]
