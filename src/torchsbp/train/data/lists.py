"""Labelled videos from lists of paths and classes (Kinetics and others), or from Epic-Kitchens-55's annotations.

ROOT/train.txt, val.txt        path class, one video a line; a path is a video file, a folder of frames or a .npy file
ROOT/classes.txt               names of the classes, one a line; without it they are called by their numbers

ROOT/EPIC_train_action_labels.csv, EPIC_verb_classes.csv, EPIC_noun_classes.csv     as published
ROOT/P01/P01_01.MP4            videos, or P01/P01_01.npy, or folders of frames P01/P01_01/; P01/ may be left out

Epic-Kitchens' annotations count 60 frames a second, as its authors extract them. Video files have 59.94 a second, some
29.97, 48 or 90, or a rate that varies; so frames of a file are found by their times.
"""

import csv
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

from torch import Tensor

from ...errors import DataError
from .clips import Clips
from .videos import FILES, Video, open_video

T = TypeVar("T")
CLASSES = "classes.txt"
FPS = 60
"""frames a second that Epic-Kitchens' annotations count"""
LOOKED_FOR = 100
"""the most videos of a list that are looked for; one of them must be there"""


class Listed(Clips):
    """The videos of a list, each with one class."""

    heads = ("class",)

    def __init__(self, root: Path, part: str) -> None:
        self.root, self.list = root, root / part
        found = {number: self.parsed(number, line) for number, line in numbered(self.list)}
        self.paths, self.labels = [path for path, _ in found.values()], [(label,) for _, label in found.values()]
        named = (root / CLASSES).is_file()
        self.names = [lines(root / CLASSES) if named else [str(n) for n in range(max(self.labels)[0] + 1)]]
        check_labels(self, self.list, found)
        check_there(self.list, [root / path for path in spread(self.paths)])

    def parsed(self, number: int, line: str) -> tuple[str, int]:
        path, _, label = line.rpartition(" ")
        if not (path and label.isdecimal()):
            raise DataError(f"{self.list}:{number} is {line!r}; allowed: PATH CLASS, the class as a number from 0")
        return path, int(label)

    def title(self, index: int) -> str:
        return self.paths[index]

    def open(self, index: int) -> Video:
        return open_video(self.root / self.paths[index])


class Epic(Clips):
    """Actions of Epic-Kitchens-55: stretches of videos with a verb and a noun.

    The test set's classes are not public, so the actions of ``held_out`` participants are used for validation.
    """

    heads = ("verb", "noun")

    def __init__(self, root: Path, part: str, held_out: Collection[str], training: bool) -> None:
        self.root, self.file = root, root / part
        self.names = [named(root / f"EPIC_{head}_classes.csv") for head in self.heads]
        self.rows: list[tuple[str, str, int, int]] = []
        """participant, video, first frame, frame after the last"""
        self.labels: list[tuple[int, int]] = []
        found: list[int] = []
        for number, row in records(self.file):
            try:
                participant, video = row["participant_id"], row["video_id"]
                begin, end = int(row["start_frame"]) - 1, int(row["stop_frame"])  # the file counts from 1
                labels = int(row["verb_class"]), int(row["noun_class"])
            except (KeyError, TypeError, ValueError) as error:  # a column is missing, a line ends early, no number
                raise DataError(f"{self.file}:{number} is no action of Epic-Kitchens-55: {error!r}") from error
            if (participant in held_out) != training:
                self.rows.append((participant, video, begin, end))
                self.labels.append(labels)
                found.append(number)
        if not self.rows:
            raise DataError(f"{self.file} has no actions {'but' if training else 'of'} those of {sorted(held_out)}")
        check_labels(self, self.file, found)
        check_there(self.file, [self.found(*row[:2]) for row in spread(self.rows)])

    def title(self, index: int) -> str:
        _, video, begin, end = self.rows[index]
        return f"{video}, frames {begin} to {end - 1}"

    def open(self, index: int) -> Video:
        participant, video, begin, end = self.rows[index]
        return Part(open_video(self.found(participant, video), fps=FPS), begin, end, self.title(index))

    def found(self, participant: str, video: str) -> Path:
        """Return where the video is or, if it is missing, where it should be."""
        places = (self.root / participant / video, self.root / video)
        suffixes = ("", *(suffix for known in FILES for suffix in (known, known.upper())), ".npy")
        paths = (place.with_name(place.name + suffix) for place in places for suffix in suffixes)
        return next((path for path in paths if path.exists()), places[0])


class Part(Video):
    """A stretch of a video at ``FPS`` frames a second, cut to the video's length."""

    fps = FPS

    def __init__(self, video: Video, begin: int, end: int, title: str) -> None:
        self.video, self.begin = video, max(0, begin)
        there = len(video.moments(FPS))
        self.count = min(end, there) - self.begin
        if self.count < 1:
            video.close()
            raise DataError(f"{title}: the video has {there} frames")

    def __len__(self) -> int:
        return self.count

    def read(self, numbers: Sequence[int]) -> Tensor:
        return self.video.frames_at([(self.begin + number) / FPS for number in numbers]).permute(0, 2, 3, 1)

    def close(self) -> None:
        self.video.close()


def lines(path: Path) -> list[str]:
    """Return the lines of a file that are not empty."""
    return [line for _, line in numbered(path)]


def numbered(path: Path) -> list[tuple[int, str]]:
    """Return the lines of a file that are not empty, with their numbers from 1."""
    try:
        every = enumerate(path.read_text().splitlines(), 1)
        found = [(number, line.strip()) for number, line in every if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path} can't be read: {error}") from error
    if not found:
        raise DataError(f"{path} is empty")
    return found


def records(path: Path) -> Iterator[tuple[int, dict[str, str]]]:
    """Yield the rows of a CSV file with the numbers of their lines."""
    found = numbered(path)
    reader = csv.DictReader(line for _, line in found)
    try:
        for row in reader:
            yield found[reader.line_num - 1][0], row
    except csv.Error as error:  # such as a quote that is not closed
        raise DataError(f"{path} can't be read: {error}") from error


def named(path: Path) -> list[str]:
    """Return the names of Epic-Kitchens' classes, in the order of the file."""
    try:
        return [row["class_key"] for _, row in records(path)]
    except KeyError as error:
        raise DataError(f"{path} has no column {error}; allowed: the file as it was published") from error


def check_labels(clips: Clips, file: Path, found: Iterable[int]) -> None:
    """Raise ``DataError`` for a label that has no name; ``found`` holds the line of every label."""
    for line, labels in zip(found, clips.labels, strict=True):
        for head, label, names in zip(clips.heads, labels, clips.names, strict=True):
            if not 0 <= label < len(names):
                raise DataError(f"{file}:{line} has {head} {label}; {len(names)} have names: 0 to {len(names) - 1}")


def check_there(file: Path, paths: Sequence[Path]) -> None:
    """Raise ``DataError`` if all these videos are missing. If only some are, reading deals with them one by one."""
    if not any(path.exists() for path in paths):
        raise DataError(
            f"none of {len(paths)} videos of {file} that were looked for exist, such as {paths[0]}: paths are below "
            "task.data.root"
        )


def spread(videos: list[T]) -> list[T]:
    """Return some videos from all over a list: many are sorted, and the videos of a class may be missing together."""
    return videos[:: -(-len(videos) // LOOKED_FOR)]
