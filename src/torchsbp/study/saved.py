"""Files of weights, and of a run's state, from which another process continues a run that was stopped."""

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from .training import Training

EVERY = 20.0
"""Seconds between two writes."""


def write(file: Path, content: Any, suffix: str = ".part") -> None:
    """Write a file that is complete or not there; until then it has that suffix. Processes that may write the same file
    at once need one each."""
    file.parent.mkdir(parents=True, exist_ok=True)
    part = file.with_suffix(suffix)
    torch.save(content, part)
    part.replace(file)


class Saved:
    """Saves and loads a run's state. Without a file it does nothing."""

    def __init__(self, file: Path | None) -> None:
        self.file, self.last = file, time.monotonic()

    def load(self, training: "Training") -> int:
        """Restore the training and return how many epochs are done; 0 if nothing is saved with its settings."""
        if self.file is None or not self.file.exists():
            return 0
        done, settings, state = torch.load(self.file, weights_only=True, map_location="cpu")
        if settings != str(training.settings):
            return 0
        training.restore(state)
        return int(done)

    def save(self, training: "Training", done: int) -> None:
        """Write the state, unless the last write was less than EVERY seconds ago."""
        if self.file is None or time.monotonic() < self.last + EVERY:
            return
        write(self.file, (done, str(training.settings), training.tensors()))
        self.last = time.monotonic()

    def remove(self) -> None:
        if self.file is not None:
            self.file.unlink(missing_ok=True)
