"""Generated shapes: discs, rectangles and triangles on noise, with boxes and masks, for a first detector in minutes."""

import math
from typing import Any

import numpy as np
from PIL import Image, ImageDraw

from .coco import Objects
from .seeds import mixed

NAMES = ("disc", "rectangle", "triangle")
HEIGHTS, WIDTHS = (80, 112), (96, 128)
LEAST, LARGEST, MOST = 16, 44, 4
"""the least and the largest size of a shape in pixels, and the most shapes in an image"""


def shapes(count: int, training: bool, masks: bool) -> Objects:
    """Return ``count`` images, always the same ones; those to train with are others than those to test with."""
    content: dict[str, Any] = {"images": [], "annotations": []}
    content["categories"] = [{"id": number, "name": name} for number, name in enumerate(NAMES, 1)]
    for number in range(count):
        generator = generator_of(number, training)
        height, width = (int(generator.integers(*sides)) for sides in (HEIGHTS, WIDTHS))
        found = placed(generator, height, width)
        image = {"id": number, "file_name": f"shape {number}", "height": height, "width": width, "train": training}
        content["images"].append({**image, "polygons": [polygon.flatten().tolist() for _, polygon in found]})
        for kind, polygon in found:
            content["annotations"].append(annotated(len(content["annotations"]) + 1, number, kind, polygon))
    return Objects(content, "shapes", picture, training, masks)


def generator_of(number: int, training: bool) -> np.random.Generator:
    return np.random.default_rng(mixed(number, int(training)))


def placed(generator: np.random.Generator, height: int, width: int) -> list[tuple[int, np.ndarray[Any, Any]]]:
    """Return the classes and corners of random shapes that don't touch."""
    found: list[tuple[int, np.ndarray[Any, Any]]] = []
    boxes: list[tuple[float, ...]] = []
    for _ in range(int(generator.integers(1, MOST + 1))):
        size = generator.uniform(LEAST, LARGEST)
        x, y = generator.uniform(0, width - size), generator.uniform(0, height - size)
        box = (x - 2, y - 2, x + size + 2, y + size + 2)
        if any(box[0] < b[2] and b[0] < box[2] and box[1] < b[3] and b[1] < box[3] for b in boxes):
            continue
        kind = int(generator.integers(len(NAMES)))
        boxes.append(box)
        found.append((kind + 1, np.array([x, y]) + size * corners(kind, generator)))
    return found


def corners(kind: int, generator: np.random.Generator) -> np.ndarray[Any, Any]:
    """Return the corners ``[points, 2]`` of a shape in the unit square."""
    if NAMES[kind] == "disc":
        angles = np.arange(24) * (2 * math.pi / 24)
        return 0.5 + 0.5 * np.stack([np.cos(angles), np.sin(angles)], 1)
    if NAMES[kind] == "rectangle":
        side = generator.uniform(0.5, 1)
        return np.array([[0, 0], [1, 0], [1, side], [0, side]])
    tip = generator.uniform(0.2, 0.8)
    return np.array([[0, 1], [1, 1], [tip, 0]])


def annotated(number: int, image: int, kind: int, polygon: np.ndarray[Any, Any]) -> dict[str, Any]:
    (x0, y0), (x1, y1) = polygon.min(0).tolist(), polygon.max(0).tolist()
    shifted = np.roll(polygon, -1, 0)
    area = abs(float((polygon[:, 0] * shifted[:, 1] - polygon[:, 1] * shifted[:, 0]).sum())) / 2
    about = {"id": number, "image_id": image, "category_id": kind, "iscrowd": 0, "area": area}
    return {**about, "bbox": [x0, y0, x1 - x0, y1 - y0], "segmentation": [polygon.flatten().tolist()]}


def picture(record: dict[str, Any]) -> Image.Image:
    """Draw the shapes of an image in random colours, on another colour, and add noise."""
    generator = generator_of(record["id"], record["train"])
    colours = generator.integers(0, 256, (1 + MOST, 3))
    image = Image.new("RGB", (record["width"], record["height"]), tuple(colours[0].tolist()))
    draw = ImageDraw.Draw(image)
    for drawn, polygon in zip(colours[1:], record["polygons"], strict=False):
        near = abs(drawn - colours[0]).sum() < 150  # it would hardly be seen
        colour = (drawn + 128) % 256 if near else drawn
        draw.polygon(polygon, fill=tuple(colour.tolist()))
    noise = generator.normal(0, 12, (record["height"], record["width"], 3))
    return Image.fromarray((np.asarray(image) + noise).clip(0, 255).astype(np.uint8))
