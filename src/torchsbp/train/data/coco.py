"""Objects in images as COCO's json describes them. What training leaves out or changes is counted.

- crowd regions: left out of training; evaluation ignores what is found in them, as COCO's tools do
- boxes: cut to the image, and left out of training if then thinner than a pixel. Evaluation takes them as they are
- objects whose masks lie outside their image: left out of training
- images without an object to train with: left out of training, not of evaluation
- categories: any ids; the model's classes are 1, 2, … in the order of the ids, 0 is the background
"""

import json
import os
from collections import Counter
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from ...errors import DataError
from .coco_check import check
from .masks import outside, run_lengths, tools
from .pictures import read_picture

Box = tuple[float, float, float, float]
"""left, top, right, bottom"""
ROUNDED = 0.01
"""in pixels: COCO's boxes are written with two decimals, so a smaller cut may be rounding"""


class Objects:
    """A source of pictures; a target has boxes, classes and masks, and the picture's number and size.

    ``content`` is COCO's json, ``file`` its name in messages; ``read(record)`` reads the picture of one of its images.
    ``training`` leaves out images without an object to train with. With ``masks``, every object must have one.
    """

    def __init__(
        self,
        content: dict[str, Any],
        file: str,
        read: Callable[[dict[str, Any]], Image.Image],
        training: bool,
        masks: bool,
    ) -> None:
        self.content, self.file, self.read, self.training, self.masks = content, file, read, training, masks
        categories = sorted(content["categories"], key=lambda its: its["id"])
        self.names = [str(its.get("name", its["id"])) for its in categories]
        self.category_ids = [its["id"] for its in categories]
        labels = {its: label for label, its in enumerate(self.category_ids, 1)}
        images = {its["id"]: its for its in content["images"]}
        objects: dict[int, list[dict[str, Any]]] = {its: [] for its in images}
        self.left_out: Counter[str] = Counter()
        self.cut = 0
        for annotation in content["annotations"]:
            image = images[annotation["image_id"]]
            box = cut(annotation["bbox"], image)
            reason = self.reason(annotation, box, image)
            if reason:
                self.left_out[reason] += 1
            else:
                trained = {"box": box, "label": labels[annotation["category_id"]], "annotation": annotation}
                objects[image["id"]].append(trained)
                self.cut += is_cut(annotation["bbox"], box)
        self.left_out["images without objects"] = sum(not its for its in objects.values())
        ids = [its for its in images if objects[its] or not training]
        self.images, self.objects = [images[its] for its in ids], [objects[its] for its in ids]

    def reason(self, annotation: dict[str, Any], box: Box, image: dict[str, Any]) -> str:
        """Return why an annotation is left out of training, or an empty text."""
        if annotation["iscrowd"]:
            return "crowd regions"
        if box[2] - box[0] < 1 or box[3] - box[1] < 1:
            return "boxes thinner than a pixel"
        if self.masks and outside(annotation["segmentation"], image["height"], image["width"]):
            return "masks outside their image"
        return ""

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Image.Image, dict[str, Any]]:
        record, objects = self.images[index], self.objects[index]
        picture = self.read(record)
        if picture.size != (record["width"], record["height"]):
            found, told = "{} × {}".format(*picture.size), f"{record['width']} × {record['height']}"
            raise DataError(f"it has {found} pixels, {self.file} says {told}")
        target = {
            "index": index,
            "size": (record["height"], record["width"]),
            "boxes": np.array([its["box"] for its in objects], dtype=np.float32).reshape(-1, 4),
            "labels": np.array([its["label"] for its in objects], dtype=np.int64),
        }
        if self.masks:
            target["masks"] = self.masks_of(record, objects)
        return picture, target

    def masks_of(self, record: dict[str, Any], objects: list[dict[str, Any]]) -> np.ndarray[Any, Any]:
        """Return ``[n, h, w]`` of zeros and ones."""
        height, width = record["height"], record["width"]
        masks = np.zeros((len(objects), height, width), dtype=np.uint8)
        for mask, its in zip(masks, objects, strict=True):
            mask[:] = tools().mask.decode(run_lengths(its["annotation"]["segmentation"], height, width))
        return masks

    def where(self, index: int) -> str:
        record = self.images[index]
        return f"image {record['id']}, {record['file_name']}, of {self.file}"

    @property
    def notes(self) -> str:
        """What the log says of these data: how many images, and what is left out or cut."""
        told = [f"{count} {what}" for what, count in self.left_out.items() if count]
        if self.training:
            changed = f"; cut to the image: {self.cut} boxes" if self.cut else ""
            return f"{self.file}: {len(self)} images; not trained with: {', '.join(told) or 'nothing'}{changed}"
        told += [f"{self.cut} boxes beyond their image"] if self.cut else []
        return f"{self.file}: {len(self)} images to evaluate with; of note: {', '.join(told) or 'nothing'}"

    @cached_property
    def ground_truth(self) -> Any:
        """The objects for COCO's evaluation, renumbered from 1: it would never count an object of id 0 as found."""
        annotations = [{**its, "id": number} for number, its in enumerate(self.content["annotations"], 1)]
        return tools().COCO({**self.content, "annotations": annotations})


def cut(box: list[float], image: dict[str, Any]) -> Box:
    """Return a box (x, y, width, height) as corners, cut to the image."""
    x, y, width, height = box
    right, bottom = image["width"], image["height"]
    x0, y0, x1, y1 = max(x, 0), max(y, 0), min(x + width, right), min(y + height, bottom)
    return x0, y0, x1, y1


def is_cut(box: list[float], corners: Box) -> bool:
    x0, y0, x1, y1 = corners
    return box[2] - (x1 - x0) > ROUNDED or box[3] - (y1 - y0) > ROUNDED


def open_coco(annotations: Path, folder: Path, training: bool, masks: bool) -> Objects:
    """Read COCO's json, and check it and that its images are in ``folder``."""
    try:
        content = json.loads(annotations.read_text())
    except FileNotFoundError as error:
        raise DataError(f"no annotations at {annotations}") from error
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{annotations} is no json: {error}") from error
    check(content, str(annotations), masks)
    try:
        there = set(os.listdir(folder))
    except OSError as error:
        raise DataError(f"no folder of images at {folder}") from error
    for image in content["images"]:
        if image["file_name"] not in there and not os.path.isfile(folder / image["file_name"]):
            raise DataError(f"image {image['id']} of {annotations} is missing: no file {folder / image['file_name']}")

    def read(record: dict[str, Any]) -> Image.Image:
        with (folder / record["file_name"]).open("rb") as file:
            return read_picture(file, "RGB")

    objects = Objects(content, str(annotations), read, training, masks)
    if not len(objects):
        raise DataError(f"{annotations} has no image with an object")
    return objects
