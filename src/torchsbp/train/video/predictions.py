"""Predictions of a trained classifier for video files: the most likely classes of each head, over several views."""

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor, nn

from ..accuracy import MANY
from ..data.clips import Sampling
from ..data.videos import FILES, open_video
from ..predictor import Prediction, Predictor
from .evaluation import probabilities
from .picture import strip
from .views import EvalViews

CLASS = "class"
"""name of the head of a model with one head"""


class Actions(Predictor):
    """Predicts with the classes of a ``Video`` task, on its views of a video."""

    suffixes = (*FILES, ".npy")

    def __init__(self, task: Any) -> None:
        self.classes: dict[str, list[str]] = task.classes
        self.sampling: Sampling = task.sampling
        self.views: EvalViews = task.eval_views
        self.clips: int = task.options.data.views[0]
        self.normalised = task.normalised
        self.columns = tuple(
            column
            for head in self.classes
            for column in (head, "probability" if head == CLASS else f"{head} probability")
        )

    def read(self, path: Path) -> Tensor:
        """Return ``[views, 3, T, size, size]``."""
        with open_video(path) as video:
            return self.views.of(video.read(self.sampling.evenly(len(video), self.clips)))

    def predict(self, model: nn.Module, inputs: list[Any]) -> list[Prediction]:
        clips = self.normalised(torch.stack(inputs))
        heads = probabilities(model, clips, [len(names) for names in self.classes.values()])
        best = [its.topk(min(MANY, its.shape[1])) for its in heads]
        return [self.prediction([(its.values[i], its.indices[i]) for its in best]) for i in range(len(inputs))]

    def prediction(self, best: Sequence[tuple[Tensor, Tensor]]) -> Prediction:
        found = {}
        for (head, names), (shares, numbers) in zip(self.classes.items(), best, strict=True):
            pairs = zip(numbers.tolist(), shares.tolist(), strict=True)
            found[head] = [{"class": names[number], "probability": share} for number, share in pairs]
        first = [tops[0] for tops in found.values()]
        row = tuple(cell for its in first for cell in (its["class"], f"{its['probability']:.6f}"))
        record: dict[str, Any] = {head: {**tops[0], "top": tops} for head, tops in found.items()}
        caption = ", ".join(f"{its['class']}, {its['probability']:.1%}" for its in first)
        return Prediction([row], record.get(CLASS, record), caption)

    def picture(self, path: Path, prediction: Prediction) -> Image.Image:
        """Return frames of the video's first view, side by side."""
        return Image.open(io.BytesIO(strip(self.read(path)[0] / 255)))
