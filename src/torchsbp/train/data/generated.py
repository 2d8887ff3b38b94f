"""Generated untrimmed videos: shapes that drift across noise and bars, and are hidden in some frames.

One frame shows which shape it is, though light and colours flicker; but only earlier frames show that a hidden shape is
still there. A ring counts as ambiguous.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from .actions import AMBIGUOUS, BACKGROUND, Segment
from .seeds import mixed

ACTIONS = ("Disc", "Square", "Diamond", "Cross")
RING = len(ACTIONS)
HIDDEN, RINGS = 0.2, 0.1
"""the share of an action's frames in which it is hidden, and the share of shapes that are rings"""
NOISE = 8.0


class Generated:
    """``count`` videos of ``frames`` frames of ``size`` × ``size`` pixels: a pure function of the seed."""

    fps = 4.0

    def __init__(self, count: int, frames: int, size: int, seed: int) -> None:
        self.names = [BACKGROUND, *ACTIONS, AMBIGUOUS]
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
    """Return pixels ``[frames, 3, size, size]``, and (label, first frame, frame after the last) of every action."""
    covered, stretches = bars(frames, size, draw), []
    begin = int(draw.integers(0, 12))
    while begin < frames:
        length = min(int(draw.integers(8, 17)), frames - begin)
        kind = RING if draw.uniform() < RINGS else int(draw.integers(RING))
        places = np.linspace(draw.uniform(0.3, 0.7, 2), draw.uniform(0.3, 0.7, 2), length) * size
        shapes = coverage(kind, draw.uniform(0.25, 0.4) * size, places, size)
        seen = draw.uniform(size=length) >= HIDDEN
        now = slice(begin, begin + length)
        covered[now] = np.where(seen[:, None, None], np.maximum(covered[now], shapes), covered[now])
        stretches.append((1 + kind, begin, begin + length))
        begin += length + int(draw.integers(4, 13))
    dark, light = draw.uniform(0, 60, (frames, 3, 1, 1)), draw.uniform(110, 190, (frames, 3, 1, 1))
    pixels = dark + covered[:, None] * light + NOISE * draw.standard_normal((frames, 3, size, size), np.float32)
    return torch.from_numpy(pixels.clip(0, 255).astype(np.uint8)), stretches


def bars(frames: int, size: int, draw: np.random.Generator) -> np.ndarray:
    """Return how much of each pixel is covered by a bar, ``[frames, size, size]``; every frame has another."""
    places, widths = draw.uniform(0, size, (frames, 1)), draw.uniform(0.5, max(0.5, 0.1 * size), (frames, 1))
    lines = np.abs(np.arange(size) - places) < widths
    upright = draw.integers(2, size=frames).astype(bool)
    across = np.broadcast_to(lines[:, :, None], (frames, size, size))
    return np.where(upright[:, None, None], across.transpose(0, 2, 1), across).astype(np.float64)


def coverage(kind: int, radius: float | np.ndarray, places: np.ndarray, size: int) -> np.ndarray:
    """Return how much of each pixel a shape at ``places [frames, 2]`` (y, x) covers."""
    y, x = (np.abs(grid - places[:, i, None, None]) for i, grid in enumerate(np.mgrid[:size, :size]))
    disc = np.hypot(x, y)
    cross = np.minimum(np.maximum(x, 3 * y), np.maximum(3 * x, y))
    distance = (disc, 1.1 * np.maximum(x, y), 0.8 * (x + y), 0.8 * cross, disc)[kind]
    inside = (radius - distance + 0.5).clip(0, 1)
    return inside * (distance - 0.5 * radius + 0.5).clip(0, 1) if kind == RING else inside
