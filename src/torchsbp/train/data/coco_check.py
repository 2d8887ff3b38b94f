"""Checks COCO's json. What can't be right raises ``DataError``, with the file and the id of the record."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from ...errors import DataError
from .masks import mask_problems, near, shortened


class Kind(NamedTuple):
    """Which values are allowed, in words and as a test."""

    allowed: str
    holds: Callable[[Any], bool]


def whole(value: Any) -> bool:
    return type(value) is int and abs(value) < 2**63


WHOLE = Kind("a whole number", whole)
SIDE = Kind("a whole number above 0", lambda its: whole(its) and its > 0)
TEXT = Kind("text", lambda its: isinstance(its, str))
NAME = Kind("text or a number", lambda its: isinstance(its, str | int | float))
BOX = Kind("four numbers (x, y, width, height)", lambda its: isinstance(its, list) and len(its) == 4 and near(its))
FLAG = Kind("0 or 1", lambda its: isinstance(its, int) and its in (0, 1))
AREA = Kind("a number that is not negative", lambda its: type(its) in (int, float) and 0 <= its < 1e18)

NEEDED = {
    "images": {"id": WHOLE, "file_name": TEXT, "width": SIDE, "height": SIDE},
    "annotations": {"id": WHOLE, "image_id": WHOLE, "category_id": WHOLE, "bbox": BOX},
    "categories": {"id": WHOLE},
}
ALSO = {"images": {}, "annotations": {"iscrowd": FLAG, "area": AREA}, "categories": {"name": NAME}}
"""values that may be left out"""
ONE = {"images": "image", "annotations": "annotation", "categories": "category"}


def check(content: Any, file: str, masks: bool) -> None:
    """Raise ``DataError`` if this is no COCO json; add missing ``iscrowd`` and ``area``, which COCO's tools need."""
    if not isinstance(content, dict) or not all(isinstance(content.get(part), list) for part in NEEDED):
        found = ", ".join(map(str, list(content)[:8])) if isinstance(content, dict) else f"a {type(content).__name__}"
        raise DataError(f"{file} is no COCO json: it needs the lists {', '.join(NEEDED)}; found: {found}")
    for part in NEEDED:
        check_values(part, content[part], file)
    images = {its["id"]: its for its in content["images"]}
    categories = {its["id"] for its in content["categories"]}
    for annotation in content["annotations"]:
        for problem in problems(annotation, images, categories, masks):
            raise DataError(f"annotation {annotation['id']} of {file}: {problem}")
        annotation["iscrowd"] = int(annotation.get("iscrowd", 0))
        annotation.setdefault("area", annotation["bbox"][2] * annotation["bbox"][3])


def check_values(part: str, records: list[Any], file: str) -> None:
    """Check every record by itself: required values, the kind of each value, and an id of its own."""
    kinds = {**NEEDED[part], **ALSO[part]}
    seen = set()
    for number, its in enumerate(records):
        missing = [name for name in NEEDED[part] if not isinstance(its, dict) or name not in its]
        if missing:
            raise DataError(f"{file}: number {number} of its {part} has no {', '.join(missing)}")
        for name, kind in kinds.items():
            if name in its and not kind.holds(its[name]):
                where = f"{ONE[part]} {shortened(its['id'])} of {file}, number {number} of its {part}"
                raise DataError(f"{where}: its {name} is {shortened(repr(its[name]))}, not {kind.allowed}")
        if its["id"] in seen:
            raise DataError(f"{file}: the id {its['id']} is there twice among its {part}")
        seen.add(its["id"])


def problems(annotation: dict[str, Any], images: dict[int, Any], categories: set[int], masks: bool) -> Iterator[str]:
    """Yield in words what is wrong with an annotation: its image, its category, its box or its mask."""
    image, box = images.get(annotation["image_id"]), annotation["bbox"]
    if image is None:
        yield f"there is no image {annotation['image_id']}"
        return
    if annotation["category_id"] not in categories:
        yield f"there is no category {annotation['category_id']}; known: {shortened(sorted(categories))}"
    if box[2] < 0 or box[3] < 0:
        yield f"its box {box} has a negative side"
    if masks:
        yield from mask_problems(annotation.get("segmentation"), image["height"], image["width"])
