"""A frame encoder and a temporal model, trained together: forward on every frame, backward on a share of them."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import torchsbp
from torchsbp import SBPConfig

from ...errors import UsageError
from ...ops.frames import in_chunks
from ...sampling import samplers
from ..frames import check_frames_alone, check_one_ratio, sampled_frames
from .encoder import Encoder, FrameEncoder
from .lstr import LSTR


@dataclass(frozen=True)
class WorkFirst:
    """A sampler that keeps the last ``work`` frames of a window before older ones; ``sampler`` orders each part.

    A work frame has a loss of its own, which reaches its features by residual paths. Older frames share the gradient
    that passes through the few queries to which the long memory is compressed.
    """

    sampler: str | samplers.Sampler
    work: int

    def __call__(self, shape: samplers.Shape, ratios: Sequence[float], key: Tensor) -> Tensor:
        frames, kept = shape[0], max(samplers.count(self.sampler, shape, ratio) for ratio in ratios)
        long = frames - self.work
        work = self.part(self.work, min(kept, self.work), key)
        return torch.cat((long + work, self.part(long, max(kept - self.work, 1), key)), 1)

    def part(self, frames: int, kept: int, key: Tensor) -> Tensor:
        return samplers.ordered(self.sampler, (frames, 1, 1), (kept / frames,), key)


class OnlineDetector(nn.Module):
    """Maps frames to logits of background and actions; no class is ambiguous."""

    def __init__(self, encoder: FrameEncoder, temporal: LSTR, config: Encoder) -> None:
        super().__init__()
        self.encoder, self.temporal, self.config = encoder, temporal, config
        self.sbp: SBPConfig | None = None
        self.step = 0

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compile each part by itself, for training: the encoder is called on chunks of frames, with gradients and
        without. Evaluation is not compiled, since videos are of any length."""
        for part in (self.encoder, self.temporal):
            part.compile(*args, **{"dynamic": False, **kwargs})

    def forward(self, frames: Tensor, empty: Tensor) -> Tensor:
        """Map 8-bit ``frames [B, long + work, 3, H, W]``, and which long ones are empty, to ``[B, work, classes]``."""
        return self.temporal(self.encode(frames), empty)

    def encode(self, video: Tensor) -> Tensor:
        """Return features ``[B, T, D]``, with gradients through the frames that the configuration selects."""
        if self.config.frozen or not torch.is_grad_enabled():
            return self.without_gradients(video)
        if self.sbp is None or not self.training:
            return self.with_gradients(video.flatten(0, 1)).unflatten(0, video.shape[:2])
        return sampled_frames(self.with_gradients, video, self.sbp, self.step, self.config.chunk)

    @torch.no_grad()
    def without_gradients(self, video: Tensor) -> Tensor:
        encode = self.encoder if self.training else self.encoder.forward  # not compiled
        return in_chunks(encode, video.flatten(0, 1), self.config.chunk).unflatten(0, video.shape[:2])

    def with_gradients(self, frames: Tensor) -> Tensor:
        if not (self.config.checkpoint and torch.is_grad_enabled()):
            return self.encoder(frames)
        chunks = frames.split(self.config.chunk)
        return torch.cat([checkpoint(self.encoder, chunk, use_reentrant=False) for chunk in chunks])

    def apply_sbp(self, config: SBPConfig) -> None:
        """Sample frames and, if the encoder's configuration says so, tokens within those that are kept."""
        if self.config.frozen:
            raise UsageError(
                "task.encoder.frozen leaves SBP nothing to do; set sbp.preset to none, or train the encoder"
            )
        if self.config.tokens is not None:
            check_one_ratio(config)
            torchsbp.apply(self.encoder.body, self.config.tokens, config=config, sampler="random")
        else:
            check_frames_alone(config, "set task.encoder.tokens")
        # "grid" is a pattern within frames: over time it would keep all of them.
        sampler = "frames" if config.sampler == "grid" else config.sampler
        per_sample = config.per_sample
        if self.config.kept == "work":  # not "balanced": an order of two parts can't be read cyclically
            sampler, per_sample = WorkFirst(sampler, self.temporal.window.work), bool(per_sample)
        self.sbp = replace(config, sampler=sampler, per_sample=per_sample)

    def set_step(self, number: int) -> None:
        self.step = number
        if self.config.tokens is not None:
            torchsbp.set_step(self.encoder.body, number)
