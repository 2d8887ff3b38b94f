"""Generated untrimmed videos: shapes that grow or shrink on noise, between shapes that stay as they are.

Which shape it is can be seen in one frame, what it does only in several. Light and colours flicker, so that neither is
seen without looking at edges. A diamond that does something is ambiguous.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from .actions import AMBIGUOUS, BACKGROUND, Segment
from .seeds import mixed

ACTIONS = ("DiscGrows", "DiscShrinks", "SquareGrows", "SquareShrinks")
DISC, SQUARE, DIAMOND = range(3)
NOISE = 16.0


class Generated:
    """``count`` videos of ``frames`` frames of ``size`` × ``size`` pixels: a pure function of the seed."""

    names = (BACKGROUND, *ACTIONS, AMBIGUOUS)
    fps = 4.0

    def __init__(self, count: int, frames: int, size: int, seed: int) -> None:
        self.counts = [frames] * count
        made = [generate(frames, size, np.random.default_rng(mixed(seed, video))) for video in range(count)]
        self.pixels = [pixels for pixels, _ in made]
        self.stretches = [stretches for _, stretches in made]

    def title(self, video: int) -> str:
        return f"generated {video}"

    def read(self, video: int, frames: Sequence[int]) -> Tensor:
        return self.pixels[video][torch.as_tensor(frames)]

    def targets(self, video: int) -> Tensor:
        result = torch.zeros(self.counts[video], len(self.names))
        result[:, 0] = 1
        for label, start, end in self.stretches[video]:
            result[start:end, 0], result[start:end, label] = 0, 1
        return result

    def segments(self, video: int) -> list[Segment]:
        return [Segment(label, start / self.fps, end / self.fps) for label, start, end in self.stretches[video]]


def generate(frames: int, size: int, draw: np.random.Generator) -> tuple[Tensor, list[tuple[int, int, int]]]:
    """Pixels ``[frames, 3, size, size]``, and (label, first frame, frame after the last) of what happens in them."""
    stretches, kinds, radii, places = [], [], [], []
    begin, idle = 0, True
    small, large = 0.1 * size, 0.35 * size
    while begin < frames:
        length = min(int(draw.integers(8, 17)), frames - begin)
        kind = int(draw.choice(3, p=(0.45, 0.45, 0.1)))
        shrinks = bool(draw.integers(2))
        over_time = np.linspace(small, large, length)
        if idle:
            over_time = np.full(length, draw.uniform(small, large))
        else:
            label = len(ACTIONS) + 1 if kind == DIAMOND else 1 + 2 * kind + shrinks
            stretches.append((label, begin, begin + length))
        radii.append(over_time[::-1] if shrinks else over_time)
        kinds.append(np.full(length, kind))
        places.append(np.tile(draw.uniform(0.35, 0.65, 2) * size, (length, 1)))
        begin, idle = begin + length, not idle
    shapes = draw_shapes(*map(np.concatenate, (kinds, radii, places)), size)
    dark = draw.uniform(0, 100, (frames, 3, 1, 1))
    pixels = dark + shapes[:, None] * draw.uniform(50, 155, (frames, 3, 1, 1))
    pixels += NOISE * draw.standard_normal(pixels.shape, dtype=np.float32)
    return torch.from_numpy(pixels.clip(0, 255).astype(np.uint8)), stretches


def draw_shapes(kinds: np.ndarray, radii: np.ndarray, places: np.ndarray, size: int) -> np.ndarray:
    """How much of each pixel is covered, ``[frames, size, size]``."""
    y, x = (np.abs(grid - places[:, i, None, None]) for i, grid in enumerate(np.mgrid[:size, :size]))
    distances = np.stack((np.hypot(x, y), np.maximum(x, y) * 1.1, (x + y) * 0.8))  # of about equal area
    distance = distances[kinds, np.arange(len(kinds))]
    return (radii[:, None, None] - distance + 0.5).clip(0, 1)
