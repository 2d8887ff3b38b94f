"""Spatial-then-temporal models: the frame encoder backpropagates through kept frames only."""

from collections.abc import Callable

import torch
from torch import Tensor

from .wrap import complement, merge


def encode_frames(encoder: Callable[[Tensor], Tensor], video: Tensor, keep: Tensor, chunk: int | None = None) -> Tensor:
    """``encoder`` on every frame of ``video [B, T, ...]``, with gradients at the kept frames ``[k]``: ``[B, T, ...]``.

    The other frames run without gradients, ``chunk`` frames (over the batch) at a time, so that their activations never
    add up.
    """
    if not torch.is_grad_enabled():
        return _encode(encoder, video, chunk)
    drop = complement(keep, video.shape[1])
    kept = _encode(encoder, video.index_select(1, keep), None)
    with torch.no_grad():
        dropped = _encode(encoder, video.index_select(1, drop), chunk)
    return merge(kept, keep, dropped, drop, 1)


def _encode(encoder: Callable[[Tensor], Tensor], frames: Tensor, chunk: int | None) -> Tensor:
    flat = frames.flatten(0, 1)
    if flat.shape[0] == 0:  # nothing dropped: an empty batch, in the encoder's output shape
        return encoder(frames.new_zeros(1, *frames.shape[2:]))[:0].unflatten(0, frames.shape[:2])
    parts = [encoder(part) for part in (flat.split(chunk) if chunk else (flat,))]
    return torch.cat(parts).unflatten(0, frames.shape[:2])
