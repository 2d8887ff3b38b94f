"""THUMOS'14 and data laid out like it.

    ROOT/frames/VIDEO.npy             [frames, height, width, 3] of 8 bits, or a folder ROOT/frames/VIDEO/*.jpg
    ROOT/target_perframe/VIDEO.npy    [frames, columns] of zeros and ones
    ROOT/classes.txt                  names of actions; columns are background, these, ambiguous
    ROOT/fps.txt                      frames a second that the targets were made for
    ROOT/segments.csv                 video, type, start, end: actions in seconds, for temporal detection
    ROOT/train.txt, test.txt          names of videos

``torchsbp targets`` writes all but the frames.
"""

import csv
from collections import Counter
from collections.abc import Sequence
from itertools import zip_longest
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ...errors import DataError, UsageError
from .actions import AMBIGUOUS, BACKGROUND, Segment
from .annotations import COLUMNS, THUMOS, Annotation, columns, read_annotations, segments_of, targets_of
from .pictures import frames_in, read_picture

FRAMES, TARGETS, CLASSES, RATE, SEGMENTS = "frames", "target_perframe", "classes.txt", "fps.txt", "segments.csv"
FPS = 4.0
"""frames a second of THUMOS'14's targets, as published"""


class Thumos:
    """The videos of one list, as a source for ``Windows`` and ``WholeVideos``."""

    def __init__(self, root: Path, part: str, fps: float) -> None:
        self.root, self.fps = root, fps
        self.names = columns(read_classes(root / CLASSES))
        made_for = read_rate(root)
        if made_for not in (None, fps):
            raise DataError(
                f"{root / RATE}: targets were made for {made_for} frames a second, but task.data.fps is {fps}. Set "
                f"task.data.fps={made_for}, or remove {root / RATE} and make the targets of every split again"
            )
        self.list = root / f"{part}.txt"
        self.lines = read_lines(self.list)
        self.videos = list(self.lines)
        self.frames = [Frames(root / FRAMES, name, self.at(number)) for number, name in enumerate(self.videos)]
        self.counts = [len(frames) for frames in self.frames]
        self.labels = [self.read_targets(number) for number in range(len(self.videos))]
        found = by_video(root / SEGMENTS)
        self.found = [
            segments_of(found.get(name, ()), self.names, count / fps, Counter())
            for name, count in zip(self.videos, self.counts, strict=True)
        ]

    def at(self, video: int) -> str:
        return f"{self.list}:{self.lines[self.videos[video]]}"

    def title(self, video: int) -> str:
        return self.videos[video]

    def read(self, video: int, frames: Sequence[int]) -> Tensor:
        return torch.from_numpy(self.frames[video].read(frames)).permute(0, 3, 1, 2)

    def targets(self, video: int) -> Tensor:
        return torch.from_numpy(self.labels[video])

    def segments(self, video: int) -> list[Segment]:
        return self.found[video]

    def read_targets(self, video: int) -> np.ndarray:
        path = self.root / TARGETS / f"{self.videos[video]}.npy"
        again = "make them with torchsbp targets"
        try:
            found = np.load(path)
        except (OSError, ValueError) as error:
            raise DataError(f"{self.at(video)}: targets {path} can't be read ({error}): {again}") from error
        wanted = (self.counts[video], len(self.names))
        if found.shape != wanted:
            raise DataError(
                f"{self.at(video)}: targets {path} are {found.shape}, but there are {wanted[0]} frames and {wanted[1]} "
                f"columns (background, {len(self.names) - 2} actions, ambiguous): {again}"
            )
        return found.astype(np.float32)


class Frames:
    """The frames of one video: an array in a file, read only where it is needed, or pictures in a folder."""

    def __init__(self, folder: Path, name: str, listed: str) -> None:
        self.path = folder / f"{name}.npy"
        self.pictures: list[Path] = []
        if self.path.is_file():
            try:
                array = np.load(self.path, mmap_mode="r")
            except (OSError, ValueError) as error:
                raise DataError(f"{listed}: {self.path} can't be read: {error}") from error
            if array.ndim != 4 or array.shape[-1] != 3 or array.dtype != np.uint8:
                found = f"{array.dtype} {array.shape}"
                raise DataError(f"{listed}: {self.path} has {found}; allowed: uint8 [frames, height, width, 3]")
            self.count = len(array)
        else:
            self.path = folder / name
            self.pictures = frames_in(self.path)
            self.count = len(self.pictures)
        if self.count == 0:
            place = folder / name
            raise DataError(f"{listed}: no frames of {name}: neither {place}.npy nor pictures in {place}/")

    def __len__(self) -> int:
        return self.count

    def read(self, numbers: Sequence[int]) -> np.ndarray:
        """Return ``[n, height, width, 3]``."""
        if not self.pictures:
            return np.load(self.path, mmap_mode="r")[np.asarray(numbers)]
        once = {number: self.picture(number) for number in dict.fromkeys(numbers)}
        shapes = {picture.shape: number for number, picture in once.items()}
        if len(shapes) > 1:
            raise DataError(f"frames of {self.path} are of several sizes: {', '.join(map(str, shapes))}")
        return np.stack([once[number] for number in numbers])

    def picture(self, number: int) -> np.ndarray:
        with self.pictures[number].open("rb") as file:
            return np.asarray(read_picture(file, "RGB"))


