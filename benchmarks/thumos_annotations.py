"""Both mean average precisions on THUMOS'14's own annotations, compared with an independent reference.

    python benchmarks/thumos_annotations.py ANNOTATIONS       # {val,test}_Annotation.csv, {val,test}_video_info.csv

The annotations are not part of the project. Videos are not needed: black frames of one pixel stand for them, four per
second of a video. The scores are the targets with noise. Ours goes through the steps of an evaluation: ``torchsbp
targets``, segments of the scores, mAP. The reference reads the files again and shares no code with it: plain loops that
follow the protocol. It ends with an error if the two differ by more than rounding.
"""

import argparse
import csv
import tempfile
from collections.abc import Sequence
from importlib.metadata import version
from itertools import pairwise
from math import ceil
from pathlib import Path

import numpy as np

from torchsbp import __version__
from torchsbp.train.data.thumos import FPS, Thumos, prepare
from torchsbp.train.online.evaluation import frame_precisions
from torchsbp.train.online.segments import OVERLAPS, Found, detect, detection_map

SMOOTHED = 7
"""Frames over which targets with noise are averaged."""
ROUNDING = 1e-9
Segments = dict[str, list[tuple[str, float, float]]]
"""video -> (class, start, end), in seconds"""


def write_frames(info: Path, frames: Path) -> None:
    frames.mkdir(parents=True, exist_ok=True)
    with info.open(newline="") as file:
        for row in csv.DictReader(file):
            count = ceil(float(row["count"]) / float(row["fps"]) * FPS)
            np.save(frames / f"{row['video']}.npy", np.zeros((count, 1, 1, 3), np.uint8))


def noisy(targets: np.ndarray, draw: np.random.Generator) -> np.ndarray:
    """Scores ``[frames, classes]`` that sum to 1: the softmax of targets (not ambiguous ones) plus noise, smoothed."""
    clear = targets[:, :-1]
    rough = 3 * clear + draw.normal(0, 1, clear.shape)
    logits = 1.5 * np.stack([np.convolve(column, np.ones(SMOOTHED) / SMOOTHED, "same") for column in rough.T], 1)
    powers = np.exp(logits - logits.max(1, keepdims=True))
    return powers / powers.sum(1, keepdims=True)


def ours(videos: Thumos, scores: dict[str, np.ndarray], found: dict[str, list[Found]]) -> list[float]:
    """The mAP of detections at each tIoU, then that of frames."""
    truth = {name: videos.segments(number) for number, name in enumerate(videos.videos)}
    detections = detection_map(found, truth, range(1, len(videos.names) - 1))
    frames = frame_precisions(np.concatenate(list(scores.values())), np.concatenate(videos.labels))
    return [*detections.values(), sum(frames.values()) / len(frames)]


def annotated(path: Path, lengths: dict[str, int]) -> Segments:
    """The segments within videos of these lengths (in frames)."""
    result: Segments = {video: [] for video in lengths}
    with path.open(newline="") as file:
        for row in csv.DictReader(file):
            if row["video"] in lengths:
                start, end = max(float(row["start"]), 0.0), min(float(row["end"]), lengths[row["video"]] / 4)
                if start < end:
                    result[row["video"]].append((row["type"], start, end))
    return result


def detection_precision(truth: Segments, found: dict[str, list[Found]], name: str, label: int, least: float) -> float:
    """Average precision of one class at one tIoU, in percent: the area under the precision reached at each recall or
    beyond."""
    wanted: list[tuple[str, float, float]] = []
    for video, segments in truth.items():
        for its, start, end in segments:
            twice = any(v == video and abs(start - s) <= 1e-3 and abs(end - e) <= 1e-3 for v, s, e in wanted)
            if its == name and not twice:
                wanted.append((video, start, end))
    ranked = [(its.score, video, its.start, its.end) for video in found for its in found[video] if its.label == label]
    taken: set[int] = set()
    points: list[tuple[float, float]] = []
    for number, (_, video, start, end) in enumerate(sorted(ranked, key=lambda its: -its[0]), 1):
        best, most = None, 0.0
        for index, (other, s, e) in enumerate(wanted):
            if other == video and index not in taken:
                common = min(end, e) - max(start, s)
                overlap = common / ((end - start) + (e - s) - common)
                if overlap >= least and overlap > most:
                    best, most = index, overlap
        if best is not None:
            taken.add(best)
        points.append((len(taken) / len(wanted), len(taken) / number))
    area, reached = 0.0, 0.0
    for (before, _), (recall, precision) in reversed(list(pairwise([(0.0, 0.0), *points]))):
        reached = max(reached, precision)
        area += (recall - before) * reached
    return 100 * area


