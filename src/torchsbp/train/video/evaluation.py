"""How often a classifier of clips is right, over several views of each video: in each head, and in all of them."""

from collections.abc import Callable, Mapping, Sequence
from html import escape

import torch
from torch import Tensor, nn

from ..accuracy import MANY, Accuracy
from ..data.clips import SHORT, UNREAD, Note
from ..distributed import all_sum, gather
from ..record import Metric
from ..task import Evaluator

Batch = tuple[Tensor, Tensor, Sequence[Note]]
"""clips, labels ``[B, heads]``, and notes about their videos"""
SHOWN = 10
TITLES = {UNREAD: "Videos that can't be read", SHORT: "Videos shorter than a clip"}


def metrics(heads: Sequence[str], classes: Sequence[int]) -> tuple[Metric, ...]:
    """Return the metrics: loss, top-1 and top-5 of each head, how often several are all right, and counts of notes."""
    found = [Metric("loss", "validation loss", format=".3f", higher=False, column=False)]
    if len(heads) > 1:
        found.append(Metric("top1", "top-1 of both", "%", chart="Validation accuracy"))
    for head, count in zip(heads, classes, strict=True):
        before, title = ("", "top-") if len(heads) == 1 else (f"{head}_", f"{head} top-")
        found.append(
            Metric(f"{before}top1", f"{title}1", "%", chart=f"Validation accuracy{', ' if before else ''}{before[:-1]}")
        )
        if count > MANY:
            found.append(Metric(f"{before}top5", f"{title}5", "%", column=False))
    counts = [Metric(kind, TITLES[kind].lower(), format=".0f", higher=False, column=False) for kind in TITLES]
    return (*found, *counts)


class Views(Evaluator):
    """Accuracy of probabilities averaged over the views of a video. ``picture`` draws the first clip for the report."""

    def __init__(
        self,
        device: torch.device,
        heads: Sequence[str],
        names: Sequence[Sequence[str]],
        notes: Mapping[str, set[str]],
        picture: Callable[[Tensor], bytes],
    ) -> None:
        """``notes`` are those of training, by kind; those of evaluation are added."""
        self.heads, self.picture = heads, picture
        self.accuracies = [Accuracy(device, len(its), its) for its in names]
        self.sums = torch.zeros(2, dtype=torch.float64, device=device)  # videos right in every head, all videos
        self.notes = {kind: set(notes.get(kind, ())) for kind in TITLES}
        self.first: Tensor | None = None

    def update(self, model: nn.Module, batch: Batch, valid: int) -> None:
        clips, labels, notes = batch
        for note in notes:
            self.notes[note.kind].add(note.text)
        found = probabilities(model, clips, [its.classes for its in self.accuracies])
        read = (labels[:, 0] >= 0) & (torch.arange(len(labels), device=labels.device) < valid)
        if self.first is None and read.any():
            self.first = clips[int(read.nonzero()[0]), 0].clone()
        labels, right = labels[read], torch.ones_like(labels[read, 0], dtype=torch.bool)
        for number, (accuracy, its) in enumerate(zip(self.accuracies, found, strict=True)):
            scores = its[read].clamp(min=torch.finfo(its.dtype).tiny).log()
            if len(scores):
                accuracy.update(nn.Identity(), (scores, labels[:, number]), len(scores))
            right &= scores.argmax(1) == labels[:, number]
        self.sums += torch.stack([right.sum(), right.new_tensor(len(right), dtype=torch.int64)])

    def result(self) -> dict[str, float]:
        right, videos = all_sum(self.sums).tolist()
        for kind in TITLES:
            self.notes[kind] = set().union(*gather(self.notes[kind]))
        counts = {kind: float(len(found)) for kind, found in self.notes.items()}
        if not videos:
            nothing = {metric.name: 0.0 for metric in metrics(self.heads, [its.classes for its in self.accuracies])}
            return {**nothing, **counts}
        results = [its.result() for its in self.accuracies]
        if len(results) == 1:
            return {**results[0], **counts}
        found = {"loss": sum(its.pop("loss") for its in results), "top1": 100 * right / videos}
        for head, its in zip(self.heads, results, strict=True):
            found |= {f"{head}_{name}": value for name, value in its.items()}
        return {**found, **counts}

    def sections(self) -> dict[str, str | bytes]:
        found: dict[str, str | bytes] = {}
        if self.first is not None:
            found["Frames of a clip, and with SBP what the last step kept"] = self.picture(self.first)
        for head, accuracy in zip(self.heads, self.accuracies, strict=True):
            if hasattr(accuracy, "total"):
                before = "" if len(self.heads) == 1 else f"{head.capitalize()}: "
                found |= {before + title: content for title, content in accuracy.sections().items()}
        return found | {TITLES[kind]: listed(notes) for kind, notes in self.notes.items() if notes}


def probabilities(model: nn.Module, clips: Tensor, classes: Sequence[int]) -> list[Tensor]:
    """Return ``[B, classes]`` of each head; the model sees views ``[B, V, 3, T, H, W]`` one after the other."""
    views = [model(view).float().split(list(classes), 1) for view in clips.unbind(1)]
    return [torch.stack([its.softmax(1) for its in head]).mean(0) for head in zip(*views, strict=True)]


def listed(notes: set[str]) -> str:
    """Return HTML: how many notes there are, and the first of them."""
    shown = "".join(f"<li>{escape(text)}</li>" for text in sorted(notes)[:SHOWN])
    return f"<p>{len(notes)}{f', the first {SHOWN} of them' if len(notes) > SHOWN else ''}:</p><ul>{shown}</ul>"
