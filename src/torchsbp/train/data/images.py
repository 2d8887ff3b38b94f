"""Sources of labelled images: folders, tar shards, CIFAR files, scikit-learn's digits."""

import io
import json
import tarfile
from collections.abc import Sequence
from contextlib import suppress
from glob import glob
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from PIL import Image

from ...errors import DataError
from .pictures import as_mode, read_picture
from .samples import Source
from .seeds import mixed


class Labelled(Protocol):
    """Data with classes."""

    classes: int
    names: list[str]
    """names of the classes; empty if unknown"""


class Images(Source, Labelled, Protocol):
    """A source of pictures; the target is the number of the class."""

    labels: Sequence[int]
    """the targets"""

    def key(self, index: int) -> str:
        """Return a name of the picture that stays the same when data are added or moved elsewhere."""
        ...


def named(names: Sequence[str], most: int = 5) -> str:
    """Return the first ``most`` names, for a message."""
    shown = ", ".join(names[:most])
    return f"{shown} and {len(names) - most} more" if len(names) > most else shown or "none"


def check_same_classes(train: Labelled, valid: Labelled) -> None:
    only_train = [name for name in train.names if name not in set(valid.names)]
    only_valid = [name for name in valid.names if name not in set(train.names)]
    if train.classes == valid.classes and not only_train and not only_valid:
        return
    raise DataError(
        f"training data have {train.classes} classes and validation data {valid.classes}; only in training: "
        f"{named(only_train)}; only in validation: {named(only_valid)}: both need the same class folders"
    )


class Folder:
    """``root/class/…/image``, torchvision's ImageFolder layout."""

    def __init__(self, root: Path, mode: str) -> None:
        from torchvision.datasets import ImageFolder

        try:
            folder = ImageFolder(str(root))
        except FileNotFoundError as error:
            raise DataError(f"no image folder at {root} (expected {root}/CLASS/IMAGE): {error}") from error
        self.root, self.names = root, list(folder.classes)
        self.samples: list[tuple[str, int]] = folder.samples
        self.labels: list[int] = folder.targets
        self.classes, self.mode = len(self.names), mode

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[Image.Image, int]:
        path, label = self.samples[index]
        with open(path, "rb") as file:
            return read_picture(file, self.mode), label

    def where(self, index: int) -> str:
        return f"image {self.samples[index][0]}"

    def key(self, index: int) -> str:
        return Path(self.samples[index][0]).relative_to(self.root).as_posix()


class Arrays:
    """Images in memory, ``[N, H, W]`` or ``[N, H, W, 3]`` uint8."""

    def __init__(
        self,
        name: str,
        images: np.ndarray,
        labels: Sequence[int],
        classes: int,
        mode: str,
        names: Sequence[str] = (),
    ) -> None:
        self.name, self.images, self.labels, self.classes, self.mode = name, images, labels, classes, mode
        self.names = list(names)

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Image.Image, int]:
        return as_mode(Image.fromarray(self.images[index]), self.mode), int(self.labels[index])

    def where(self, index: int) -> str:
        return f"{self.name} image {index}"

    def key(self, index: int) -> str:
        return str(index)


class Shards:
    """WebDataset tar files, read by position instead of as a stream: this allows any order, and exact resumption.

    A sample consists of the members that share a name up to its first dot: an image (``.jpg``, ``.png``, …) and its
    class number (``.cls``). The positions of members are found once per shard and saved beside it in
    ``SHARD.index.json``, if that can be written.
    """

    PICTURES = ("jpg", "jpeg", "png", "webp", "ppm")

    def __init__(self, pattern: str, classes: int, mode: str) -> None:
        self.shards = sorted(glob(pattern))
        if not self.shards:
            raise DataError(f"no shards match {pattern}")
        self.classes, self.mode = classes, mode
        self.names: list[str] = []
        found = [(shard, *sample) for shard, path in enumerate(self.shards) for sample in index_shard(Path(path))]
        self.table = np.array(found, dtype=np.int64).reshape(-1, 4)  # shard, offset, size, label
        wrong = self.table[(self.table[:, 3] < 0) | (self.table[:, 3] >= classes), 3]
        if len(wrong):
            raise DataError(f"{pattern} has class {wrong[0]}, but data.classes is {classes}")
        self.labels: list[int] = self.table[:, 3].tolist()

    def __len__(self) -> int:
        return len(self.table)

    def __getitem__(self, index: int) -> tuple[Image.Image, int]:
        shard, offset, size, label = self.table[index].tolist()
        with open(self.shards[shard], "rb") as file:
            file.seek(offset)
            return read_picture(io.BytesIO(file.read(size)), self.mode), label

    def where(self, index: int) -> str:
        shard, offset, *_ = self.table[index].tolist()
        return f"image at byte {offset} of {self.shards[shard]}"

    def key(self, index: int) -> str:
        shard, offset, *_ = self.table[index].tolist()
        return f"{Path(self.shards[shard]).name}:{offset}"


