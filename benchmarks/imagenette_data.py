"""Unpack images of Imagenette from a packed file, into folders of classes that ``torchsbp train`` reads.

    python benchmarks/imagenette_data.py imagenette128_7k_avif.npz data              # data/{train,val}/CLASS/*.ppm
    python benchmarks/imagenette_data.py imagenette128_7k_avif.npz imagenette.npz    # arrays, for ``torchsbp study``

The file is not part of the project. It has 5000 and 2000 images of 128² from Imagenette's own parts, 25 in each AVIF
picture (Pillow 11.3 reads them). They are written uncompressed, 0.34 GB, since they are read again in every epoch.
"""

import argparse
import io
import json
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image


def tiles(packed: bytes, size: int) -> np.ndarray:
    """The images of a picture, ``[images, size, size, 3]``, row by row."""
    picture = np.asarray(Image.open(io.BytesIO(packed)).convert("RGB"))
    rows, columns = picture.shape[0] // size, picture.shape[1] // size
    return picture.reshape(rows, size, columns, size, 3).swapaxes(1, 2).reshape(-1, size, size, 3)


def unpack(size: int, packed: bytes, files: Sequence[Path]) -> None:
    for image, file in zip(tiles(packed, size), files, strict=True):
        Image.fromarray(image).save(file)


def write(out: Path, pictures: Sequence[bytes], labels: Sequence[int], about: dict[str, Any], jobs: int) -> None:
    """Write one part; ``labels`` are those of its images."""
    folders = [out / name.replace(" ", "_") for name in about["classes"]]
    for folder in folders:
        folder.mkdir(parents=True, exist_ok=True)
    files = [folders[label] / f"{number:04}.ppm" for number, label in enumerate(labels)]
    each = about["per_mosaic"]
    with ProcessPoolExecutor(jobs) as pool:
        of_picture = (files[begin : begin + each] for begin in range(0, len(files), each))
        list(pool.map(partial(unpack, about["tile"]), pictures, of_picture))
    print(f"{out.name}: {len(files)} images", flush=True)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--pictures", type=int, help="the first ones of each part only, of 25 images each")
    parser.add_argument("--jobs", type=int, default=1, help="processes that decode")
    args = parser.parse_args(argv)
    packed = np.load(args.file)
    about, arrays = json.loads(str(packed["meta"])), dict[str, np.ndarray]()
    for part in ("train", "val"):
        blob, edges = packed[f"{part}_blob"], packed[f"{part}_off"]
        pictures = [blob[begin:end].tobytes() for begin, end in pairwise(edges)][: args.pictures]
        labels = packed[f"{part}_y"][: len(pictures) * about["per_mosaic"]].tolist()
        if args.out.suffix == ".npz":
            name = {"train": "train", "val": "test"}[part]
            arrays[f"x_{name}"] = np.concatenate([tiles(picture, about["tile"]) for picture in pictures])
            arrays[f"y_{name}"] = np.asarray(labels, np.uint8)
        else:
            write(args.out / part, pictures, labels, about, args.jobs)
    if arrays:
        np.savez(args.out, **arrays)
        print(f"{args.out}: {len(arrays['y_train'])} images to train on, {len(arrays['y_test'])} to test on")


if __name__ == "__main__":
    main()
