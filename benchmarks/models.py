"""The models that are measured: the papers' Table 1, Swin, DINO, EVA02, BEiT, MaxViT, video; at usual batch sizes."""

from dataclasses import dataclass, field
from typing import Any

import timm
import torch
from torch import Tensor, nn

VIT = ("full", "checkpoint", "sbp query r=0.25", "sbp query r=0.25, saved")
OWN = ("exact, lean (r=1)", "own rows r=0.5", "own rows r=0.25")
CONVNEXT = ("full", "checkpoint", "sbp query r=0.5", "sbp query r=0.5, saved", *OWN)
RATIOS = ("full", "sbp query r=0.5", "sbp query r=0.25")
VIDEO = ("full", "checkpoint", "exact, lean (r=1)", *(f"sbp frames r={ratio}" for ratio in (0.5, 0.25, 0.125)))
BOTH, ALL = ("eager", "compiled"), ("eager", "compiled", "graphs")
SMALL = ("full", "sbp query r=0.25", "sbp query r=0.25, per sample", "own rows r=0.25")
TINY_SWIN = {"embed_dim": 24, "depths": [1, 1, 2, 1], "num_heads": [1, 2, 2, 4], "window_size": [2, 4, 4]}


@dataclass(frozen=True)
class Model:
    """``methods`` (empty: all) and ``modes`` are what a run measures by default."""

    name: str
    batch: int
    size: int = 224
    channels_last: bool = False
    methods: tuple[str, ...] = ()
    modes: tuple[str, ...] = ("eager",)

    def shape(self, size: int, **options: Any) -> tuple[int, ...]:
        """The shape of one sample."""
        return (3, size, size)

    def build(self, size: int | None = None, **options: Any) -> nn.Module:
        size = size or self.size
        if "vit" in self.name:
            options["img_size"] = size
        model = timm.create_model(self.name, num_classes=1000, **options).train()
        return model.to(memory_format=torch.channels_last) if self.channels_last else model


@dataclass(frozen=True)
class Video(Model):
    """A model for clips of so many frames."""

    frames: int = 32
    options: dict[str, Any] = field(default_factory=dict)

    def shape(self, size: int, frames: int | None = None, **options: Any) -> tuple[int, ...]:
        return (3, frames or self.frames, size, size)

    def build(self, size: int | None = None, frames: int | None = None, **options: Any) -> nn.Module:
        from torchsbp.train.video.model import Model as Options
        from torchsbp.train.video.model import make_model

        given = Options(self.name, {**self.options, **options})
        return make_model(given, frames or self.frames, size or self.size, classes=1000, start=True).train()


@dataclass(frozen=True)
class Dinov2(Model):
    """DINOv2 of transformers, with random weights."""

    def build(self, size: int | None = None, **options: Any) -> nn.Module:
        from transformers import Dinov2Config, Dinov2ForImageClassification

        return Logits(Dinov2ForImageClassification(Dinov2Config(num_labels=1000, **options)).train())


class Logits(nn.Module):
    """Returns the logits of a model of transformers."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x).logits


MODELS = {
    "vit_base": Model("vit_base_patch16_224", 256, modes=("eager", "compiled")),
    **{f"vit_base_{batch}": Model("vit_base_patch16_224", batch, methods=SMALL, modes=BOTH) for batch in (8, 32, 64)},
    "vit_small": Model("vit_small_patch16_224", 64, methods=SMALL, modes=BOTH),
    "vit_large": Model("vit_large_patch16_224", 64, methods=SMALL, modes=BOTH),
    "vit_tiny": Model("vit_tiny_patch16_224", 256, methods=VIT, modes=("compiled", "graphs")),
    "convnext_tiny": Model("convnext_tiny", 128, channels_last=True, methods=CONVNEXT, modes=ALL),
    "convnext_base": Model("convnext_base", 64, channels_last=True, methods=CONVNEXT, modes=("compiled", "graphs")),
    "dinov3_base": Model("vit_base_patch16_dinov3", 256, methods=VIT, modes=("compiled",)),
    "dinov3_base_128": Model("vit_base_patch16_dinov3", 128, methods=RATIOS, modes=BOTH),
    "swin_tiny": Model("swin_tiny_patch4_window7_224", 128, methods=(*CONVNEXT, "sbp query r=0.25"), modes=BOTH),
    "swinv2_tiny": Model("swinv2_tiny_window8_256", 128, 256, methods=RATIOS, modes=BOTH),
    "beit_base": Model("beit_base_patch16_224", 64, methods=RATIOS, modes=BOTH),
    "maxvit_tiny": Model("maxvit_tiny_tf_224", 64, methods=RATIOS, modes=BOTH),
    "eva02_base": Model("eva02_base_patch14_224", 64, methods=RATIOS, modes=BOTH),
    "dinov2_base": Dinov2("transformers/Dinov2ForImageClassification", 128, methods=RATIOS, modes=BOTH),
    "video_swin_tiny": Video("swin3d_t", 16, methods=VIDEO, modes=BOTH),
    "video_swin_tiny_8": Video("swin3d_t", 8, methods=VIDEO, modes=BOTH),
    "video_swin_base": Video("swin3d_b", 8, methods=VIDEO, modes=BOTH),
    "videomae_base": Video("transformers/VideoMAEForVideoClassification", 16, methods=VIDEO, modes=BOTH, frames=16),
    "test_vit": Model("test_vit", 2, 64),
    "test_convnext": Model("test_convnext", 2, 64, channels_last=True),
    "test_video": Video("swin3d_t", 2, 64, frames=16, options=TINY_SWIN),
}
MEASURED = [name for name in MODELS if not name.startswith("test_")]
