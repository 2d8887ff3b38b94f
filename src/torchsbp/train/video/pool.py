"""From features of frames ``[B, T, D]`` to those of the clip: by their mean, or by layers over time."""

import torch
from torch import Tensor, nn


class Mean(nn.Module):
    """The mean over frames, whatever their order."""

    def forward(self, features: Tensor) -> Tensor:
        return features.mean(1)


class Time(nn.Module):
    """Transformer layers over frames with learned places; on an image model, ViViT's factorised encoder (model 2)."""

    WIDTH, HEADS = 256, 4

    def __init__(self, features: int, frames: int, layers: int, dropout: float) -> None:
        super().__init__()
        self.narrow = nn.Linear(features, self.WIDTH)
        self.places = nn.Parameter(0.02 * torch.randn(frames, self.WIDTH))
        self.layers = nn.Sequential(*(self.layer(dropout) for _ in range(layers)))
        self.norm = nn.LayerNorm(self.WIDTH)

    def layer(self, dropout: float) -> nn.Module:
        return nn.TransformerEncoderLayer(
            self.WIDTH, self.HEADS, 4 * self.WIDTH, dropout, "gelu", batch_first=True, norm_first=True
        )

    def forward(self, features: Tensor) -> Tensor:
        return self.norm(self.layers(self.narrow(features) + self.places).mean(1))
