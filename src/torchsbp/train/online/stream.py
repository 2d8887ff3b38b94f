"""Online inference, frame by frame; a state holds what later moments need of past frames."""

import torch
from torch import Tensor

from .detector import OnlineDetector


class Stream:
    """One video as it comes.

    Every frame is encoded and projected once, and its keys and values for the long memory are computed once; they are
    kept until the frame is too old. What remains to be done at each moment is to compress these, and to decode the work
    memory, whose slots change from frame to frame.
    """

    def __init__(self, model: OnlineDetector) -> None:
        self.model, self.window = model.eval(), model.temporal.window
        self.seen = 0
        self.held: list[Tensor] = []
        """projected frames, then keys and values for each unit of stage 1: ring buffers, frame i at i mod length"""

    @torch.no_grad()
    def step(self, frame: Tensor) -> Tensor:
        """Map the newest 8-bit frame ``[3, H, W]`` to probabilities ``[classes]`` of what is going on in it."""
        temporal, window = self.model.temporal, self.window
        projected = temporal.project(self.model.encoder.forward(frame[None]))
        keys_values = [part for unit in temporal.units(temporal.first) for part in unit.cross.memory(projected)]
        length = window.span + window.long * window.long_rate
        if not self.held:
            self.held = [part.new_zeros(length, part.shape[1]) for part in (projected, *keys_values)]
        for held, part in zip(self.held, (projected, *keys_values), strict=True):
            held[self.seen % length] = part[0]
        view = window.view(torch.tensor([self.seen]))
        long, work = (part.to(frame.device) % length for part in (view.long, view.work[:, : int(view.slot) + 1]))
        memories = [(k[long], v[long]) for k, v in zip(self.held[1::2], self.held[2::2], strict=True)]
        logits = temporal.decode(self.held[0][work], temporal.compress(memories, view.empty.to(frame.device)))
        self.seen += 1
        return logits[0, -1].softmax(-1)
