"""sbp_frames: a frame encoder that backpropagates through sampled frames only."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from ..errors import UsageError, check_calls, expect, shown
from ..ops.frames import encode_frames
from ..ops.wrap import refuse_batch_norm
from . import samplers, schedules
from .keys import draw_key

UNFIT = {
    "grid": "keeps the same positions of all frames, hence all frames or none",
    "norm": "chooses in backward, when every frame has been encoded",
}
"""Samplers that can't choose among frames, and why."""


def sbp_frames(
    encoder: Callable[[Tensor], Tensor],
    video: Tensor,
    keep_ratio: float = 0.5,
    *,
    step: int | Tensor,
    sampler: str | samplers.Sampler = "frames",
    seed: int = 0,
    rank: int = 0,
    chunk: int | None = None,
    per_sample: bool | str = False,
) -> Tensor:
    """Encode every frame of ``video [B, T, ...]``, with gradients through a sampled share of the frames only.

        features = torchsbp.sbp_frames(encoder, video, 0.25, step=step)

    For models that encode frames one by one and relate them later. Return the encoder's outputs, ``[B, T, ...]``.

    - ``encoder``: frames ``[n, ...]`` -> one row for each of them. Batch norm must be in eval mode.
    - ``keep_ratio``: share of frames that get gradients, in (0, 1].
    - ``step``: the training step. The kept frames are a pure function of (seed, step, rank).
    - ``sampler``: "frames" (evenly spread), "frames_jitter", "random", … as in ``SBPConfig``, but not "grid" or "norm".
    - ``chunk``: how many of the other frames, over the batch, are encoded at a time, without gradients; None: all.
    - ``per_sample``: False: all videos of the batch keep the same frames; True: each has its own; "balanced": each has
      its own, and over the batch every frame is kept equally often.
    """
    expect_sampler(sampler)
    expect_arguments(encoder, video, step, seed, rank, chunk)
    ratio = schedules.check_ratio(keep_ratio)
    refuse_batch_norm(encoder, "frames")
    frames = video.shape[1]
    count = torch.as_tensor(step, dtype=torch.int64, device=video.device)
    key = draw_key(seed, count, rank, video.shape[0] if per_sample is True else 1)
    order = samplers.ordered(sampler, (frames, 1, 1), (ratio,), key)
    kept = samplers.count(sampler, (frames, 1, 1), ratio)
    if expect_per_sample(per_sample, sampler) == "balanced":
        order = samplers.balanced(order, [kept], video.shape[0])
    keep = samplers.first(order, kept)
    return encode_frames(encoder, video, keep, chunk)


def expect_sampler(sampler: object) -> None:
    """Raise UsageError if the sampler can't choose among frames."""
    if callable(sampler):
        check_calls("sampler", sampler, "shape", "ratios", "key")
        return
    names = [name for name in samplers.SAMPLERS if name not in UNFIT]
    if sampler not in names:
        why = UNFIT.get(str(sampler), "is unknown")
        allowed = ", ".join(map(repr, names))
        raise UsageError(f"sampler={shown(sampler)} {why}; allowed here: {allowed}, a callable")


def expect_arguments(encoder: object, video: object, step: object, seed: object, rank: object, chunk: object) -> None:
    """Raise UsageError if an argument has a wrong type or size."""
    if not callable(encoder):
        expect("encoder", encoder, nn.Module, "a module or function of frames [frames, …]")
    expect("video", video, Tensor, "a tensor [batch, frames, …]")
    assert isinstance(video, Tensor)
    if video.dim() < 3 or 0 in video.shape[:2]:
        raise UsageError(f"video has the shape {tuple(video.shape)}; allowed: [batch, frames, …], neither of them 0")
    expect("step", step, (int, Tensor), "the number of the training step, an int or a 0-d tensor")
    if isinstance(step, int) and abs(step) >= 2**63:
        raise UsageError(f"step={shown(step)} is not allowed; allowed: below 2**63")
    if isinstance(step, Tensor) and (step.numel() != 1 or step.is_floating_point() or step.is_complex()):
        raise UsageError(f"step is a tensor {step.dtype} of shape {tuple(step.shape)}; allowed: one whole number")
    expect("seed", seed, int, "an int")
    expect("rank", rank, int, "an int")
    expect("chunk", chunk, (int, type(None)), "None, or a number of frames")
    if isinstance(chunk, int) and chunk < 1:
        raise UsageError(f"chunk={chunk} is not allowed; allowed: None (all dropped frames at once), an int above 0")


def expect_per_sample(per_sample: object, sampler: str | samplers.Sampler) -> object:
    """Return ``per_sample``, or raise UsageError if it is not allowed."""
    if per_sample not in (False, True, "balanced"):
        raise UsageError(f'per_sample={shown(per_sample)} is not allowed; allowed: False, True, "balanced"')
    if per_sample == "balanced" and not samplers.cyclic(sampler):
        allowed = [name for name in samplers.SAMPLERS if name != "grid" and samplers.cyclic(name)]
        raise UsageError(
            f'per_sample="balanced" turns one order for every video, which sampler={shown(sampler)} does not allow; '
            f"use per_sample=True, or one of the samplers {allowed}"
        )
    return per_sample
