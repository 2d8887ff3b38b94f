"""Tiny detectors."""

import timm
import torch
from torch import Tensor, nn

from torchsbp.train.data.window import Window
from torchsbp.train.online.detector import OnlineDetector
from torchsbp.train.online.encoder import Encoder, FrameEncoder
from torchsbp.train.online.lstr import LSTR, Temporal

SIZES = Temporal(width=16, heads=2, feedforward=24, dropout=0.0, queries=(3, 4), units=(2, 1, 2))
CLASSES = 4


def detector(window: Window, **config) -> OnlineDetector:
    """In float64."""
    torch.manual_seed(0)
    body = nn.Sequential(nn.Conv2d(3, 6, 3), nn.GELU(), nn.BatchNorm2d(6), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    body[2].running_mean.normal_(), body[2].running_var.uniform_(0.5, 2)
    return around(body, 6, window, **config)


def detector_of_tokens(window: Window, **config) -> OnlineDetector:
    """The same with a ViT, 36 tokens a frame."""
    torch.manual_seed(0)
    sizes = {"img_size": 6, "patch_size": 1, "embed_dim": 12, "depth": 3, "num_heads": 2}
    return around(timm.create_model("vit_tiny_patch16_224", num_classes=0, **sizes), 12, window, **config)


def around(body: nn.Module, width: int, window: Window, **config) -> OnlineDetector:
    encoder = Encoder(chunk=3, **config)
    frames = FrameEncoder(body, (0.5, 0.4, 0.3), (0.2, 0.3, 0.4), encoder.frozen)
    return OnlineDetector(frames, LSTR(width, CLASSES, window, SIZES), encoder).double()


def video(*shape: int) -> Tensor:
    """Frames of 8 bits, ``[*shape, 3, 6, 6]``."""
    return torch.randint(0, 256, (*shape, 3, 6, 6), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
