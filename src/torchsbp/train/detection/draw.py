"""Objects drawn into pictures: masks as a tint, boxes, classes and scores."""

import io
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from PIL import Image, ImageDraw

from ..data.masks import tools

COLOURS = ((0, 114, 178), (213, 94, 0), (0, 158, 115), (204, 121, 167), (181, 137, 0), (75, 159, 213), (122, 81, 149))
LEAST = 0.5
"""the least score of an object that is drawn"""
WIDTH, COLUMNS = 400, 3
"""of a board: the width of a picture in pixels, and how many stand side by side"""


def drawn(picture: Image.Image, objects: Sequence[dict[str, Any]], names: Mapping[int, str]) -> Image.Image:
    """Return the picture with objects drawn into it, which are given in COCO's format of results."""
    objects = [its for its in objects if its["score"] >= LEAST]
    pixels = np.array(picture.convert("RGB"))
    colours = [COLOURS[its["category_id"] % len(COLOURS)] for its in objects]
    for its, colour in zip(objects, colours, strict=True):
        if "segmentation" in its:
            inside = np.asarray(tools().mask.decode(its["segmentation"])).astype(bool)
            pixels[inside] = (0.5 * pixels[inside] + 0.5 * np.array(colour)).astype(np.uint8)
    result = Image.fromarray(pixels)
    draw = ImageDraw.Draw(result)
    for its, colour in zip(objects, colours, strict=True):
        x, y, width, height = its["bbox"]
        draw.rectangle((x, y, x + width, y + height), outline=colour, width=max(1, max(result.size) // 320))
        label(draw, result.size, (x + 1, y - 11), f"{names[its['category_id']]} {its['score']:.2f}", colour)
    return result


def label(
    draw: ImageDraw.ImageDraw,
    size: tuple[int, int],
    corner: tuple[float, float],
    text: str,
    colour: tuple[int, int, int],
) -> None:
    """Write white text on a colour, moved into the picture; a longer text begins at the picture's left edge."""
    right, bottom = draw.textbbox((0, 0), text)[2:]
    x, y = max(0, min(corner[0], size[0] - 1 - right)), max(0, min(corner[1], size[1] - 1 - bottom))
    draw.rectangle(draw.textbbox((x, y), text), fill=colour)
    draw.text((x, y), text, fill=(255, 255, 255))


def board(pictures: Sequence[Image.Image]) -> bytes:
    """Return a PNG of pictures side by side, resized to one width."""
    scaled = [its.resize((WIDTH, max(1, round(its.height * WIDTH / its.width)))) for its in pictures]
    rows = [scaled[start : start + COLUMNS] for start in range(0, len(scaled), COLUMNS)]
    heights = [max(its.height for its in row) for row in rows]
    result = Image.new("RGB", (WIDTH * min(COLUMNS, len(scaled)), sum(heights)), (255, 255, 255))
    for number, row in enumerate(rows):
        for column, its in enumerate(row):
            result.paste(its, (column * WIDTH, sum(heights[:number])))
    file = io.BytesIO()
    result.save(file, "PNG")
    return file.getvalue()
