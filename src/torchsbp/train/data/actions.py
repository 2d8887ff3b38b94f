"""Untrimmed videos with labelled segments: the interface of their sources, and the samples that are cut from them."""

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from .window import Window

BACKGROUND, AMBIGUOUS = "Background", "Ambiguous"
"""names of the first and the last column of targets"""


class Segment(NamedTuple):
    """An action in a video: the number of its column in targets, and its start and end in seconds."""

    label: int
    start: float
    end: float


class Videos(Protocol):
    """A source of videos: 8-bit frames and their targets, by the number of the video."""

    names: list[str]
    """names of the columns of targets"""
    fps: float
    counts: list[int]
    """the number of frames of each video"""

    def title(self, video: int) -> str: ...
    def read(self, video: int, frames: Sequence[int]) -> Tensor:
        """Return ``[n, 3, H, W]``; ``frames`` may repeat a number."""
        ...

    def targets(self, video: int) -> Tensor:
        """Return ``[frames, columns]`` of zeros and ones."""
        ...

    def segments(self, video: int) -> Sequence[Segment]: ...


class Windows:
    """Samples to train with: for every stretch of ``window.span`` frames, a work memory that begins at random in it.

    A sample is the window's frames (long memory first), then which long slots are empty and the targets of the work
    frames. Where a video is shorter than the work memory, the slots that it leaves free count as ambiguous.
    """

    def __init__(self, videos: Videos, window: Window) -> None:
        self.videos, self.window = videos, window
        self.stretches = [
            (video, number)
            for video, count in enumerate(videos.counts)
            for number in range(max(1, count // window.span))
        ]
        self.short = sum(count < window.span for count in videos.counts)
        """videos that are shorter than the work memory"""

    def __len__(self) -> int:
        return len(self.stretches)

    def __getitem__(self, index: int) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        video, number = self.stretches[index]
        count, span = self.videos.counts[video], self.window.span
        begin = number * span + int(torch.randint(span, ()))
        newest = max(0, min(begin, count - span)) + span - 1
        view = self.window.view(torch.tensor([min(newest, count - 1)]))
        numbers = torch.cat((view.long[0], view.work[0]))
        targets = self.videos.targets(video)[view.work[0]].float()
        targets[int(view.slot) + 1 :] = 0
        targets[int(view.slot) + 1 :, -1] = 1
        return self.videos.read(video, numbers.tolist()), (view.empty[0], targets)

    def where(self, index: int) -> str:
        return f"video {self.videos.title(self.stretches[index][0])}"


class WholeVideos:
    """Samples to evaluate with: all frames of a video, and its number."""

    def __init__(self, videos: Videos) -> None:
        self.videos = videos

    def __len__(self) -> int:
        return len(self.videos.counts)

    def __getitem__(self, index: int) -> tuple[Tensor, Any]:
        return self.videos.read(index, range(self.videos.counts[index])), index

    def where(self, index: int) -> str:
        return f"video {self.videos.title(index)}"
