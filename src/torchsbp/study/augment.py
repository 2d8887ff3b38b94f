"""Augmentation of batches of small images on their device: with steps this short a data loader would be the bottleneck.

All randomness is in numbers that the caller gives, so that runs with one seed see the same images on any device.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

NUMBERS = 15
"""Random numbers that every image needs."""


@dataclass(frozen=True)
class Augment:
    """``shift`` and the side of the ``hole`` are shares of the image. ``turn`` (in degrees), ``stretch`` and ``shear``
    change half of the images, ``mixup`` is the share of images that are mixed. Clips get label smoothing only."""

    shift: float = 0.125
    turn: float = 10.0
    stretch: float = 0.1
    shear: float = 0.1
    jitter: float = 0.2
    hole: float = 0.25
    mixup: float = 0.2
    smoothing: float = 0.1

    def __call__(self, x: Tensor, y: Tensor, classes: int, numbers: Tensor) -> tuple[Tensor, Tensor]:
        """Return images and targets ``[B, classes]``, of images ``[B, 3, H, W]`` in [0, 1], labels ``[B]`` and random
        numbers ``[NUMBERS, B]``, uniform in [0, 1)."""
        targets = F.one_hot(y, classes) * (1 - self.smoothing) + self.smoothing / classes
        if x.dim() > 4:
            return x, targets
        given = iter(numbers)
        x = warped(x, self.shift, self.turn, given, self.stretch, self.shear)
        x = with_hole(jittered(x, self.jitter, given), self.hole, given)
        return mixed(x, targets, self.mixup, given)


def uniform(numbers: Iterator[Tensor], low: float = 0.0, high: float = 1.0) -> Tensor:
    """The next number of every image, scaled to [low, high)."""
    return next(numbers) * (high - low) + low


def warped(
    x: Tensor, shift: float, turn: float, numbers: Iterator[Tensor], stretch: float = 0.0, shear: float = 0.0
) -> Tensor:
    """Flip images and shift them by whole pixels; turn, stretch and shear half of them too. Each image is resampled
    once, which is exact for the other half."""
    flip = uniform(numbers).round() * 2 - 1
    bent = uniform(numbers).round()
    angle = uniform(numbers, -1, 1) * math.radians(turn) * bent
    wide, high = ((uniform(numbers, -1, 1) * math.log1p(stretch) * bent).exp() for _ in range(2))
    slant = uniform(numbers, -1, 1) * shear * bent
    shifts = [(uniform(numbers, -1, 1) * (shift * size + 0.5)).round() * 2 / size for size in x.shape[2:]]
    cos, sin = angle.cos(), angle.sin()
    rows = [
        torch.stack((cos * wide * flip, (slant * cos - sin) * high, shifts[1]), 1),
        torch.stack((sin * wide * flip, (slant * sin + cos) * high, shifts[0]), 1),
    ]
    grid = F.affine_grid(torch.stack(rows, 1), list(x.shape), align_corners=False)
    return F.grid_sample(x, grid, align_corners=False)


def jittered(x: Tensor, strength: float, numbers: Iterator[Tensor]) -> Tensor:
    """Multiply brightness, contrast and saturation by factors around 1."""
    factors = [uniform(numbers, 1 - strength, 1 + strength).view(-1, 1, 1, 1) for _ in range(3)]
    x = x * factors[0]
    mean = x.mean((1, 2, 3), keepdim=True)
    x = mean + factors[1] * (x - mean)
    grey = x.mean(1, keepdim=True)
    return (grey + factors[2] * (x - grey)).clamp(0, 1)


def with_hole(x: Tensor, side: float, numbers: Iterator[Tensor]) -> Tensor:
    """Make a square of each image grey, around a random place in the image."""
    inside = torch.ones((), dtype=torch.bool, device=x.device)
    for dim in (2, 3):
        size = x.shape[dim]
        places = torch.arange(size, device=x.device) + 0.5
        near = (places - uniform(numbers, 0, size)[:, None]).abs() < side * size / 2
        inside = inside & near.view(-1, 1, *((size, 1) if dim == 2 else (1, size)))
    return x.masked_fill(inside, 0.5)


def mixed(x: Tensor, targets: Tensor, share: float, numbers: Iterator[Tensor]) -> tuple[Tensor, Tensor]:
    """Mix a share of the images by λ ~ Beta(½, ½), the distribution of sin² of a uniform angle. The partner is as
    far from the other end of the batch: a random image, as batches are in random order."""
    part = (uniform(numbers) * math.pi / 2).sin().square()
    part = torch.where(uniform(numbers) < share, part, 1.0)
    images, labels = part.view(-1, 1, 1, 1), part.view(-1, 1)
    return images * x + (1 - images) * x.flip(0), labels * targets + (1 - labels) * targets.flip(0)
