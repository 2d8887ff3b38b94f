"""Reads any picture as models want it: 8 bits, grey or RGB, upright. Those that can't be converted are refused.

- 16 bits per grey value (PNG, PGM, TIFF): rescaled, v · 255 / 65535
- 32-bit integers and floating point numbers: refused, since their white is unknown
- transparent, by alpha, palette or key colour: put on white
- rotated by EXIF: turned upright
- animated, or of several pages: the first picture is read
- CMYK, YCbCr, palette, black and white: converted
- more pixels than Pillow's limit, which guards against files that unpack to fill the memory: refused
"""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np
from PIL import Image, UnidentifiedImageError

FRAMES = (".jpeg", ".jpg", ".png")
"""suffixes of pictures that are frames of a video"""
ORIENTATION = 0x0112
TURNED = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
"""EXIF's orientations, and what undoes them"""
WHITE_16 = 65535
WITH_ALPHA = ("LA", "La", "PA", "RGBA", "RGBa")


def frames_in(folder: Path) -> list[Path]:
    """Return the pictures in a folder, in the order of the numbers in their names: 2.jpg is before 10.jpg."""
    return sorted((its for its in folder.glob("*") if its.suffix.lower() in FRAMES), key=place)


def place(path: Path) -> tuple[Sequence[str | int], str]:
    """Return the key to sort by: texts and numbers of the name, by turns; the name itself decides between 01 and 1."""
    parts = re.split(r"(\d+)", path.stem)
    return [int(part) if number % 2 else part for number, part in enumerate(parts)], path.name


def read_picture(file: IO[bytes], mode: str) -> Image.Image:
    """Read the picture in a file, as ``mode`` ("L" or "RGB")."""
    try:
        image = Image.open(file)
    except Image.DecompressionBombError as error:
        limit = 2 * (Image.MAX_IMAGE_PIXELS or 0)
        raise ValueError(f"it unpacks to more than {limit:,} pixels; make it smaller, or leave it out") from error
    except UnidentifiedImageError as error:  # whose text names the open file as Python does
        raise ValueError("it is no picture of a format that Pillow knows") from error
    return as_mode(upright(image), mode)


def upright(image: Image.Image) -> Image.Image:
    try:
        turned = TURNED.get(image.getexif().get(ORIENTATION, 1))
    except Exception:  # Pillow's reader of EXIF raises many things; the pixels don't depend on it
        turned = None
    return image if turned is None else image.transpose(turned)


def as_mode(image: Image.Image, mode: str) -> Image.Image:
    """Convert to 8 bits without alpha; raise ``ValueError`` if it is unknown what white is."""
    if image.mode.startswith("I;16") or (image.mode == "I" and image.format in ("PNG", "PPM")):
        return from_16_bits(image).convert(mode)
    if image.mode in ("I", "F"):
        bits = "32-bit integers" if image.mode == "I" else "floating point numbers"
        raise ValueError(f"its pixels are {bits}, whose white is unknown; convert it to 8 or 16 bits")
    if image.mode in WITH_ALPHA or "transparency" in image.info:
        image = on_white(image)
    return image.convert(mode)


def from_16_bits(image: Image.Image) -> Image.Image:
    values: np.ndarray[Any, Any] = np.asarray(image).astype(np.uint32)
    return Image.fromarray(((values * 255 + WHITE_16 // 2) // WHITE_16).astype(np.uint8))


def on_white(image: Image.Image) -> Image.Image:
    layered = image.convert("RGBA")
    return Image.alpha_composite(Image.new("RGBA", layered.size, (255, 255, 255, 255)), layered).convert("RGB")
