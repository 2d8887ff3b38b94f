"""COCO's evaluation of boxes and masks: twelve numbers each, in percent; −1 where there is nothing to find."""

from collections.abc import Iterator, Sequence
from html import escape
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torchvision.models.detection.roi_heads import paste_masks_in_image

from ..data.coco import Objects
from ..data.masks import tools
from ..distributed import gather
from ..record import Metric
from ..task import Evaluator
from .batches import Batch
from .draw import board, drawn

Found = dict[str, Any]
"""an object in COCO's format of results"""
NUMBERS = {
    "ap": "AP", "ap50": "AP50", "ap75": "AP75",
    "ap_small": "AP small", "ap_medium": "AP medium", "ap_large": "AP large",
    "ar1": "AR 1", "ar10": "AR 10", "ar100": "AR 100",
    "ar_small": "AR small", "ar_medium": "AR medium", "ar_large": "AR large",
}  # fmt: skip
"""our names and titles of COCO's numbers, in COCO's order"""
CHARTS = {"ap": "average precision", "ap50": "average precision at IoU 0.5"}
SHOWN = 6
"""the most pictures in the report"""


def metrics(masks: bool) -> tuple[Metric, ...]:
    """Return the metrics of boxes, then those of masks."""
    return tuple(
        Metric(
            f"{kind}_{name}",
            f"{kind} {title}",
            "%",
            column=name in CHARTS,
            chart=f"{kind.capitalize()} {CHARTS[name]}" if name in CHARTS else "",
        )
        for kind in (("box", "mask") if masks else ("box",))
        for name, title in NUMBERS.items()
    )


def objects_of(detections: dict[str, Tensor], size: Sequence[int], original: tuple[int, int]) -> Iterator[Found]:
    """Yield what was found in an image of ``size``, in pixels of the original: box, class number, score and mask."""
    height, width = original
    scale = torch.tensor([width / int(size[1]), height / int(size[0])] * 2)
    boxes = detections["boxes"].float().cpu() * scale
    masks = None
    if "masks" in detections:
        pasted = paste_masks_in_image(detections["masks"].float().cpu()[:, None], boxes, original)
        masks = (pasted[:, 0] > 0.5).to(torch.uint8).numpy()
    scores, labels = detections["scores"].float().tolist(), detections["labels"].tolist()
    for number, (x0, y0, x1, y1) in enumerate(boxes.tolist()):
        found: Found = {"bbox": [x0, y0, x1 - x0, y1 - y0], "label": labels[number], "score": scores[number]}
        if masks is not None:
            found["segmentation"] = as_text(tools().mask.encode(np.asfortranarray(masks[number])))
        yield found


def as_text(run_lengths: dict[str, Any]) -> dict[str, Any]:
    """Make run lengths fit for json."""
    counts = run_lengths["counts"]
    return {"size": list(run_lengths["size"]), "counts": counts.decode() if isinstance(counts, bytes) else counts}


class Precision(Evaluator):
    """COCO's numbers for what is found in the images of a source. Images that can't be read do not count, nor do their
    objects."""

    def __init__(self, source: Objects) -> None:
        self.source, self.found, self.seen = source, list[Found](), set[int]()

    def update(self, model: nn.Module, batch: Batch, valid: int) -> None:
        detections = model(batch.images, batch.sizes)
        sizes = batch.sizes.tolist()
        self.seen.update(batch.indices[:valid])
        every = list(zip(detections, batch.indices, sizes, batch.originals, strict=True))
        for its, index, size, original in every[:valid]:
            about = {"image_id": self.source.images[index]["id"]}
            for found in objects_of(its, size, original):
                category = self.source.category_ids[found.pop("label") - 1]
                self.found.append({**about, "category_id": category, **found})

    def result(self) -> dict[str, float]:
        self.found = [its for each in gather(self.found) for its in each]
        self.seen = set().union(*gather(self.seen))
        images = [self.source.images[index]["id"] for index in self.seen]
        self.by_class: dict[str, list[float]] = {}
        values: dict[str, float] = {}
        for kind, field in (("box", "bbox"), ("mask", "segmentation")):
            if kind == "box" or self.source.masks:
                # without its box, the size of a mask is that of its pixels
                found = [
                    {name: its[name] for name in ("image_id", "category_id", field, "score")} for its in self.found
                ]
                numbers, self.by_class[kind] = evaluated(self.source.ground_truth, images, found, kind)
                values |= {f"{kind}_{name}": number for name, number in zip(NUMBERS, numbers, strict=True)}
        return values | self.left_out()

    def left_out(self) -> dict[str, float]:
        """Return how many images, and objects in them, were left out; empty if none were."""
        ids = {its["id"] for index, its in enumerate(self.source.images) if index not in self.seen}
        objects = [its for its in self.source.content["annotations"] if its["image_id"] in ids and not its["iscrowd"]]
        return {"images_left_out": float(len(ids)), "objects_left_out": float(len(objects))} if ids else {}

    def sections(self) -> dict[str, str | bytes]:
        return {"Predictions": self.pictures(), "Average precision by class": self.table()}

    def pictures(self) -> bytes:
        """Return a PNG of the first images, with what was found in them."""
        shown = []
        names = dict(zip(self.source.category_ids, self.source.names, strict=True))
        for index in sorted(self.seen)[:SHOWN]:
            found = [its for its in self.found if its["image_id"] == self.source.images[index]["id"]]
            shown.append(drawn(self.source[index][0], found, names))
        return board(shown)

    def table(self) -> str:
        kinds = list(self.by_class)
        head = "".join(f"<th>{kind} AP, %</th>" for kind in kinds)
        rows = []
        for number, name in enumerate(self.source.names):
            values = [self.by_class[kind][number] for kind in kinds]
            cells = "".join(f"<td>{value:.1f}</td>" if value >= 0 else "<td>–</td>" for value in values)
            rows.append(f"<tr><td>{escape(name)}</td>{cells}</tr>")
        return f'<div class="scroll"><table><tr><th>class</th>{head}</tr>{"".join(rows)}</table></div>'


def evaluated(truth: Any, images: list[int], found: list[Found], kind: str) -> tuple[list[float], list[float]]:
    """Return COCO's twelve numbers for the images of these ids, and the average precision of every class."""
    name = {"box": "bbox", "mask": "segm"}[kind]
    run = tools().COCOeval_faster(truth, truth.loadRes(found), name, print_function=quiet)
    run.params.imgIds = images
    run.evaluate()
    run.accumulate()
    run.summarize()
    precision = np.asarray(run.eval["precision"])[:, :, :, 0, -1]  # overlap, recall, class
    of_class = [each[each > -1] for each in precision.transpose(2, 0, 1)]
    return [percent(x) for x in run.stats[: len(NUMBERS)]], [percent(x.mean()) if x.size else -1.0 for x in of_class]


def percent(share: float) -> float:
    return 100 * float(share) if share >= 0 else -1.0


def quiet(*_: object) -> None:
    pass
