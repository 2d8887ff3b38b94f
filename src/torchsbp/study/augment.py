"""Augmentation of small images in batches, on their device: a loader would be the limit of short steps.

Every random number comes from the given generator, so that runs with one seed see the same images.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Generator, Tensor


@dataclass(frozen=True)
class Augment:
    """Shift as a share of the image; turn in degrees, stretch and shear (of half of the images); colour jitter; side of
    a hole as a share of the image; share of mixed images; label smoothing. Clips are smoothed alone."""

    shift: float = 0.125
    turn: float = 15.0
    stretch: float = 0.2
    shear: float = 0.2
    jitter: float = 0.4
    hole: float = 0.375
    mixup: float = 0.5
    smoothing: float = 0.1

    def __call__(self, x: Tensor, y: Tensor, classes: int, generator: Generator) -> tuple[Tensor, Tensor]:
        """Images ``[B, 3, H, W]`` in [0, 1] and labels ``[B]`` -> images, targets ``[B, classes]``."""
        targets = F.one_hot(y, classes) * (1 - self.smoothing) + self.smoothing / classes
        if x.dim() > 4:
            return x, targets
        x = warped(x, self.shift, self.turn, generator, self.stretch, self.shear)
        x = with_hole(jittered(x, self.jitter, generator), self.hole, generator)
        return mixed(x, targets, self.mixup, generator)


def uniform(x: Tensor, generator: Generator, low: float = 0.0, high: float = 1.0) -> Tensor:
    """One number per image."""
    return torch.rand(x.shape[0], generator=generator, device=x.device) * (high - low) + low


def warped(
    x: Tensor, shift: float, turn: float, generator: Generator, stretch: float = 0.0, shear: float = 0.0
) -> Tensor:
    """Flipped and shifted by whole pixels; half of the images turned, stretched and sheared too. One sampling of the
    image, exact for the other half."""
    flip = uniform(x, generator).round() * 2 - 1
    bent = uniform(x, generator).round()
    angle = uniform(x, generator, -1, 1) * math.radians(turn) * bent
    wide, high = ((uniform(x, generator, -1, 1) * math.log1p(stretch) * bent).exp() for _ in range(2))
    slant = uniform(x, generator, -1, 1) * shear * bent
    shifts = [(uniform(x, generator, -1, 1) * (shift * size + 0.5)).round() * 2 / size for size in x.shape[2:]]
    cos, sin = angle.cos(), angle.sin()
    rows = [
        torch.stack((cos * wide * flip, (slant * cos - sin) * high, shifts[1]), 1),
        torch.stack((sin * wide * flip, (slant * sin + cos) * high, shifts[0]), 1),
    ]
    grid = F.affine_grid(torch.stack(rows, 1), list(x.shape), align_corners=False)
    return F.grid_sample(x, grid, align_corners=False)


def jittered(x: Tensor, strength: float, generator: Generator) -> Tensor:
    """Brightness, contrast and saturation times factors around 1."""
    factors = [uniform(x, generator, 1 - strength, 1 + strength).view(-1, 1, 1, 1) for _ in range(3)]
    x = x * factors[0]
    mean = x.mean((1, 2, 3), keepdim=True)
    x = mean + factors[1] * (x - mean)
    grey = x.mean(1, keepdim=True)
    return (grey + factors[2] * (x - grey)).clamp(0, 1)


def with_hole(x: Tensor, side: float, generator: Generator) -> Tensor:
    """A square of each image, around a place in it, is grey."""
    inside = torch.ones((), dtype=torch.bool, device=x.device)
    for dim in (2, 3):
        size = x.shape[dim]
        places = torch.arange(size, device=x.device) + 0.5
        near = (places - uniform(x, generator, 0, size)[:, None]).abs() < side * size / 2
        inside = inside & near.view(-1, 1, *((size, 1) if dim == 2 else (1, size)))
    return x.masked_fill(inside, 0.5)


def mixed(x: Tensor, targets: Tensor, share: float, generator: Generator) -> tuple[Tensor, Tensor]:
    """That share of images is mixed with another by λ ~ Beta(½, ½), which sin² of a uniform angle is."""
    other = torch.randperm(x.shape[0], generator=generator, device=x.device)
    part = (uniform(x, generator) * math.pi / 2).sin().square()
    part = torch.where(uniform(x, generator) < share, part, 1.0)
    images, labels = part.view(-1, 1, 1, 1), part.view(-1, 1)
    return images * x + (1 - images) * x[other], labels * targets + (1 - labels) * targets[other]
