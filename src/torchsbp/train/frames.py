"""Backward through sampled frames in a training run: ``sbp_frames`` with what the configuration and the step say."""

from collections.abc import Callable

from torch import Tensor

import torchsbp
from torchsbp import SBPConfig
from torchsbp.sampling.drawing import rank
from torchsbp.sampling.schedules import Milestones, check_ratio

from ..errors import UsageError

FOR_FRAMES = ("keep_ratio", "sampler", "per_sample", "seed")
"""the fields of ``SBPConfig`` that choose frames; the others are about tokens"""


def sampled_frames(
    encoder: Callable[[Tensor], Tensor], video: Tensor, config: SBPConfig, step: int, chunk: int
) -> Tensor:
    """Features ``[B, T, D]`` of a video ``[B, T, …]``, with gradients through the frames that this step keeps."""
    ratio = config.keep_ratio
    return torchsbp.sbp_frames(
        encoder,
        video,
        ratio.at(step) if isinstance(ratio, Milestones) else ratio,  # type: ignore[arg-type]
        step=step,
        sampler=config.sampler,
        seed=config.seed,
        rank=rank(),
        per_sample=config.per_sample,
        chunk=chunk,
    )


def check_one_ratio(config: SBPConfig) -> None:
    if isinstance(config.keep_ratio, str):
        check_ratio(config.keep_ratio, "sbp.keep_ratio")
    if isinstance(config.keep_ratio, tuple | list):
        raise UsageError(f"sbp.keep_ratio={config.keep_ratio} varies over depth; frames have one ratio: a number")


def check_some_dropped(config: SBPConfig) -> None:
    if config.keep_ratio == 1:
        raise UsageError(
            "sbp.keep_ratio=1 keeps every frame, which is full backpropagation; set sbp.keep_ratio to the share of "
            "frames to keep, or sbp.preset to none"
        )


def check_frames_alone(config: SBPConfig, instead: str) -> None:
    """Raise ``UsageError`` if an option about tokens is set; ``instead`` says what to do."""
    check_one_ratio(config)
    plain = SBPConfig.preset("default", **{name: getattr(config, name) for name in FOR_FRAMES})
    others = [name for name, value in vars(config).items() if value != getattr(plain, name)]
    if others:
        raise UsageError(f"sbp.{others[0]} is about tokens within frames: {instead}, or leave it out")
