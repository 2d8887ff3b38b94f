"""``torchsbp predict RUN FILE|FOLDER… [options]``: write what a trained model finds in files, as CSV, JSON, a page."""

import argparse
import csv
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import RunError, UsageError
from .arguments import positive
from .trained import Opened, opened, parser

if TYPE_CHECKING:
    from ..report.gallery import Card
    from ..train.predictor import Prediction, Predictor

PURPOSE = "what a trained model finds in images or videos"


def run(argv: list[str]) -> None:
    own, overrides = arguments().parse_known_args(argv)
    with opened(own, "predict", overrides) as its:
        if its.processes.world > 1:
            raise UsageError("predict runs in one process: start it without torchrun")
        predictor = its.task.predictor()
        paths = files(own.inputs, predictor.suffixes)
        results = list(predictions(predictor, its, paths, own.batch))
    found = [(str(path), result) for path, result in results if not isinstance(result, str)]
    unread = [result for _, result in results if isinstance(result, str)]
    write(predictor, found, unread, own)
    print(f"{len(found)} predictions: {', '.join(str(own.out / name) for name in WRITTEN)}")
    if unread:
        raise RunError("\n".join([f"{len(unread)} of {len(paths)} files can't be read:", *unread]))


def arguments() -> argparse.ArgumentParser:
    result = parser("predict", "Predict with trained weights; no data of the run are needed.")
    result.add_argument("inputs", nargs="+", type=Path, metavar="FILE|FOLDER", help="files, and folders of them")
    result.add_argument("--out", type=Path, default=Path("predictions"), help="a folder (default: %(default)s)")
    result.add_argument("--batch", type=positive, default=32, help="files per forward (default: %(default)s)")
    result.add_argument(
        "--pictures", type=positive, default=200, help="how many the page shows at most (default: %(default)s)"
    )
    return result


def files(inputs: Sequence[Path], suffixes: Sequence[str]) -> list[Path]:
    """The files that are named, and those in folders, at any depth; each once."""
    found: dict[Path, None] = {}
    for path in inputs:
        if path.is_dir():
            within = [its for its in sorted(path.rglob("*")) if its.suffix.lower() in suffixes and its.is_file()]
            if not within:
                raise UsageError(f"no files to predict in {path}; known: {', '.join(suffixes)}")
            found |= dict.fromkeys(within)
        elif path.is_file():
            found[path] = None
        else:
            raise UsageError(f"no file or folder {path}")
    return list(found)


Result = tuple[Path, "Prediction | str"]
"""what was found in a file, or why it can't be read"""


def predictions(predictor: "Predictor", its: Opened, paths: list[Path], batch: int) -> Iterator[Result]:
    import torch

    from ..train.data.loader import reader
    from ..train.evaluation import autocast

    for part in reader(Inputs(predictor, paths), batch, its.task.workers):
        good = [found for _, found, error in part if error is None]
        with torch.no_grad(), autocast(its.config, its.processes.device):
            told = iter(predictor.predict(its.model, good) if good else [])
        for path, _, error in part:
            yield path, next(told) if error is None else error


class Inputs:
    """A dataset of files: (path, input, None), or (path, None, why it can't be read)."""

    def __init__(self, predictor: "Predictor", paths: list[Path]) -> None:
        self.predictor, self.paths = predictor, paths

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> tuple[Path, Any, str | None]:
        path = self.paths[index]
        try:
            return path, self.predictor.read(path), None
        except Exception as error:  # whatever a decoder raises
            return path, None, f"{path}: {error}"


WRITTEN = ("predictions.csv", "predictions.json", "predictions.html")


def write(predictor: "Predictor", found: list[tuple[str, "Prediction"]], unread: list[str], own: Any) -> None:
    """Write the table, the JSON file and the page, with its pictures, into the folder."""
    from ..report.gallery import gallery

    own.out.mkdir(parents=True, exist_ok=True)
    table, document, page = (own.out / name for name in WRITTEN)
    with table.open("w", newline="", encoding="utf-8") as file:
        lines = csv.writer(file)
        lines.writerow(("file", *predictor.columns))
        lines.writerows((name, *row) for name, prediction in found for row in prediction.rows)
    records = predictor.document([name for name, _ in found], [prediction.record for _, prediction in found])
    document.write_text(json.dumps(records, indent=1), encoding="utf-8")
    page.write_text(gallery(cards(predictor, found, own), len(found), unread), encoding="utf-8")


def cards(predictor: "Predictor", found: list[tuple[str, "Prediction"]], own: Any) -> list["Card"]:
    """The cards of the page. Pictures that the predictor draws into are also written, in full size."""
    from ..report.gallery import Card, small

    result = []
    for number, (name, prediction) in enumerate(found if predictor.draws else found[: own.pictures]):
        picture = predictor.picture(Path(name), prediction)
        if predictor.draws:
            target = own.out / "pictures" / f"{number:06d}_{Path(name).stem}.jpg"
            target.parent.mkdir(exist_ok=True)
            picture.save(target, quality=90)
        if number < own.pictures:
            result.append(Card(small(picture), name, prediction.caption))
    return result
