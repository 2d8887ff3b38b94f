"""Annotations of actions as datasets publish them, and targets of frames made from them.

Two formats are read: a CSV file with the columns ``video, type, start, end`` (in seconds; other columns are ignored),
and THUMOS's own folder of files ``CLASS_test.txt`` or ``CLASS_val.txt``, whose lines are ``VIDEO START END``.
"""

import csv
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from math import isfinite
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ...errors import DataError
from .actions import AMBIGUOUS, BACKGROUND, Segment

THUMOS = [
    "BaseballPitch",
    "BasketballDunk",
    "Billiards",
    "CleanAndJerk",
    "CliffDiving",
    "CricketBowling",
    "CricketShot",
    "Diving",
    "FrisbeeCatch",
    "GolfSwing",
    "HammerThrow",
    "HighJump",
    "JavelinThrow",
    "LongJump",
    "PoleVault",
    "Shotput",
    "SoccerPenalty",
    "TennisSwing",
    "ThrowDiscus",
    "VolleyballSpiking",
]
COLUMNS = ("video", "type", "start", "end")


class Annotation(NamedTuple):
    """An annotated action, in seconds; ``where`` is the FILE:LINE that it was read from."""

    video: str
    name: str
    start: float
    end: float
    where: str


def read_annotations(path: Path) -> list[Annotation]:
    """Read the annotations of a CSV file, or of all files of a folder, in their order."""
    files = sorted(path.glob("*.txt")) if path.is_dir() else [path]
    if not files:
        raise DataError(f"no annotations in {path}: expected CLASS_val.txt or CLASS_test.txt, or name a CSV file")
    return [its for file in files for its in read_file(file, of_text if path.is_dir() else of_csv)]


def read_file(path: Path, read: Callable[[Path], Iterator[Annotation]]) -> list[Annotation]:
    try:
        return list(read(path))
    except OSError as error:
        raise DataError(f"annotations {path} can't be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise DataError(f"annotations {path} can't be read: no text ({error})") from error
    except csv.Error as error:  # such as a quote that is not closed
        raise DataError(f"annotations {path} can't be read: {error}") from error


def of_csv(path: Path) -> Iterator[Annotation]:
    with path.open(newline="") as file:
        reader = csv.DictReader(file)
        missing = [name for name in COLUMNS if name not in (reader.fieldnames or ())]
        if missing:
            raise DataError(f"{path}:1: no column {', '.join(missing)}; needed: {', '.join(COLUMNS)}")
        for row in reader:
            yield annotation([row[name] for name in COLUMNS], f"{path}:{reader.line_num}")


def of_text(path: Path) -> Iterator[Annotation]:
    name = path.stem.rpartition("_")[0] or path.stem
    for number, line in enumerate(path.read_text().splitlines(), 1):
        words = line.split()
        if words:
            yield annotation([*words[:1], name, *words[1:]], f"{path}:{number}")


def annotation(words: Sequence[str | None], where: str) -> Annotation:
    try:
        video, name, start, end = (word.strip() for word in words if word is not None)
        result = Annotation(video, name, float(start), float(end), where)
    except ValueError:
        raise DataError(f"{where}: expected {', '.join(COLUMNS)}, found {words}") from None
    if not (isfinite(result.start) and isfinite(result.end)):
        raise DataError(f"{where}: times must be finite numbers of seconds, found {start} and {end}")
    return result


def columns(actions: Sequence[str]) -> list[str]:
    """Return the names of the columns of targets: background, actions, ambiguous."""
    return [BACKGROUND, *actions, AMBIGUOUS]


def segments_of(
    found: Sequence[Annotation], names: Sequence[str], seconds: float, counts: Counter[str]
) -> list[Segment]:
    """Return the segments of one video in the order of time, cut to its length; ``counts`` counts the changes."""
    numbers = {name: number for number, name in enumerate(names) if name != BACKGROUND}
    result = []
    for its in found:
        if its.name not in numbers:
            hint = ". Frames of no segment are background: leave the line out" if its.name == BACKGROUND else ""
            raise DataError(f"{its.where}: unknown class {its.name!r}; known: {', '.join(names[1:])}{hint}")
        start, end = max(its.start, 0.0), min(its.end, seconds)
        if its.start >= its.end:
            counts["empty, left out"] += 1
        elif start >= end:
            counts["wholly outside of their video, left out"] += 1
        else:
            counts["reaching beyond their video, clipped"] += (start, end) != (its.start, its.end)
            result.append(Segment(numbers[its.name], start, end))
    result.sort(key=lambda its: (its.start, its.end, its.label))
    counts["overlapping one of their class"] += overlapping(result)
    counts["segments"] += len(result)
    return result


def overlapping(segments: Sequence[Segment]) -> int:
    """Return how many segments begin before an earlier one of their class has ended."""
    until: dict[int, float] = {}
    number = 0
    for its in segments:
        number += its.start < until.get(its.label, -1.0)
        until[its.label] = max(its.end, until.get(its.label, 0.0))
    return number


def targets_of(segments: Sequence[Segment], frames: int, fps: float, names: Sequence[str]) -> np.ndarray:
    """Return ``[frames, columns]``; frame i is at i / fps seconds. A segment between two frames goes to the nearest."""
    result = np.zeros((frames, len(names)), np.float32)
    times = np.arange(frames) / fps
    for label, start, end in segments:
        inside = (times >= start) & (times < end)
        if not inside.any():
            inside[min(round((start + end) / 2 * fps), frames - 1)] = True
        result[inside, label] = 1
    result[:, 0] = result.sum(1) == 0
    return result
