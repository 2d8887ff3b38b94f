"""From pictures with objects to padded batches: transforms, and padding to few different sizes."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from PIL import Image
from torch import Tensor
from torchvision import tv_tensors
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional as V

from ...errors import DataError
from ..data.order import TrainOrder
from ..data.seeds import mixed

Sample = dict[str, Any]


class Batch(NamedTuple):
    """Padded ``images [B, 3, H, W]``, their ``sizes [B, 2]`` without padding, and targets; ``indices`` are those of the
    source, ``originals`` the pictures' sizes there."""

    images: Tensor
    sizes: Tensor
    targets: list[dict[str, Tensor]]
    indices: list[int]
    originals: list[tuple[int, int]]


class Prepared:
    """Turns a picture and its objects into tensors, and applies transforms of torchvision's v2."""

    def __init__(self, *transforms: Any) -> None:
        self.transform = v2.Compose(transforms)

    def __call__(self, picture: Image.Image, target: Sample) -> Sample:
        sample: Sample = {
            "image": tv_tensors.Image(V.pil_to_tensor(picture)),
            "labels": torch.from_numpy(target["labels"]),
        }
        sample["boxes"] = tv_tensors.BoundingBoxes(
            torch.from_numpy(target["boxes"]), format="XYXY", canvas_size=sample["image"].shape[-2:]
        )
        if "masks" in target:
            sample["masks"] = tv_tensors.Mask(torch.from_numpy(target["masks"]))
        sample = self.transform(sample)
        plain = {name: value.as_subclass(Tensor) for name, value in sample.items()}
        return {**plain, "index": target["index"], "size": target["size"]}


class ShortestSize(v2.RandomShortestSize):
    """torchvision's ``RandomShortestSize``, which refuses pictures that are too thin for it."""

    def make_params(self, flat_inputs: list[Any]) -> dict[str, Any]:
        height, width = V.get_size(flat_inputs[0])
        check_shape(height, width, self.max_size)
        return super().make_params(flat_inputs)


def check_shape(height: int, width: int, longest: int) -> None:
    """Raise ``DataError`` if the shorter side would vanish when the longer one is resized to ``longest``."""
    if int(min(height, width) * (longest / max(height, width))) < 1:
        raise DataError(
            f"{height} × {width} pixels are too thin: with a longer side of {longest} (task.augment.long) the shorter "
            "one would vanish; leave it out, or raise task.augment.long"
        )


class CropBetween(v2.Transform):
    """Crops to a random height and width between two numbers, as far as the image is that large."""

    def __init__(self, least: int, most: int) -> None:
        super().__init__()
        self.least, self.most = least, most

    def make_params(self, flat_inputs: list[Any]) -> dict[str, Any]:
        height, width = V.get_size(flat_inputs[0])
        sides = [draw(min(self.least, side), min(self.most, side)) for side in (height, width)]
        return {
            "top": draw(0, height - sides[0]),
            "left": draw(0, width - sides[1]),
            "height": sides[0],
            "width": sides[1],
        }

    def transform(self, inpt: Any, params: dict[str, Any]) -> Any:
        return self._call_kernel(V.crop, inpt, **params)


def draw(least: int, most: int) -> int:
    return int(torch.randint(least, most + 1, ()))


def collate(samples: Sequence[Sample], buckets: Sequence[tuple[int, int]], multiple: int) -> Batch:
    """Make a batch: pictures lie in the upper left corner, padded to one size."""
    sizes = [(its["image"].shape[1], its["image"].shape[2]) for its in samples]
    height, width = padded_size(sizes, buckets, multiple)
    images = torch.zeros(len(samples), 3, height, width, dtype=torch.uint8)
    for image, its, (h, w) in zip(images, samples, sizes, strict=True):
        image[:, :h, :w] = its["image"]
    targets: Any = [{name: its[name] for name in ("boxes", "labels", "masks") if name in its} for its in samples]
    return Batch(
        images, torch.tensor(sizes), targets, [its["index"] for its in samples], [its["size"] for its in samples]
    )


def padded_size(sizes: Sequence[tuple[int, int]], buckets: Sequence[tuple[int, int]], multiple: int) -> tuple[int, int]:
    """Return the smallest bucket, upright or on its side, that holds all; without buckets the next multiples."""
    height, width = (max(side) for side in zip(*sizes, strict=True))
    if not buckets:
        return -(-height // multiple) * multiple, -(-width // multiple) * multiple
    fitting = [(h, w) for h, w in turned(buckets) if h >= height and w >= width]
    if not fitting:
        raise DataError(f"images of {height} × {width} pixels fit none of task.data.buckets {list(buckets)}")
    return min(fitting, key=lambda its: its[0] * its[1])


def turned(buckets: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return every bucket, upright and on its side."""
    return sorted({(h, w) for its in buckets for h, w in (tuple(its), tuple(its)[::-1])})


class GroupedOrder(TrainOrder):
    """Batches of images that are all upright or all on their sides, as far as possible: this needs less padding."""

    upright: Tensor

    def permutation(self, epoch: int) -> Tensor:
        order = super().permutation(epoch)
        upright = self.upright[order]
        parts = [part.split(self.batch) for part in (order[upright], order[~upright])]
        batches = [its for part in parts for its in part if len(its) == self.batch]
        rest = [its for part in parts for its in part if len(its) < self.batch]
        mixing = torch.Generator().manual_seed(mixed(self.seed, epoch, len(batches)))
        return torch.cat([batches[i] for i in torch.randperm(len(batches), generator=mixing)] + rest)
