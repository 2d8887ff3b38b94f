"""Untrimmed videos with labelled stretches: what every source of them has, and the samples that are cut from them."""

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from .window import Window

BACKGROUND, AMBIGUOUS = "Background", "Ambiguous"
"""the first and the last column of targets"""


class Segment(NamedTuple):
    """A stretch of a video, in seconds, and the action in it by the number of its column."""

    label: int
    start: float
    end: float


class Videos(Protocol):
    """Frames of 8 bits and their targets, by the number of the video."""

    names: list[str]
    """of the columns of targets"""
    fps: float
    counts: list[int]
    """frames of each video"""

    def title(self, video: int) -> str: ...
    def read(self, video: int, frames: Sequence[int]) -> Tensor:
        """``[n, 3, H, W]``; the same frame may be asked for again and again."""
        ...

    def targets(self, video: int) -> Tensor:
        """``[frames, columns]`` of zeros and ones."""
        ...

    def segments(self, video: int) -> Sequence[Segment]: ...


class Windows:
    """To train with: a window in every stretch of ``work`` frames, begun at random within it.

    Frames, which long ones are empty, and targets of the work frames. Where a video is shorter than the work memory,
    the slots that it leaves free count as ambiguous.
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
    """To evaluate with: all frames of a video, and its number."""

    def __init__(self, videos: Videos) -> None:
        self.videos = videos

    def __len__(self) -> int:
        return len(self.videos.counts)

    def __getitem__(self, index: int) -> tuple[Tensor, Any]:
        return self.videos.read(index, range(self.videos.counts[index])), index

    def where(self, index: int) -> str:
        return f"video {self.videos.title(index)}"
