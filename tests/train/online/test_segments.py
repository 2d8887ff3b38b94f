"""Temporal detection: segments of scores, soft-NMS, and THUMOS's mAP against a reference that is written out."""

import math

import numpy as np
import pytest

from torchsbp.train.data.actions import Segment
from torchsbp.train.online.evaluation import frame_precisions
from torchsbp.train.online.segments import OVERLAPS, Found, detect, detection_map, proposals, soft_nms, tiou


def test_every_stretch_above_a_threshold_is_proposed_once_by_how_it_stands_out():
    scores = np.array([0.0, 0.35, 0.65, 0.65, 0.35, 0.0, 0.95])
    found = {(its.start, its.end): its.score for its in proposals(scores, 2, fps=2.0)}
    assert found == {
        (0.5, 2.5): pytest.approx(0.5),  # above 0.1, 0.2 and 0.3; nothing on either side
        (1.0, 2.0): pytest.approx(0.65 - 0.35),
        (3.0, 3.5): pytest.approx(0.95),
    }


def test_soft_nms_lowers_what_overlaps():
    found = [Found(1, 0, 10, 0.9), Found(1, 0, 5, 0.8), Found(1, 20, 30, 0.5)]
    kept = soft_nms(found)
    lowered = 0.8 * math.exp(-(0.5**2) / 0.5)
    assert [its.start for its in kept] == [0, 20, 0] if lowered < 0.5 else [0, 0, 20]
    assert [its.score for its in kept] == pytest.approx(sorted([0.9, lowered, 0.5], reverse=True))


def test_background_is_not_detected_and_the_best_come_first():
    scores = np.zeros((20, 3))
    scores[:, 0] = 1
    scores[3:8, 1], scores[10:15, 2] = 0.5, 0.9
    found = detect(scores, fps=1.0)
    assert [(its.label, its.start, its.end) for its in found] == [(2, 10, 15), (1, 3, 8)]


def test_tiou():
    assert tiou(np.array([0.0, 4.0]), np.array([[2.0, 6.0], [4.0, 5.0], [0.0, 4.0]])).tolist() == [1 / 3, 0, 1]


def reference(found: dict, truth: dict, label: int, least: float) -> float:
    """One class, one tIoU, in plain loops: the area under the interpolated precision, in percent."""
    annotated = []
    for video, segments in truth.items():
        for its in segments:
            known = any(
                v == video and abs(o.start - its.start) <= 1e-3 and abs(o.end - its.end) <= 1e-3 for v, o in annotated
            )
            if its.label == label and not known:
                annotated.append((video, its))
    ranked = sorted(
        ((its.score, video, its) for video, all_ in found.items() for its in all_ if its.label == label),
        key=lambda its: -its[0],
    )
    used, hits, points = set(), 0, []
    for number, (_, video, its) in enumerate(ranked, 1):
        candidates = []
        for i, (other, segment) in enumerate(annotated):
            if other == video:
                common = min(its.end, segment.end) - max(its.start, segment.start)
                union = (its.end - its.start) + (segment.end - segment.start) - common
                if common > 0 and common / union >= least:
                    candidates.append((-common / union, i))
        free = [i for _, i in sorted(candidates) if i not in used]
        if free:
            used.add(free[0])
            hits += 1
        points.append((hits / len(annotated), hits / number))
    area, last = 0.0, 0.0
    for i, (recall, _) in enumerate(points):
        area += (recall - last) * max(precision for _, precision in points[i:])
        last = recall
    return 100 * area


def random_case(seed: int) -> tuple[dict, dict]:
    draw = np.random.default_rng(seed)
    truth, found = {}, {}
    for video in "abcd":
        truth[video], found[video] = [], []
        for _ in range(6):
            start, length, label = draw.uniform(0, 50), draw.uniform(1, 8), int(draw.integers(1, 4))
            truth[video].append(Segment(label, start, start + length))
            for _ in range(2):
                moved, shifted = start + draw.normal(0, 1), start + length + draw.normal(0, 1)
                found[video].append(Found(label, moved, max(shifted, moved + 0.1), draw.uniform()))
        truth[video].append(truth[video][0]._replace(start=truth[video][0].start + 5e-4))  # annotated twice
    found["not annotated"] = [Found(1, 0, 5, 0.99)]
    return found, truth


@pytest.mark.parametrize("seed", range(5))
def test_detection_map_equals_the_reference(seed):
    found, truth = random_case(seed)
    result = detection_map(found, truth, labels=range(1, 5))
    for least in OVERLAPS:
        expected = np.mean([reference(found, truth, label, least) for label in (1, 2, 3)])  # 4 is annotated nowhere
        assert result[least] == pytest.approx(expected, abs=1e-9)


def test_perfect_detections():
    truth = {"a": [Segment(1, 0, 5), Segment(1, 7, 9)]}
    found = {"a": [Found(1, 0, 5, 0.9), Found(1, 7, 9, 0.8)]}
    assert detection_map(found, truth, [1]) == dict.fromkeys(OVERLAPS, 100.0)


def test_without_annotations_it_is_0():
    """As the mAP of frames is: no NaN, which JSON does not have."""
    assert detection_map({"a": [Found(1, 0, 5, 0.9)]}, {"a": []}, [1]) == dict.fromkeys(OVERLAPS, 0.0)


def test_per_frame_precision_by_hand():
    """Background and ambiguous frames as the published protocol has them."""
    targets = np.eye(4)[[0, 1, 1, 2, 3, 0]]  # background, two actions, ambiguous
    scores = np.array([[0.5, 0.4, 0.1], [0, 0.9, 0], [0, 0.3, 0], [0, 0.5, 0.2], [0, 1.0, 1.0], [0, 0, 0.3]])
    # Action 1, by score: 0.9 right, 0.5 wrong, 0.4 wrong, 0.3 right. Action 2: 0.3 wrong, 0.2 right.
    assert frame_precisions(scores, targets) == pytest.approx({1: 100 * (1 + 2 / 4) / 2, 2: 50.0})


def test_an_action_that_does_not_occur_has_no_precision():
    assert frame_precisions(np.ones((3, 3)), np.eye(4)[[0, 1, 1]]).keys() == {1}
