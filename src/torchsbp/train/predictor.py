"""Prediction: what a task defines for ``torchsbp predict``, which reads files and writes what a model finds in them."""

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
    """What a model predicts for one input."""

    rows: Sequence[tuple[Any, ...]]
    """lines of the CSV file (none, one or many), with a cell for each of ``Predictor.columns``"""
    record: dict[str, Any]
    """entry of the JSON file, made of plain values"""
    caption: str
    """plain text to be shown below the picture"""


class Predictor:
    """Reads inputs without targets and says what a model finds in them. The command finds the files, makes batches and
    writes the results."""

    suffixes: Sequence[str] = PICTURES
    """which files are taken from a folder; a file that the user names is taken anyway"""
    columns: tuple[str, ...]
    """columns of the CSV file, after that of the file's name"""
    draws: bool = False
    """whether ``picture`` draws predictions into the picture: then each is also saved as a file"""

    def read(self, path: Path) -> Any:
        """Read a file as one input. Whatever this raises is reported as the reason why the file can't be read. May be
        called in a worker process."""
        raise NotImplementedError

    def predict(self, model: nn.Module, inputs: list[Any]) -> list[Prediction]:
        """A prediction for each input. The model is in eval mode, on the task's device; gradients are off, autocast is
        that of the run."""
        raise NotImplementedError

    def document(self, files: Sequence[str], records: Sequence[dict[str, Any]]) -> Any:
        """The content of the JSON file; ``files`` are the names of the inputs, as in the CSV file."""
        return [{"file": file, **record} for file, record in zip(files, records, strict=True)]

    def picture(self, path: Path, prediction: Prediction) -> Image.Image:
        """The picture to be shown. If ``draws`` it is called for all inputs, otherwise for those on the page."""
        with path.open("rb") as file:
            return read_picture(file, "RGB")
