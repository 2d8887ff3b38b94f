"""Labelled videos as files say them: lists of paths and classes (Kinetics and others), Epic-Kitchens-55's annotations.

ROOT/train.txt, val.txt        path class, one video a line; a path is a video file, a folder of frames or a .npy file
ROOT/classes.txt               names of the classes, one a line; without it they are called by their numbers

ROOT/EPIC_train_action_labels.csv, EPIC_verb_classes.csv, EPIC_noun_classes.csv     as published
ROOT/P01/P01_01.MP4            videos, or folders of frames P01/P01_01/; P01/ may be left out
"""

import csv
from collections.abc import Collection, Iterator, Sequence
from itertools import islice
from pathlib import Path

from torch import Tensor

from ...errors import DataError
from .clips import Clips
from .videos import FILES, Video, open_video

CLASSES = "classes.txt"
LOOKED_AT = 100
"""videos, of which one must be there"""


class Listed(Clips):
    """Videos of one class each."""

    heads = ("class",)

    def __init__(self, root: Path, part: str) -> None:
        self.root, self.list = root, root / part
        found = [self.parsed(number, line) for number, line in enumerate(lines(self.list), 1)]
        self.paths, self.labels = [path for path, _ in found], [(label,) for _, label in found]
        named = (root / CLASSES).is_file()
        self.names = [lines(root / CLASSES) if named else [str(n) for n in range(max(self.labels)[0] + 1)]]
        check_labels(self, self.list)
        check_there(self.list, [root / path for path in self.paths[:LOOKED_AT]])

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

    The test set's classes are not public: ``held_out`` participants are what is validated with.
    """

    heads = ("verb", "noun")

    def __init__(self, root: Path, part: str, held_out: Collection[str], training: bool) -> None:
        self.root, self.file = root, root / part
        self.names = [named(root / f"EPIC_{head}_classes.csv") for head in self.heads]
        self.rows: list[tuple[str, str, int, int]] = []
        """participant, video, first frame, frame after the last"""
        self.labels: list[tuple[int, int]] = []
        for number, row in enumerate(records(self.file), 2):
            try:
                participant, video = row["participant_id"], row["video_id"]
                begin, end = int(row["start_frame"]) - 1, int(row["stop_frame"])  # theirs count from 1
                labels = int(row["verb_class"]), int(row["noun_class"])
            except (KeyError, ValueError) as error:
                raise DataError(f"{self.file}:{number} is no action of Epic-Kitchens-55: {error!r}") from error
            if (participant in held_out) != training:
                self.rows.append((participant, video, begin, end))
                self.labels.append(labels)
        if not self.rows:
            raise DataError(f"{self.file} has no actions {'but' if training else 'of'} those of {sorted(held_out)}")
        check_labels(self, self.file)
        check_there(self.file, [self.found(*row[:2]) for row in self.rows[:LOOKED_AT]])

    def title(self, index: int) -> str:
        _, video, begin, end = self.rows[index]
        return f"{video}, frames {begin} to {end - 1}"

    def open(self, index: int) -> Video:
        participant, video, begin, end = self.rows[index]
        return Part(open_video(self.found(participant, video)), begin, end, self.title(index))

    def found(self, participant: str, video: str) -> Path:
        """Where the video is, or where it would be."""
        places = (self.root / participant / video, self.root / video)
        suffixes = ("", *(suffix for known in FILES for suffix in (known, known.upper())))
        paths = (place.with_name(place.name + suffix) for place in places for suffix in suffixes)
        return next((path for path in paths if path.exists()), places[0])


class Part(Video):
    """A stretch of a video, or what there is of it."""

    def __init__(self, video: Video, begin: int, end: int, title: str) -> None:
        self.video, self.fps, self.begin = video, video.fps, begin
        self.count = min(end, len(video)) - begin
        if self.count < 1:
            raise DataError(f"{title}: the video has {len(video)} frames")

    def __len__(self) -> int:
        return self.count

    def read(self, numbers: Sequence[int]) -> Tensor:
        return self.video.read([self.begin + number for number in numbers])

    def close(self) -> None:
        self.video.close()


def lines(path: Path) -> list[str]:
    """Those that are not empty."""
    try:
        found = [line.strip() for line in path.read_text().splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path} can't be read: {error}") from error
    if not found:
        raise DataError(f"{path} is empty")
    return found


def records(path: Path) -> Iterator[dict[str, str]]:
    yield from csv.DictReader(lines(path))


def named(path: Path) -> list[str]:
    """Keys of classes, in the order of the file."""
    try:
        return [row["class_key"] for row in records(path)]
    except KeyError as error:
        raise DataError(f"{path} has no column {error}; allowed: the file as it was published") from error


def check_labels(clips: Clips, file: Path) -> None:
    for number, (head, names) in enumerate(zip(clips.heads, clips.names, strict=True)):
        most = max(labels[number] for labels in clips.labels)
        if most >= len(names):
            raise DataError(f"{file} has {head} {most}, but only {len(names)} have names, counted from 0")


def check_there(file: Path, paths: Sequence[Path]) -> None:
    """One that is missing is left out when it is read; if all are, they are elsewhere."""
    if not any(path.exists() for path in islice(paths, LOOKED_AT)):
        raise DataError(
            f"none of the first {len(paths)} videos of {file} exist, such as {paths[0]}: paths are below task.data.root"
        )
