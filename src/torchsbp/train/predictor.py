"""Predicting: what a task brings so that ``torchsbp predict`` can read its inputs and write what it finds in them."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image
from torch import nn

from .data.pictures import read_picture

PICTURES = (".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp")


@dataclass(frozen=True)
class Prediction:
    """What a model says of one input."""

    rows: Sequence[tuple[Any, ...]]
    """its lines of the CSV file, as ``Predictor.columns`` names their cells: none, one or many"""
    record: dict[str, Any]
    """for the JSON file: plain values"""
    caption: str
    """below its picture: plain text"""


class Predictor:
    """Reads inputs without targets and says what a model finds in them. Files, batches and pages are the command's."""

    suffixes: Sequence[str] = PICTURES
    """of the files that are taken from a folder; a file that is named is taken anyway"""
    columns: tuple[str, ...]
    """of the CSV file, after the file's name"""
    draws: bool = False
    """``picture`` draws into pictures, so that each is worth a file of its own"""

    def read(self, path: Path) -> Any:
        """A file as one input. What this raises is why the file can't be read. May be called in another process."""
        raise NotImplementedError

    def predict(self, model: nn.Module, inputs: list[Any]) -> list[Prediction]:
        """One for each input. The model is in eval mode, on the task's device; gradients are off, autocast is on."""
        raise NotImplementedError

    def document(self, files: Sequence[str], records: Sequence[dict[str, Any]]) -> Any:
        """The JSON file; ``files`` are the names by which the CSV file calls the inputs."""
        return [{"file": file, **record} for file, record in zip(files, records, strict=True)]

    def picture(self, path: Path, prediction: Prediction) -> Image.Image:
        """To be shown. Called for those that are shown only."""
        with path.open("rb") as file:
            return read_picture(file, "RGB")
