"""Augmentation of small images in batches, on their device: a loader would be the limit of short steps.

What is done follows from numbers that are given, so that runs with one seed see the same images, on any device.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

NUMBERS = 15
"""that every image needs"""


@dataclass(frozen=True)
class Augment:
    """Shift as a share of the image; turn in degrees, stretch and shear (of half of the images); colour jitter; side of
    a hole as a share of the image; share of mixed images; label smoothing. Clips are smoothed alone."""

    shift: float = 0.125
    turn: float = 10.0
    stretch: float = 0.1
    shear: float = 0.1
    jitter: float = 0.2
    hole: float = 0.25
    mixup: float = 0.2
    smoothing: float = 0.1

    def __call__(self, x: Tensor, y: Tensor, classes: int, numbers: Tensor) -> tuple[Tensor, Tensor]:
        """Images ``[B, 3, H, W]`` in [0, 1], labels ``[B]`` and numbers ``[NUMBERS, B]``, uniform in [0, 1) -> images,
        targets ``[B, classes]``."""
        targets = F.one_hot(y, classes) * (1 - self.smoothing) + self.smoothing / classes
        if x.dim() > 4:
            return x, targets
        given = iter(numbers)
        x = warped(x, self.shift, self.turn, given, self.stretch, self.shear)
        x = with_hole(jittered(x, self.jitter, given), self.hole, given)
        return mixed(x, targets, self.mixup, given)


def uniform(numbers: Iterator[Tensor], low: float = 0.0, high: float = 1.0) -> Tensor:
    """One number per image, the next ones."""
    return next(numbers) * (high - low) + low


def warped(
    x: Tensor, shift: float, turn: float, numbers: Iterator[Tensor], stretch: float = 0.0, shear: float = 0.0
) -> Tensor:
    """Flipped and shifted by whole pixels; half of the images turned, stretched and sheared too. One sampling of the
    image, exact for the other half."""
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
    """Brightness, contrast and saturation times factors around 1."""
    factors = [uniform(numbers, 1 - strength, 1 + strength).view(-1, 1, 1, 1) for _ in range(3)]
    x = x * factors[0]
    mean = x.mean((1, 2, 3), keepdim=True)
    x = mean + factors[1] * (x - mean)
    grey = x.mean(1, keepdim=True)
    return (grey + factors[2] * (x - grey)).clamp(0, 1)


def with_hole(x: Tensor, side: float, numbers: Iterator[Tensor]) -> Tensor:
    """A square of each image, around a place in it, is grey."""
    inside = torch.ones((), dtype=torch.bool, device=x.device)
    for dim in (2, 3):
        size = x.shape[dim]
        places = torch.arange(size, device=x.device) + 0.5
        near = (places - uniform(numbers, 0, size)[:, None]).abs() < side * size / 2
        inside = inside & near.view(-1, 1, *((size, 1) if dim == 2 else (1, size)))
    return x.masked_fill(inside, 0.5)


def mixed(x: Tensor, targets: Tensor, share: float, numbers: Iterator[Tensor]) -> tuple[Tensor, Tensor]:
    """That share of images is mixed by λ ~ Beta(½, ½), which sin² of a uniform angle is; with the one as far from the
    other end of the batch, any image where batches are in random order."""
    part = (uniform(numbers) * math.pi / 2).sin().square()
    part = torch.where(uniform(numbers) < share, part, 1.0)
    images, labels = part.view(-1, 1, 1, 1), part.view(-1, 1)
    return images * x + (1 - images) * x.flip(0), labels * targets + (1 - labels) * targets.flip(0)