def frame_precision(truth: Segments, scores: dict[str, np.ndarray], name: str, label: int) -> float:
    """Average precision of one class, in percent: the mean over its frames of the precision at their rank, without
    ambiguous frames."""
    ranked: list[tuple[float, bool]] = []
    for video, its in scores.items():
        here = frames_of(truth[video], name, len(its))
        ambiguous = frames_of(truth[video], "Ambiguous", len(its))
        ranked += [(float(its[i, label]), i in here) for i in range(len(its)) if i not in ambiguous]
    ranked.sort(key=lambda pair: -pair[0])
    hits, total = 0, 0.0
    for number, (_, right) in enumerate(ranked, 1):
        if right:
            hits += 1
            total += hits / number
    return 100 * total / hits


def frames_of(segments: Sequence[tuple[str, float, float]], name: str, count: int) -> set[int]:
    """Frames i, shown at i / 4 seconds, within segments of a class; for one between two frames the nearest frame."""
    result: set[int] = set()
    for its, start, end in segments:
        if its == name:
            inside = [i for i in range(count) if start <= i / 4 < end]
            result.update(inside or [min(round((start + end) / 2 * 4), count - 1)])
    return result


def reference(annotations: Path, scores: dict[str, np.ndarray], found: dict[str, list[Found]]) -> list[float]:
    """The same numbers as ``ours``."""
    truth = annotated(annotations, {video: len(its) for video, its in scores.items()})
    names = sorted({name for segments in truth.values() for name, _, _ in segments} - {"Ambiguous"})
    numbered = [(name, number) for number, name in enumerate(names, 1)]  # columns are in the order of the alphabet
    means = []
    for least in (0.3, 0.4, 0.5, 0.6, 0.7):
        means.append(sum(detection_precision(truth, found, *its, least) for its in numbered) / len(names))
    return [*means, sum(frame_precision(truth, scores, *its) for its in numbered) / len(names)]


def compare(folder: Path, root: Path, part: str, seed: int) -> float:
    """Print what was read and both rows of results. Return the largest difference."""
    annotations = folder / f"{part}_Annotation.csv"
    write_frames(folder / f"{part}_video_info.csv", root / "frames")
    counts = prepare(annotations, root, part, FPS, None, skip_missing=True)
    videos, draw = Thumos(root, part, FPS), np.random.default_rng(seed)
    scores = {name: noisy(videos.labels[number], draw) for number, name in enumerate(videos.videos)}
    found = {name: detect(its, FPS) for name, its in scores.items()}
    print(f"\n{part}: {', '.join(f'{number} {what}' for what, number in counts.items() if number)}")
    print(f"{sum(map(len, found.values()))} detections\n\n| mAP, % | {' | '.join(map(str, OVERLAPS))} | frames |")
    print("|---" * 7 + "|")
    rows = {"torchsbp": ours(videos, scores, found), "reference": reference(annotations, scores, found)}
    for name, values in rows.items():
        print(f"| {name} | {' | '.join(f'{value:.6f}' for value in values)} |", flush=True)
    return max(abs(a - b) for a, b in zip(*rows.values(), strict=True))


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("annotations", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    print(f"torchsbp {__version__}, numpy {np.__version__}, scikit-learn {version('scikit-learn')}, seed {args.seed}")
    with tempfile.TemporaryDirectory() as root:
        largest = max(compare(args.annotations, Path(root), part, args.seed) for part in ("val", "test"))
    print(f"\nlargest difference: {largest:.1e}")
    if not largest <= ROUNDING:
        raise SystemExit(f"they differ by more than {ROUNDING}")


if __name__ == "__main__":
    main()
