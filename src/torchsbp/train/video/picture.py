"""Frames of a clip side by side; below each, in colour, what of it the backward pass keeps."""

import io
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

COLUMNS, SIDE, GAP = 8, 112, 4
DIM = 0.15


def strip(clip: Tensor, kept: Tensor | None = None, patch: Sequence[int] | None = None) -> bytes:
    """A PNG of a clip ``[3, T, H, W]`` in [0, 1]; ``kept`` are positions of its grid of patches."""
    frames = clip.detach().float().cpu().clamp(0, 1)
    rows = [frames]
    if kept is not None and patch is not None:
        shown = mask(kept.cpu(), patch, frames.shape[1:])
        rows.append(frames * (DIM + (1 - DIM) * shown))
    number = frames.shape[1]
    columns = torch.linspace(0, number - 1, min(COLUMNS, number)).long()
    picked = [F.interpolate(row[:, columns].transpose(0, 1), (SIDE, SIDE), mode="bilinear") for row in rows]
    padded = [F.pad(row, (0, GAP, 0, GAP), value=1.0) for row in picked]
    board = torch.cat([torch.cat(list(row), -1) for row in padded], -2)[..., :-GAP, :-GAP]
    file = io.BytesIO()
    Image.fromarray((255 * board).byte().permute(1, 2, 0).numpy()).save(file, "PNG")
    return file.getvalue()


def mask(kept: Tensor, patch: Sequence[int], shape: Sequence[int]) -> Tensor:
    """1 at pixels of kept positions, ``[T, H, W]``."""
    grid = [-(-size // its) for size, its in zip(shape, patch, strict=True)]
    cells = torch.zeros(grid[0] * grid[1] * grid[2])
    cells[kept] = 1
    pixels = cells.view(grid)
    for dim, its in enumerate(patch):
        pixels = pixels.repeat_interleave(its, dim)
    return pixels[: shape[0], : shape[1], : shape[2]]
