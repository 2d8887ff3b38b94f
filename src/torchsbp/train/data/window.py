"""What a temporal model sees of a video at one moment: recent frames (work), and older ones (long memory), sparser."""

from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from ..ranges import COUNT


class View(NamedTuple):
    """Frames by number, for moments ``[n]``."""

    long: Tensor
    """``[n, long]``, oldest first"""
    empty: Tensor
    """``[n, long]``: slots that lie before the first frame. The newest slot never is: it holds the first frame then"""
    work: Tensor
    """``[n, work]``, oldest first; at a video's beginning the first slots are filled, the others repeat the newest"""
    slot: Tensor
    """``[n]``: the work slot of the newest frame"""


@dataclass
class Window:
    """Sizes in frames; a rate of n takes every n-th frame."""

    long: int = field(default=128, metadata=COUNT)
    long_rate: int = field(default=4, metadata=COUNT)
    work: int = field(default=32, metadata=COUNT)
    work_rate: int = field(default=1, metadata=COUNT)

    @property
    def span(self) -> int:
        """Frames from the first to the last of a full work memory."""
        return self.work_rate * (self.work - 1) + 1

    def view(self, newest: Tensor) -> View:
        """At the moments ``newest [n]``, numbers of frames."""
        filled = (newest // self.work_rate + 1).clamp(max=self.work)
        begin = newest - self.work_rate * (filled - 1)
        work = begin[:, None] + self.work_rate * torch.arange(self.work)
        long = begin[:, None] - self.long_rate * torch.arange(self.long, 0, -1)
        empty = long < 0
        empty[:, -1] = False
        return View(long.clamp(min=0), empty, work.minimum(newest[:, None]), filled - 1)
