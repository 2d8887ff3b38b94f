"""The state of a run in a file: a run that is stopped goes on from there, in another process."""

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from .training import Training

EVERY = 20.0
"""seconds"""


class Saved:
    """Without a file it does nothing."""

    def __init__(self, file: Path | None) -> None:
        self.file, self.last = file, time.monotonic()

    def load(self, training: "Training") -> int:
        """The epochs that are done with these settings; the training is then there."""
        if self.file is None or not self.file.exists():
            return 0
        done, settings, state = torch.load(self.file, weights_only=True, map_location="cpu")
        if settings != str(training.settings):
            return 0
        training.restore(state)
        return int(done)

    def save(self, training: "Training", done: int) -> None:
        """Now and then."""
        if self.file is None or time.monotonic() < self.last + EVERY:
            return
        self.file.parent.mkdir(parents=True, exist_ok=True)
        part = self.file.with_suffix(".part")
        torch.save((done, str(training.settings), training.tensors()), part)
        os.replace(part, self.file)
        self.last = time.monotonic()

    def remove(self) -> None:
        if self.file is not None:
            self.file.unlink(missing_ok=True)
