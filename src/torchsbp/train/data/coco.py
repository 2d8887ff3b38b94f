"""Objects in images as COCO's json describes them. What can't be meant is refused, with the file and the id of it.

- crowd regions: not trained with; evaluation ignores what is found in them, as COCO's tools do
- boxes: cut to the image; one thinner than a pixel is not trained with
- images without an object to train with: left out of training, not of evaluation
- categories: any ids; the model's classes are 1, 2, … in the order of the ids, 0 is the background
"""

import json
import math
import os
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from ...errors import DataError, UsageError
from .pictures import read_picture

PARTS = ("images", "annotations", "categories")


def tools() -> Any:
    """faster-coco-eval, which reads masks and evaluates."""
    try:
        import faster_coco_eval
    except ModuleNotFoundError as error:
        if error.name != "faster_coco_eval":
            raise
        raise UsageError("detection needs faster-coco-eval: pip install 'torchsbp[detection]'") from error
    return faster_coco_eval


class Objects:
    """A source of pictures; the target has boxes, classes and masks, and the picture's number and size.

    ``content`` is COCO's json, ``file`` its name in messages, ``read(record)`` the picture of one of its images.
    ``training``: leave out what is not trained with. ``masks``: every object must have one.
    """

    def __init__(
        self,
        content: dict[str, Any],
        file: str,
        read: Callable[[dict[str, Any]], Image.Image],
        training: bool,
        masks: bool,
    ) -> None:
        self.file, self.read, self.masks = file, read, masks
        categories = sorted(content["categories"], key=lambda its: its["id"])
        self.names = [str(its.get("name", its["id"])) for its in categories]
        self.category_ids = [its["id"] for its in categories]
        self.content = content
        labels = {its: label for label, its in enumerate(self.category_ids, 1)}
        images = {its["id"]: its for its in content["images"]}
        objects: dict[int, list[dict[str, Any]]] = {its: [] for its in images}
        self.left_out: Counter[str] = Counter()
        for annotation in content["annotations"]:
            image = images[annotation["image_id"]]
            box = cut(annotation["bbox"], image)
            if annotation["iscrowd"]:
                self.left_out["crowd regions"] += 1
            elif box[2] - box[0] < 1 or box[3] - box[1] < 1:
                self.left_out["boxes thinner than a pixel"] += 1
            else:
                trained = {"box": box, "label": labels[annotation["category_id"]], "annotation": annotation}
                objects[image["id"]].append(trained)
        ids = [its for its in images if objects[its] or not training]
        if training:
            self.left_out["images without objects"] = len(images) - len(ids)
        self.images, self.objects = [images[its] for its in ids], [objects[its] for its in ids]

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
        """``[n, h, w]``, 0 and 1."""
        height, width = record["height"], record["width"]
        masks = np.zeros((len(objects), height, width), dtype=np.uint8)
        for mask, its in zip(masks, objects, strict=True):
            try:
                mask[:] = tools().mask.decode(run_lengths(its["annotation"]["segmentation"], height, width))
            except Exception as error:  # whatever a decoder raises
                raise DataError(
                    f"the mask of annotation {its['annotation']['id']} can't be decoded: {error}"
                ) from error
        return masks

    def where(self, index: int) -> str:
        record = self.images[index]
        return f"image {record['id']}, {record['file_name']}, of {self.file}"

    @property
    def notes(self) -> str:
        """What is not as one might expect, for the log."""
        told = ", ".join(f"{count} {what}" for what, count in self.left_out.items() if count)
        return f"{self.file}: {len(self)} images; not trained with: {told or 'nothing'}"

    @cached_property
    def ground_truth(self) -> Any:
        """For COCO's evaluation."""
        return tools().COCO(self.content)


def cut(box: list[float], image: dict[str, Any]) -> tuple[float, float, float, float]:
    """(x, y, width, height) as corners, within the image."""
    x, y, width, height = box
    right, bottom = image["width"], image["height"]
    x0, y0, x1, y1 = max(x, 0), max(y, 0), min(x + width, right), min(y + height, bottom)
    return x0, y0, x1, y1


def run_lengths(segmentation: Any, height: int, width: int) -> Any:
    """Polygons or run lengths as COCO's compressed run lengths."""
    mask = tools().mask
    if isinstance(segmentation, list):
        return mask.merge(mask.frPyObjects(segmentation, height, width))
    if isinstance(segmentation["counts"], list):
        return mask.frPyObjects(segmentation, height, width)
    return segmentation


