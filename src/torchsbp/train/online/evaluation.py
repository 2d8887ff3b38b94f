"""Evaluation with every frame as the newest: scores of whole videos, per-frame mAP, and temporal detection."""

from collections.abc import Sequence
from html import escape

import numpy as np
import torch
from sklearn.metrics import average_precision_score
from torch import Tensor

from ..data.actions import Videos
from ..distributed import gather
from ..task import Evaluator
from .detector import OnlineDetector
from .segments import detect, detection_map

MOMENTS = 64
"""how many are scored at a time"""


@torch.no_grad()
def score_video(model: OnlineDetector, frames: Tensor) -> Tensor:
    """Return probabilities ``[T, classes]`` of frames ``[T, 3, H, W]``, each from itself and what comes before it."""
    features = model.encode(frames[None])[0]
    newest = torch.arange(len(frames))
    return torch.cat([score_moments(model, features, part) for part in newest.split(MOMENTS)])


def score_moments(model: OnlineDetector, features: Tensor, newest: Tensor) -> Tensor:
    device = features.device
    view = model.temporal.window.view(newest)
    seen = features[torch.cat((view.long, view.work), 1).to(device)]
    logits = model.temporal.forward(seen, view.empty.to(device))  # not compiled: the number of moments varies
    return logits[torch.arange(len(newest)), view.slot].softmax(-1)


def frame_precisions(scores: np.ndarray, targets: np.ndarray) -> dict[int, float]:
    """Return the average precision, in percent, of every action that occurs.

    ``scores [n, classes]``, ``targets [n, classes + 1]``. Ambiguous frames are left out, and background is no action.
    """
    clear = targets[:, -1] == 0
    scores, targets = scores[clear], targets[clear]
    present = [label for label in range(1, scores.shape[1]) if targets[:, label].any()]
    return {label: 100 * float(average_precision_score(targets[:, label], scores[:, label])) for label in present}


class Precision(Evaluator):
    """mAP of frames, and of detected segments at each tIoU."""

    def __init__(self, videos: Videos) -> None:
        self.videos = videos
        self.scores: dict[int, np.ndarray] = {}

    def update(self, model: OnlineDetector, batch: Sequence[Tensor], valid: int) -> None:  # type: ignore[override]
        for frames, number in list(zip(*batch, strict=True))[:valid]:
            self.scores[int(number)] = score_video(model, frames).float().cpu().numpy()

    def result(self) -> dict[str, float]:
        scores = {number: found for part in gather(self.scores) for number, found in part.items()}
        targets = np.concatenate([self.videos.targets(number).numpy() for number in scores])
        every = np.concatenate(list(scores.values()))
        bad = ~np.isfinite(every).all(1)
        every[bad] = 0  # a model that gives NaN finds nothing
        self.precisions = frame_precisions(every, targets)
        titles = {number: self.videos.title(number) for number in scores}
        labels = range(1, len(self.videos.names) - 1)
        detections = detection_map(
            {titles[number]: detect(found, self.videos.fps) for number, found in scores.items()},
            {titles[number]: self.videos.segments(number) for number in scores},
            labels,
        )
        mean = float(np.mean(list(self.precisions.values()))) if self.precisions else 0.0
        return {
            "map": mean,
            "tad": float(np.mean(list(detections.values()))),
            **{f"tad_{overlap}": value for overlap, value in detections.items()},
        }

    def sections(self) -> dict[str, str]:
        rows = sorted((precision, self.videos.names[label]) for label, precision in self.precisions.items())
        cells = "".join(f"<tr><td>{escape(name)}</td><td>{precision:.1f}</td></tr>" for precision, name in rows)
        head = "<th>action</th><th>average precision of frames, %</th>"
        return {"Precision by action": f'<div class="scroll"><table><tr>{head}</tr>{cells}</table></div>'}
