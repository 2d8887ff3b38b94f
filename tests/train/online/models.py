"""Tiny detectors."""

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
    encoder = Encoder(chunk=3, **config)
    frames = FrameEncoder(body, (0.5, 0.4, 0.3), (0.2, 0.3, 0.4), encoder.frozen)
    return OnlineDetector(frames, LSTR(6, CLASSES, window, SIZES), encoder).double()


def video(*shape: int) -> Tensor:
    """Frames of 8 bits, ``[*shape, 3, 6, 6]``."""
    return torch.randint(0, 256, (*shape, 3, 6, 6), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
