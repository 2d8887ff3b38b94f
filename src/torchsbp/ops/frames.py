"""Spatial-then-temporal models: the frame encoder backpropagates through kept frames only."""

from collections.abc import Callable

import torch
from torch import Tensor

from .wrap import complement, merge


def encode_frames(encoder: Callable[[Tensor], Tensor], video: Tensor, keep: Tensor, chunk: int | None = None) -> Tensor:
    """``encoder`` on every frame of ``video [B, T, ...]``, with gradients at the kept frames: ``[B, T, ...]``.

    ``keep`` is ``[k]``, shared by the batch, or ``[B, k]``. The other frames run without gradients, ``chunk`` frames
    (over the batch) at a time, so that their activations never add up.
    """
    samples, frames = video.shape[:2]
    flat = video.flatten(0, 1)
    if not torch.is_grad_enabled():
        return _in_chunks(encoder, flat, chunk).unflatten(0, (samples, frames))
    keep = (keep + frames * torch.arange(samples, device=keep.device)[:, None]).flatten()
    # Kept frames first: autocast casts each weight once, and a cast that was made without gradients passes none.
    y = encoder(flat.index_select(0, keep))
    if len(keep) < len(flat):
        drop = complement(keep, len(flat))
        with torch.no_grad():
            dropped = _in_chunks(encoder, flat.index_select(0, drop), chunk)
        y = merge(y, keep, dropped, drop, 0)
    return y.unflatten(0, (samples, frames))


def _in_chunks(encoder: Callable[[Tensor], Tensor], frames: Tensor, chunk: int | None) -> Tensor:
    """Chunks of equal size, as far as possible: a compiled encoder sees few shapes."""
    parts = -(-len(frames) // chunk) if chunk else 1
    return torch.cat([encoder(part) for part in frames.split(-(-len(frames) // parts))])
