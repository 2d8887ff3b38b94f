"""Scores over time, with the frames at their peaks."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from ..data.videos import Video
from .segments import Found

ACTIONS, PEAKS = 6, 6
"""how many are drawn at most"""
LEAST = 0.1
"""the least score of an action that is drawn"""


def peaks(scores: np.ndarray, labels: Sequence[int], apart: int) -> list[tuple[int, int]]:
    """Return (moment, label) of the best scores, ``apart`` moments or more from each other, in the order of time."""
    found: list[tuple[int, int]] = []
    order = np.argsort(-scores[:, labels].ravel(), kind="stable")
    for moment, column in zip(*np.unravel_index(order, (len(scores), len(labels))), strict=True):
        if len(found) == PEAKS or scores[moment, labels[column]] < LEAST:
            break
        if all(abs(moment - other) >= apart for other, _ in found):
            found.append((int(moment), labels[column]))
    return sorted(found)


def draw(
    path: Path,
    title: str,
    times: Sequence[float],
    scores: np.ndarray,
    names: Sequence[str],
    segments: Sequence[Found],
    video: Video,
) -> None:
    """Draw ``scores [moments, classes]`` at ``times`` of the video, and save the picture at ``path``."""
    import matplotlib
    from matplotlib.figure import Figure

    labels = sorted(range(1, len(names)), key=lambda label: -scores[:, label].max())[:ACTIONS]
    labels = sorted(label for label in labels if scores[:, label].max() >= LEAST)
    colours = {label: matplotlib.colormaps["tab10"](i) for i, label in enumerate(labels)}
    shown = peaks(scores, labels, max(1, len(times) // (2 * PEAKS))) if labels else []
    figure = Figure(figsize=(12, 5), layout="constrained")
    grid = figure.add_gridspec(2, PEAKS, height_ratios=(1, 1.6))
    for place, (moment, label) in enumerate(shown):
        axes = figure.add_subplot(grid[0, place])
        axes.imshow(video.frames_at([times[moment]])[0].permute(1, 2, 0).numpy())
        axes.set_title(f"{names[label]}\n{times[moment]:.1f} s, {scores[moment, label]:.2f}", fontsize=9)
        axes.set_xticks([])
        axes.set_yticks([])
        for side in axes.spines.values():
            side.set(color=colours[label], linewidth=2.5)
    axes = figure.add_subplot(grid[1, :])
    for label in labels:
        axes.plot(times, scores[:, label], color=colours[label], label=names[label], linewidth=1.6)
    for its in segments:
        if its.label in colours and its.score >= LEAST:
            axes.axvspan(its.start, its.end, ymax=0.03, color=colours[its.label], alpha=min(1.0, its.score))
    for moment, label in shown:
        axes.plot(times[moment], scores[moment, label], "o", color=colours[label], markersize=5)
    axes.set(xlabel="seconds", ylabel="score", ylim=(0, 1.02), xlim=(times[0], max(times[-1], times[0] + 1e-3)))
    axes.set_title(f"{title}: every frame from what comes before it; detected segments below", fontsize=10)
    axes.grid(alpha=0.3)
    if labels:
        figure.legend(loc="outside lower center", fontsize=9, ncols=ACTIONS, frameon=False)
    figure.savefig(path, dpi=110)
