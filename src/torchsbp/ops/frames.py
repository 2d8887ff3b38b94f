"""Spatial-then-temporal models: gradients flow through the frame encoder at kept frames only."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from ..errors import UsageError, expect
from .wrap import complement, merge


def encode_frames(encoder: Callable[[Tensor], Tensor], video: Tensor, keep: Tensor, chunk: int | None = None) -> Tensor:
    """Return ``encoder`` of every frame of ``video [B, T, ...]``, as ``[B, T, ...]`` with gradients at kept frames.

    ``keep`` is ``[k]``, shared by the batch, or ``[B, k]``. The other frames run without gradients, ``chunk`` frames
    (over the batch) at a time, so that their activations never add up.
    """
    samples, frames = video.shape[:2]
    flat = video.flatten(0, 1)
    if not torch.is_grad_enabled():
        return in_chunks(encoder, flat, chunk).unflatten(0, (samples, frames))
    keep = (keep + frames * torch.arange(samples, device=keep.device)[:, None]).flatten()
    if len(keep) == len(flat):
        return encoded(encoder, flat).unflatten(0, (samples, frames))
    drop = complement(keep, len(flat))
    # Dropped frames first: what they need for a moment does not come on top of what kept ones leave for backward.
    with torch.no_grad(), _casts_forgotten(video.device.type):
        dropped = in_chunks(encoder, flat.index_select(0, drop), chunk)
    kept = encoded(encoder, flat.index_select(0, keep))
    return merge(kept, keep, dropped, drop, 0).unflatten(0, (samples, frames))


def encoded(encoder: Callable[[Tensor], Tensor], frames: Tensor) -> Tensor:
    """Return the encoder's output, or raise an error if it does not have one row per frame."""
    y = encoder(frames)
    expect("encoder(frames)", y, Tensor, "a tensor with one row for every frame")
    if y.dim() == 0 or y.shape[0] != frames.shape[0]:
        raise UsageError(
            f"encoder must give one row for every frame: of {frames.shape[0]} frames, an input of shape "
            f"{tuple(frames.shape)}, it made {tuple(y.shape)}"
        )
    return y


def _casts_forgotten(device: str) -> AbstractContextManager[object]:
    """Autocast without its cache: a cast of a weight, made without gradients and reused later, would pass none."""
    if not torch.is_autocast_enabled(device):
        return nullcontext()
    return torch.autocast(device, torch.get_autocast_dtype(device), cache_enabled=False)


def in_chunks(encoder: Callable[[Tensor], Tensor], frames: Tensor, chunk: int | None) -> Tensor:
    """Run the encoder in chunks of at most ``chunk`` frames, as equal as possible: a compiled one sees few shapes."""
    size = -(-len(frames) // -(-len(frames) // chunk)) if chunk else len(frames)
    found = None
    for start in range(0, len(frames), size):
        y = encoded(encoder, frames[start : start + size])
        found = y.new_empty(len(frames), *y.shape[1:]) if found is None else found
        found[start : start + size] = y  # copied at once: an encoder with CUDA graphs overwrites it in the next chunk
    assert found is not None
    return found
