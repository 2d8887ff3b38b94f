"""What a temporal model sees of a video at one moment: recent frames (work memory), and older, sparser ones (long)."""

from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from ..ranges import COUNT


class View(NamedTuple):
    """The numbers of the frames that are seen at n moments."""

    long: Tensor
    """``[n, long]``, oldest first"""
    empty: Tensor
    """``[n, long]``: True in slots before the first frame, but never in the newest slot, which then holds that frame"""
    work: Tensor
    """``[n, work]``, oldest first; as a video begins, only the first slots are filled, and others repeat the newest"""
    slot: Tensor
    """``[n]``: the work slot of the newest frame"""


@dataclass
class Window:
    """Sizes of long and work memory, in frames; a rate of n takes every n-th frame."""

    long: int = field(default=128, metadata=COUNT)
    long_rate: int = field(default=4, metadata=COUNT)
    work: int = field(default=32, metadata=COUNT)
    work_rate: int = field(default=1, metadata=COUNT)

    @property
    def span(self) -> int:
        """How many frames of a video a full work memory spans."""
        return self.work_rate * (self.work - 1) + 1

    def view(self, newest: Tensor) -> View:
        """Return what is seen when the newest frames are those of numbers ``newest [n]``."""
        filled = (newest // self.work_rate + 1).clamp(max=self.work)
        begin = newest - self.work_rate * (filled - 1)
        work = begin[:, None] + self.work_rate * torch.arange(self.work)
        long = begin[:, None] - self.long_rate * torch.arange(self.long, 0, -1)
        empty = long < 0
        empty[:, -1] = False
        return View(long.clamp(min=0), empty, work.minimum(newest[:, None]), filled - 1)
