"""The accuracy of a classifier: over all images, for each class, and which classes it confuses."""

from collections.abc import Sequence
from html import escape

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .distributed import all_sum
from .task import Evaluator

SHOWN = 20
"""classes that the report shows; if there are more, it shows the worst, and no confusion matrix"""
MANY = 5
"""top-5 is reported if there are more classes than this"""


class Accuracy(Evaluator):
    """Top-1 and top-5 in percent, and the mean loss, over all processes."""

    def __init__(self, device: torch.device, classes: int, names: Sequence[str] = ()) -> None:
        self.classes, self.names = classes, list(names) or [str(number) for number in range(classes)]
        self.sums = torch.zeros(4, dtype=torch.float64, device=device)  # loss, top-1, top-5, images
        # Rows are the right classes, columns the predicted ones. The last column is for logits that are not finite.
        self.found = torch.zeros(classes, classes + 1, dtype=torch.int64, device=device)

    def update(self, model: nn.Module, batch: tuple[Tensor, Tensor], valid: int) -> None:
        images, labels = batch
        logits, labels = model(images)[:valid].float(), labels[:valid]
        own, number = logits.gather(1, labels[:, None]), torch.arange(logits.shape[1], device=logits.device)
        # How many classes are ahead of the right one: of equal ones the first counts, as in a prediction. In bfloat16
        # many are equal, and a model that gives all classes the same is right for one of them, not for all.
        rank = ((logits > own) | ((logits == own) & (number < labels[:, None]))).sum(1)
        loss = F.cross_entropy(logits, labels, reduction="sum")
        # With NaN among the logits no class seems to be ahead of the right one, but the model is wrong all the same.
        finite = logits.isfinite().all(1)
        self.sums += torch.stack(
            [loss, (finite & (rank < 1)).sum(), (finite & (rank < 5)).sum(), loss.new_tensor(valid)]
        )
        first = logits.argmax(1).where(finite, self.classes)
        pairs = torch.bincount(labels * (self.classes + 1) + first, minlength=self.found.numel())
        self.found += pairs.view_as(self.found)

    def result(self) -> dict[str, float]:
        loss, top1, top5, images = all_sum(self.sums).tolist()
        self.total = all_sum(self.found).cpu()
        result = {"loss": loss / images, "top1": 100 * top1 / images}
        return {**result, "top5": 100 * top5 / images} if self.classes > MANY else result

    def sections(self) -> dict[str, str]:
        result = {"Accuracy by class": by_class(self.total, self.names)}
        if self.classes <= SHOWN:
            result["Confusion matrix"] = matrix(self.total[:, : self.classes], self.names)
        return result


def by_class(found: Tensor, names: Sequence[str]) -> str:
    """An HTML table, worst classes first: the share that is right, and the class most often predicted instead."""
    lines = []
    for number, row in enumerate(found.tolist()):
        images, right = sum(row), row[number]
        others = [(count, name) for i, (count, name) in enumerate(zip(row, names, strict=False)) if i != number]
        count, name = max(others, key=lambda its: its[0], default=(0, ""))
        taken = f"{escape(name)} ({count})" if count else "–"
        share = 100 * right / images if images else 101.0
        lines.append(
            (share, f"<td>{escape(names[number])}</td><td>{images}</td><td>{percent(share)}</td><td>{taken}</td>")
        )
    shown = "".join(f"<tr>{cells}</tr>" for _, cells in sorted(lines, key=lambda its: its[0])[:SHOWN])
    head = "<th>class</th><th>images</th><th>right, %</th><th>most often taken for</th>"
    more = f"<p>The worst {SHOWN} of {len(names)} classes.</p>" if len(names) > SHOWN else ""
    return f'{more}<div class="scroll"><table><tr>{head}</tr>{shown}</table></div>'


def percent(share: float) -> str:
    """A share above 100 is that of a class without images."""
    return "–" if share > 100 else f"{share:.1f}"


def matrix(found: Tensor, names: Sequence[str]) -> str:
    """The confusion matrix as HTML: rows are the right classes, columns the predicted ones. A darker cell has a larger
    share of its row."""
    head = "".join(f"<th>{escape(name)}</th>" for name in names)
    rows = []
    for name, row in zip(names, found.tolist(), strict=True):
        shades = [round(70 * count / max(sum(row), 1)) for count in row]
        cells = "".join(
            f'<td style="background: color-mix(in srgb, var(--c0) {shade}%, transparent)">{count}</td>'
            for count, shade in zip(row, shades, strict=True)
        )
        rows.append(f"<tr><th>{escape(name)}</th>{cells}</tr>")
    return f'<div class="scroll"><table><tr><th>is, found as</th>{head}</tr>{"".join(rows)}</table></div>'
