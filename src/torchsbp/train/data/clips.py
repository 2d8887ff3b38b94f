"""Clips of labelled videos: which frames are read to train with and to evaluate with.

A video that can't be read does not end a run: in training another one takes its place, in evaluation it is left out.
Both are counted, and so are videos that are shorter than a clip, which begin again at their end.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ...errors import DataError, UsageError
from .videos import Video

TRIES = 100
"""how many videos in a row may be unreadable: even if half of all are missing, no run meets so many"""
UNREAD, SHORT = "unread", "short"


class Note(NamedTuple):
    """A remark about a video, for the report."""

    kind: str
    text: str


class Clips:
    """Videos with a class for each head of a model."""

    heads: tuple[str, ...]
    """what each head classifies: ("class",), or ("verb", "noun")"""
    names: Sequence[Sequence[str]]
    """names of the classes of each head"""
    labels: Sequence[tuple[int, ...]]
    """the classes of each video, one per head"""

    def title(self, index: int) -> str:
        raise NotImplementedError

    def open(self, index: int) -> Video:
        raise NotImplementedError


class Target(NamedTuple):
    labels: Tensor
    """``[heads]``; −1 if the video could not be read"""
    notes: tuple[Note, ...] = ()


class Sampling(NamedTuple):
    """A clip of ``frames`` frames, every ``stride``-th of its video."""

    frames: int
    stride: int

    @property
    def span(self) -> int:
        return (self.frames - 1) * self.stride + 1

    def numbers(self, begin: int, count: int) -> list[int]:
        """Return the frames of a clip in a video of ``count`` frames, which begins again at its end."""
        return [(begin + i * self.stride) % count for i in range(self.frames)]

    def at_random(self, count: int) -> list[int]:
        return self.numbers(int(torch.randint(max(1, count - self.span + 1), ())), count)

    def evenly(self, count: int, views: int) -> list[int]:
        """Return ``views`` clips in one list; they begin in the middles of equal parts of where a clip can begin."""
        room = max(1, count - self.span + 1)
        return [n for view in range(views) for n in self.numbers(int((view + 0.5) * room / views), count)]


class Source:
    """Clips ``[n, height, width, 3]`` with targets: a source for ``Samples``."""

    def __init__(self, clips: Clips, sampling: Sampling) -> None:
        self.clips, self.sampling = clips, sampling

    def __len__(self) -> int:
        return len(self.clips.labels)

    def where(self, index: int) -> str:
        return f"video {self.clips.title(index)}"

    def read(self, index: int, numbers: Callable[[int], list[int]]) -> tuple[Tensor, Target]:
        try:
            with self.clips.open(index) as video:
                frames, count = video.read(numbers(len(video))), len(video)
        except (DataError, UsageError):
            raise
        except Exception as error:  # whatever a decoder raises
            raise DataError(f"{self.where(index)} can't be read: {error}") from error
        text = f"{self.clips.title(index)}: {count} frames, a clip spans {self.sampling.span}"
        notes = (Note(SHORT, text),) if count < self.sampling.span else ()
        return frames, Target(torch.tensor(self.clips.labels[index]), notes)


class TrainClips(Source):
    """A clip from a random place in the video or, if that can't be read, in another video."""

    def __getitem__(self, index: int) -> tuple[Tensor, Target]:
        notes: list[Note] = []
        for _ in range(TRIES):
            try:
                frames, target = self.read(index, self.sampling.at_random)
                return frames, target._replace(notes=(*notes, *target.notes))
            except DataError as error:
                notes.append(Note(UNREAD, str(error)))
                index = int(torch.randint(len(self), ()))
        raise DataError(f"{TRIES} videos in a row: {notes[0].text}; …; {notes[-1].text}")


class EvalClips(Source):
    """``views`` clips of a video, one after the other; black and labelled −1 if it can't be read."""

    def __init__(self, clips: Clips, sampling: Sampling, views: int) -> None:
        super().__init__(clips, sampling)
        self.views = views

    def __getitem__(self, index: int) -> tuple[Tensor, Target]:
        try:
            return self.read(index, lambda count: self.sampling.evenly(count, self.views))
        except DataError as error:
            black = torch.zeros(self.views * self.sampling.frames, 8, 8, 3, dtype=torch.uint8)
            return black, Target(torch.full((len(self.clips.heads),), -1), (Note(UNREAD, str(error)),))
