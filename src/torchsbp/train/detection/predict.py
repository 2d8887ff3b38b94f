"""``torchsbp predict`` for detectors: objects as rows, COCO's json, and pictures with what was found."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from torch import nn

from ..data.masks import tools
from ..data.pictures import read_picture
from ..predictor import Prediction, Predictor
from .batches import Batch, Prepared, Sample
from .draw import LEAST, drawn
from .evaluate import Found, objects_of


class DetectionPredictor(Predictor):
    columns = ("class", "score", "x", "y", "width", "height")
    draws = True

    def __init__(
        self,
        categories: Mapping[int, str],
        transform: Prepared,
        collate: Callable[[list[Sample]], Batch],
        prepare: Callable[[Batch, bool], Batch],
    ) -> None:
        """``categories``: ids of the data -> names, in the order of the model's classes."""
        self.names, self.ids = categories, list(categories)
        self.transform, self.collate, self.prepare = transform, collate, prepare

    def read(self, path: Path) -> Sample:
        with path.open("rb") as file:
            picture = read_picture(file, "RGB")
        nothing = {"boxes": np.zeros((0, 4), np.float32), "labels": np.zeros(0, np.int64)}
        return self.transform(picture, {**nothing, "index": 0, "size": (picture.height, picture.width)})

    def predict(self, model: nn.Module, inputs: list[Sample]) -> list[Prediction]:
        batch = self.prepare(self.collate(inputs), False)
        found = zip(model(batch.images, batch.sizes), batch.sizes.tolist(), batch.originals, strict=True)
        return [self.prediction(list(objects_of(*its)), its[2]) for its in found]

    def prediction(self, objects: list[dict[str, Any]], size: tuple[int, int]) -> Prediction:
        for its in objects:
            its["category_id"] = self.ids[its.pop("label") - 1]
        rows = [(self.names[its["category_id"]], round(its["score"], 4), *np.round(its["bbox"], 1)) for its in objects]
        shown = [its for its in objects if its["score"] >= LEAST]
        caption = ", ".join(f"{self.names[its['category_id']]} {its['score']:.2f}" for its in shown) or "nothing"
        return Prediction(rows, {"height": size[0], "width": size[1], "objects": objects}, caption)

    def document(self, files: Sequence[str], records: Sequence[dict[str, Any]]) -> Any:
        """Return COCO's json, with a score in every annotation."""
        images, annotations = [], list[dict[str, Any]]()
        for number, (file, record) in enumerate(zip(files, records, strict=True), 1):
            images.append({"id": number, "file_name": file, "height": record["height"], "width": record["width"]})
            for its in record["objects"]:
                about = {"id": len(annotations) + 1, "image_id": number, "iscrowd": 0}
                annotations.append({**about, "area": area(its), **its})
        categories = [{"id": number, "name": name} for number, name in self.names.items()]
        return {"images": images, "annotations": annotations, "categories": categories}

    def picture(self, path: Path, prediction: Prediction) -> Image.Image:
        return drawn(super().picture(path, prediction), prediction.record["objects"], self.names)


def area(found: Found) -> float:
    """Return the area of an object in pixels: of its mask, or of its box if it has none."""
    if "segmentation" in found:
        return float(tools().mask.area(found["segmentation"]))
    return found["bbox"][2] * found["bbox"][3]