def open_coco(annotations: Path, folder: Path, training: bool, masks: bool) -> Objects:
    """COCO's json and the folder of its images."""
    try:
        content = json.loads(annotations.read_text())
    except FileNotFoundError as error:
        raise DataError(f"no annotations at {annotations}") from error
    except (OSError, ValueError) as error:
        raise DataError(f"{annotations} is no json: {error}") from error
    check(content, str(annotations), masks)
    try:
        there = set(os.listdir(folder))
    except OSError as error:
        raise DataError(f"no folder of images at {folder}") from error
    for image in content["images"]:
        if image["file_name"] not in there and not (folder / image["file_name"]).is_file():
            raise DataError(f"image {image['id']} of {annotations} is missing: no file {folder / image['file_name']}")

    def read(record: dict[str, Any]) -> Image.Image:
        with (folder / record["file_name"]).open("rb") as file:
            return read_picture(file, "RGB")

    objects = Objects(content, str(annotations), read, training, masks)
    if not len(objects):
        raise DataError(f"{annotations} has no image with an object")
    return objects


def check(content: Any, file: str, masks: bool) -> None:
    """Raise ``DataError`` if this is no COCO json; add what COCO's tools need and others leave out."""
    if not isinstance(content, dict) or not all(isinstance(content.get(part), list) for part in PARTS):
        found = ", ".join(map(str, list(content)[:8])) if isinstance(content, dict) else f"a {type(content).__name__}"
        raise DataError(f"{file} is no COCO json: it needs the lists {', '.join(PARTS)}; found: {found}")
    needed = {"images": ("id", "file_name", "width", "height"), "categories": ("id",)}
    needed["annotations"] = ("id", "image_id", "category_id", "bbox")
    for part, names in needed.items():
        seen = set()
        for number, its in enumerate(content[part]):
            missing = [name for name in names if not isinstance(its, dict) or name not in its]
            if missing:
                raise DataError(f"{file}: number {number} of its {part} has no {', '.join(missing)}")
            if its["id"] in seen:
                raise DataError(f"{file}: the id {its['id']} is there twice among its {part}")
            seen.add(its["id"])
    images = {its["id"]: its for its in content["images"]}
    categories = {its["id"] for its in content["categories"]}
    for annotation in content["annotations"]:
        for problem in problems(annotation, images, categories, masks):
            raise DataError(f"annotation {annotation['id']} of {file}: {problem}")
        annotation.setdefault("iscrowd", 0)
        annotation.setdefault("area", annotation["bbox"][2] * annotation["bbox"][3])


def problems(annotation: dict[str, Any], images: dict[int, Any], categories: set[int], masks: bool) -> Iterator[str]:
    """What can't be meant, in words."""
    image, box = images.get(annotation["image_id"]), annotation["bbox"]
    if image is None:
        yield f"there is no image {annotation['image_id']}"
        return
    if annotation["category_id"] not in categories:
        yield f"there is no category {annotation['category_id']}; known: {shortened(sorted(categories))}"
    if not (isinstance(box, list) and len(box) == 4 and finite(box)):
        yield f"its box is {box!r}, not four numbers (x, y, width, height)"
    elif box[2] < 0 or box[3] < 0:
        yield f"its box {box} has a negative side"
    if not masks:
        return
    segmentation = annotation.get("segmentation")
    if not segmentation:
        yield "it has no mask (segmentation); leave it out, or train boxes alone with task.model.masks=false"
    elif isinstance(segmentation, list):
        for polygon in segmentation:
            if not (isinstance(polygon, list) and len(polygon) >= 6 and len(polygon) % 2 == 0 and finite(polygon)):
                yield f"a polygon of its mask is not x, y of three points or more: {shortened(polygon)}"
    else:
        yield from run_length_problems(segmentation, image)


def run_length_problems(segmentation: Any, image: dict[str, Any]) -> Iterator[str]:
    size = [image["height"], image["width"]]
    if not (isinstance(segmentation, dict) and {"size", "counts"} <= set(segmentation)):
        yield f"its mask is neither polygons nor run lengths (size, counts): {shortened(segmentation)}"
        return
    counts = segmentation["counts"]
    if list(segmentation["size"]) != size:
        yield f"its mask is of {segmentation['size']} pixels, its image of {size}"
    elif isinstance(counts, list):
        if not all(isinstance(its, int) and its >= 0 for its in counts) or sum(counts) != math.prod(size):
            yield f"the run lengths of its mask do not fill its image, {math.prod(size)} pixels"
    elif not isinstance(counts, str):
        yield f"the run lengths of its mask are neither numbers nor text: {shortened(counts)}"


def finite(numbers: list[Any]) -> bool:
    return all(isinstance(its, int | float) and math.isfinite(its) for its in numbers)


def shortened(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 60 else f"{text[:60]} …"
