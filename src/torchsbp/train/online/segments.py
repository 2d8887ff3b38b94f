"""Temporal detection from scores of frames: stretches above thresholds, soft-NMS, and mAP as for THUMOS'14."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from ..data.actions import Segment

THRESHOLDS = tuple(round(0.1 * i, 1) for i in range(1, 10))
"""of scores: every stretch above one of these is a proposal"""
OVERLAPS = (0.3, 0.4, 0.5, 0.6, 0.7)
"""tIoU from which a detection is right"""
SIGMA = 0.5
MOST = 200
"""the most detections of a video"""
SAME = 1e-3
"""in seconds: annotations that differ by no more count as one"""


class Found(NamedTuple):
    """A detected segment, in seconds."""

    label: int
    start: float
    end: float
    score: float


def detect(scores: np.ndarray, fps: float) -> list[Found]:
    """Return the segments found in ``scores [frames, classes]``, whose first class is background; the best first."""
    found = [
        segment for label in range(1, scores.shape[1]) for segment in soft_nms(proposals(scores[:, label], label, fps))
    ]
    return sorted(found, key=lambda its: -its.score)[:MOST]


def proposals(scores: np.ndarray, label: int, fps: float) -> list[Found]:
    """Return every stretch of scores above one of the thresholds, once, if it stands out from what is around it."""
    stretches: set[tuple[int, int]] = set()
    for threshold in THRESHOLDS:
        above = np.concatenate(([False], scores > threshold, [False]))
        edges = np.flatnonzero(above[1:] != above[:-1])
        stretches.update(zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True))
    found = [Found(label, begin / fps, end / fps, contrast(scores, begin, end)) for begin, end in sorted(stretches)]
    return [its for its in found if its.score > 0]


def contrast(scores: np.ndarray, begin: int, end: int) -> float:
    """Return the mean score within a stretch, less that of a quarter of its length on either side. So a part of an
    action, however sure, does not stand out."""
    margin = max(1, (end - begin) // 4)
    around = np.concatenate((scores[max(0, begin - margin) : begin], scores[end : end + margin]))
    return float(scores[begin:end].mean() - (around.mean() if len(around) else 0.0))


def soft_nms(found: Sequence[Found]) -> list[Found]:
    """Return the segments, best first; each multiplies the scores of those after it by exp(−tIoU² / σ)."""
    segments = np.array([(its.start, its.end) for its in found]).reshape(-1, 2)
    scores = np.array([its.score for its in found])
    left, kept = np.ones(len(found), bool), []
    while left.any():
        best = int(np.where(left, scores, -np.inf).argmax())
        left[best] = False
        kept.append(found[best]._replace(score=float(scores[best])))
        scores = np.where(left, scores * np.exp(-(tiou(segments[best], segments) ** 2) / SIGMA), scores)
    return kept


def tiou(one: np.ndarray, many: np.ndarray) -> np.ndarray:
    """Return the intersection over union of a segment ``[2]`` with others ``[n, 2]``."""
    common = (np.minimum(one[1], many[:, 1]) - np.maximum(one[0], many[:, 0])).clip(min=0)
    union = (one[1] - one[0]) + (many[:, 1] - many[:, 0]) - common
    return common / np.maximum(union, np.finfo(float).tiny)


def detection_map(
    found: Mapping[str, Sequence[Found]],
    truth: Mapping[str, Sequence[Segment]],
    labels: Sequence[int],
) -> dict[float, float]:
    """Return the mean over classes of the interpolated average precision, in percent, for each of ``OVERLAPS``.

    ``found`` and ``truth`` are by video. Classes without annotations don't count; if all are such, it is 0.
    """
    annotated = {video: distinct(segments) for video, segments in truth.items()}
    precisions = [
        average_precisions(
            [(video, its) for video, segments in found.items() for its in segments if its.label == label],
            {video: [its for its in segments if its.label == label] for video, segments in annotated.items()},
        )
        for label in labels
        if any(its.label == label for segments in annotated.values() for its in segments)
    ]
    means = 100 * np.mean(precisions, axis=0) if precisions else np.zeros(len(OVERLAPS))
    return dict(zip(OVERLAPS, means.tolist(), strict=True))


def distinct(segments: Sequence[Segment]) -> list[Segment]:
    """Return the segments that don't repeat an earlier one."""
    kept: list[Segment] = []
    for its in segments:
        if not any(
            its.label == other.label and abs(its.start - other.start) <= SAME and abs(its.end - other.end) <= SAME
            for other in kept
        ):
            kept.append(its)
    return kept


def average_precisions(found: Sequence[tuple[str, Found]], truth: Mapping[str, Sequence[Segment]]) -> list[float]:
    """Return the average precision of one class for each of ``OVERLAPS``. Detections, best first, take the annotation
    that each overlaps most, of those that are free and overlapped enough."""
    places = {video: np.array([(its.start, its.end) for its in each]).reshape(-1, 2) for video, each in truth.items()}
    total = sum(map(len, truth.values()))
    right = np.zeros((len(OVERLAPS), len(found)), bool)
    taken = {video: np.zeros((len(OVERLAPS), len(each)), bool) for video, each in places.items()}
    for number, (video, its) in enumerate(sorted(found, key=lambda pair: -pair[1].score)):
        if video not in places or not len(places[video]):
            continue
        overlap = tiou(np.array((its.start, its.end)), places[video])
        for row, least in enumerate(OVERLAPS):
            for candidate in np.argsort(-overlap, kind="stable"):
                if overlap[candidate] < least:
                    break
                if not taken[video][row, candidate]:
                    taken[video][row, candidate] = right[row, number] = True
                    break
    return [interpolated(row, total) for row in right]


def interpolated(right: np.ndarray, total: int) -> float:
    """Return the area under the best precision that is reached at each recall or beyond."""
    hits = right.cumsum()
    recall = np.concatenate(([0.0], hits / total, [1.0]))
    precision = np.concatenate(([0.0], hits / np.arange(1, len(right) + 1), [0.0]))
    precision = np.maximum.accumulate(precision[::-1])[::-1]
    steps = np.flatnonzero(recall[1:] != recall[:-1])
    return float(((recall[steps + 1] - recall[steps]) * precision[steps + 1]).sum())
