"""Online inference: frame by frame, with a state that holds of every frame what later moments need of it."""

import torch
from torch import Tensor

from .detector import OnlineDetector


class Stream:
    """One video as it comes.

    Every frame is encoded and projected once, and its keys and values for the long memory are made once; they are kept
    until the frame is too old. Left to do at each moment: to compress these, and to decode the work memory, whose slots
    change from frame to frame.
    """

    def __init__(self, model: OnlineDetector) -> None:
        self.model, self.window = model.eval(), model.temporal.window
        self.seen = 0
        self.held: list[Tensor] = []
        """projected frames, then keys and values for each unit of the first stage; frame i is at i mod their length"""

    @torch.no_grad()
    def step(self, frame: Tensor) -> Tensor:
        """The newest frame ``[3, H, W]`` of 8 bits -> probabilities ``[classes]`` of what is going on in it."""
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