def read_lines(path: Path) -> dict[str, int]:
    """Return the lines that are not empty, with their numbers; raise ``DataError`` if one is there twice."""
    lines: dict[str, int] = {}
    try:
        for number, line in enumerate(map(str.strip, path.read_text().splitlines()), 1):
            if line in lines:
                raise DataError(f"{path}:{number} is {line}, as is line {lines[line]}; remove one of them")
            if line:
                lines[line] = number
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path} can't be read ({error}): make it with torchsbp targets") from error
    if not lines:
        raise DataError(f"{path} is empty: make it with torchsbp targets")
    return lines


def read_classes(path: Path) -> list[str]:
    """Return the names of actions in a file."""
    lines = read_lines(path)
    for name in (BACKGROUND, AMBIGUOUS):
        if name in lines:
            raise DataError(f"{path}:{lines[name]} is {name}, which has a column anyway; name actions only")
    return list(lines)


def read_rate(root: Path) -> float | None:
    """Return the frames a second that targets were made for, or None: folders of older versions don't say."""
    path = root / RATE
    if not path.exists():
        return None
    try:
        return float(path.read_text())
    except (OSError, ValueError) as error:
        raise DataError(f"{path} can't be read ({error}); allowed: a number, frames a second") from error


def actions_of(root: Path, given: Path | None) -> list[str]:
    """Return the names of actions: those given, else the folder's, else THUMOS's. Given names must be the folder's, so
    that its targets have columns of one meaning."""
    own = root / CLASSES
    known = read_classes(own) if own.exists() else None
    names = read_classes(given) if given else known or THUMOS
    for number, (name, other) in enumerate(zip_longest(names, known or names, fillvalue="nothing"), 1):
        if name != other:
            raise UsageError(
                f"--classes {given} has {name} in line {number}, {own} has {other}: targets in {root} would have "
                f"columns of two meanings. Leave --classes out, or remove {own} and make the targets of every split "
                "again"
            )
    return names


def rate_of(root: Path, given: float | None) -> float:
    """Return the frames a second: those given, which must be the folder's, else the folder's, else THUMOS's."""
    known = read_rate(root)
    if None not in (given, known) and given != known:
        raise UsageError(
            f"--fps {given} differs from {root / RATE}, {known}, which other targets in {root} were made for. Leave "
            f"--fps out, or remove {root / RATE} and make the targets of every split again"
        )
    return given or known or FPS


def prepare(
    source: Path, root: Path, split: str, fps: float | None, classes: Path | None, skip_missing: bool
) -> Counter[str]:
    """Write targets, segments and the list of a split, from annotations and frames; return counts of what was done."""
    actions, fps = actions_of(root, classes), rate_of(root, fps)
    names = columns(actions)
    counts: Counter[str] = Counter()
    segments: dict[str, list[Segment]] = {}
    (root / TARGETS).mkdir(parents=True, exist_ok=True)
    for video, found in sorted(by_video(source).items()):
        try:
            frames = len(Frames(root / FRAMES, video, found[0].where))
        except DataError:
            if not skip_missing:
                raise
            counts["videos without frames, left out"] += 1
            continue
        segments[video] = segments_of(found, names, frames / fps, counts)
        np.save(root / TARGETS / f"{video}.npy", targets_of(segments[video], frames, fps, names))
        counts["videos"] += 1
        counts["frames"] += frames
    if not segments:
        raise DataError(f"{source} annotates no video that has frames in {root / FRAMES}")
    write_segments(root / SEGMENTS, segments, names)
    (root / CLASSES).write_text("".join(f"{name}\n" for name in actions))
    (root / RATE).write_text(f"{fps}\n")
    (root / f"{split}.txt").write_text("".join(f"{video}\n" for video in segments))
    return counts


def by_video(path: Path) -> dict[str, list[Annotation]]:
    """Return the annotations in a file or folder, by the names of their videos."""
    found: dict[str, list[Annotation]] = {}
    for its in read_annotations(path):
        found.setdefault(its.video, []).append(its)
    return found


def write_segments(path: Path, segments: dict[str, list[Segment]], names: Sequence[str]) -> None:
    """Write the segments of these videos; those of other videos that are in the file stay."""
    others = [its[:4] for its in read_annotations(path) if its.video not in segments] if path.exists() else []
    rows = [(video, names[its.label], its.start, its.end) for video, found in segments.items() for its in found]
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([COLUMNS, *others, *rows])
