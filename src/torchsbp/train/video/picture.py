"""Frames of a clip side by side; below each the same frame, dark where the backward pass drops it."""

import io

import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

COLUMNS, SIDE, GAP = 8, 112, 4
DIM = 0.15


def strip(clip: Tensor, kept: Tensor | None = None) -> bytes:
    """Return a PNG of a clip ``[3, T, H, W]`` in [0, 1]; ``kept`` is 1 at kept cells of any grid ``[T', H', W']``."""
    frames = clip.detach().float().cpu().clamp(0, 1)
    rows = [frames]
    if kept is not None:
        shown = F.interpolate(kept[None, None], frames.shape[1:], mode="nearest")[0]
        rows.append(frames * (DIM + (1 - DIM) * shown))
    number = frames.shape[1]
    columns = torch.linspace(0, number - 1, min(COLUMNS, number)).long()
    picked = [F.interpolate(row[:, columns].transpose(0, 1), (SIDE, SIDE), mode="bilinear") for row in rows]
    padded = [F.pad(row, (0, GAP, 0, GAP), value=1.0) for row in picked]
    board = torch.cat([torch.cat(list(row), -1) for row in padded], -2)[..., :-GAP, :-GAP]
    file = io.BytesIO()
    Image.fromarray((255 * board).byte().permute(1, 2, 0).numpy()).save(file, "PNG")
    return file.getvalue()
