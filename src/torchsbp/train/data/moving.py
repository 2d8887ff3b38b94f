"""Generated clips of a shape that moves on noise. The class is the motion, and telling it needs the order of frames."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from .clips import Clips
from .generated import NOISE, coverage
from .seeds import mixed
from .videos import Video

MOTIONS = ("right", "left", "down", "up", "clockwise", "anticlockwise", "grows", "shrinks")


class Moving(Clips):
    """``count`` videos of ``frames`` frames of ``size`` × ``size`` pixels: a pure function of the seed."""

    heads = ("class",)
    names = (MOTIONS,)

    def __init__(self, count: int, frames: int, size: int, seed: int) -> None:
        self.frames, self.size, self.seed = frames, size, seed
        self.labels = [(number % len(MOTIONS),) for number in range(count)]

    def title(self, index: int) -> str:
        return f"generated {index}"

    def open(self, index: int) -> Video:
        draw = np.random.default_rng(mixed(self.seed, index))
        return Held(generate(self.labels[index][0], self.frames, self.size, draw))


class Held(Video):
    """A video in memory."""

    def __init__(self, pixels: Tensor) -> None:
        self.pixels = pixels

    def __len__(self) -> int:
        return len(self.pixels)

    def read(self, numbers: Sequence[int]) -> Tensor:
        return self.pixels[torch.as_tensor(numbers)]


def generate(motion: int, frames: int, size: int, draw: np.random.Generator) -> Tensor:
    """Return a clip ``[frames, size, size, 3]``."""
    name, time = MOTIONS[motion], np.linspace(-0.5, 0.5, frames)
    time = -time if name in ("left", "up", "anticlockwise", "shrinks") else time
    place = np.tile(draw.uniform(0.4, 0.6, 2) * size, (frames, 1))  # y, x
    radius = np.full(frames, draw.uniform(0.1, 0.2) * size)
    travel = draw.uniform(0.35, 0.55) * size
    if name in ("right", "left"):
        place[:, 1] += travel * time
    elif name in ("down", "up"):
        place[:, 0] += travel * time
    elif name in ("clockwise", "anticlockwise"):
        angle = draw.uniform(0, 2 * np.pi) + draw.uniform(1.0, 1.6) * np.pi * time
        place += 0.5 * travel * np.stack((np.sin(angle), np.cos(angle)), 1)
    else:
        radius *= 1 + 1.2 * time
    shapes = coverage(int(draw.integers(3)), radius[:, None, None], place, size)[..., None]
    dark, bright = draw.uniform(0, 80, 3), draw.uniform(120, 255, 3)
    pixels = dark + shapes * (bright - dark)
    pixels += NOISE * draw.standard_normal(pixels.shape, dtype=np.float32)
    return torch.from_numpy(pixels.clip(0, 255).astype(np.uint8))