def index_shard(path: Path) -> list[list[int]]:
    """Return [offset, size, label] of every sample of a tar file, from its index if that is up to date."""
    cache = path.with_name(path.name + ".index.json")
    stamp = [path.stat().st_size, path.stat().st_mtime_ns]
    try:
        saved = json.loads(cache.read_text())
        if saved["stamp"] == stamp:
            return saved["samples"]
    except (OSError, ValueError, KeyError):
        pass  # no index yet, or one whose writer was stopped
    images: dict[str, tuple[int, int]] = {}
    labels: dict[str, int] = {}
    try:
        with tarfile.open(path) as tar:
            for member in tar:
                folder, slash, name = member.name.rpartition("/")
                stem, _, kind = name.partition(".")
                key = folder + slash + stem
                if kind.lower() in Shards.PICTURES:
                    images[key] = member.offset_data, member.size
                elif kind == "cls":
                    content = tar.extractfile(member)
                    assert content is not None
                    labels[key] = int(content.read())
    except (tarfile.TarError, ValueError, EOFError) as error:
        raise DataError(f"shard {path} can't be read: {error}") from error
    if not images or set(images) != set(labels):
        raise DataError(f"shard {path} has {len(images)} images and {len(labels)} .cls files; each image needs its own")
    samples = [[*images[key], labels[key]] for key in images]
    with suppress(OSError):  # a read-only place: indexed again next time
        cache.write_text(json.dumps({"stamp": stamp, "samples": samples}))
    return samples


def cifar(name: str, root: Path, train: bool, mode: str) -> Images:
    """Read CIFAR with torchvision from files that are already there: ``root/cifar-10-batches-py``."""
    from torchvision import datasets

    reader = {"cifar10": datasets.CIFAR10, "cifar100": datasets.CIFAR100}[name]
    try:
        data = reader(str(root), train=train, download=False)
    except RuntimeError as error:
        raise DataError(
            f"no complete {name} in {root}: files in {root / reader.base_folder} are missing or corrupted; unpack "
            f"{reader.url} in {root}, or set task.data.root to where it is"
        ) from error
    return Arrays(name, data.data, data.targets, len(data.classes), mode, data.classes)


def digits(train: bool, mode: str) -> Images:
    """scikit-learn's 1797 handwritten digits, enlarged from 8 × 8 to 32 × 32: 1400 to train, the others to test."""
    from sklearn.datasets import load_digits

    data = load_digits()
    images = torch.from_numpy(data.images).float()[:, None]
    images = torch.nn.functional.interpolate(images, (32, 32), mode="bilinear")
    pixels = (images[:, 0] * (255 / 16)).round().to(torch.uint8).numpy()
    order = torch.randperm(len(pixels), generator=torch.Generator().manual_seed(mixed(0))).numpy()
    part = order[:1400] if train else order[1400:]
    return Arrays("digits", pixels[part], data.target[part].tolist(), 10, mode, "0123456789")


def open_images(source: str, root: Path, part: str, train: bool, classes: int | None, mode: str) -> Images:
    images: Any
    if source == "digits":
        images = digits(train, mode)
    elif source in ("cifar10", "cifar100"):
        images = cifar(source, root, train, mode)
    elif source == "shards":
        if classes is None:
            raise DataError("shards don't say how many classes there are: set task.data.classes")
        images = Shards(str(root / part), classes, mode)
    else:
        images = Folder(root / part, mode)
    if classes is not None and images.classes != classes:
        raise DataError(
            f"{source} at {root / part} has {images.classes} classes, but task.data.classes is {classes}; found: "
            f"{named(images.names)}"
        )
    return images
