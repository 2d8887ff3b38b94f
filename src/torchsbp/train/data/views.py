"""Labelled images as a model sees them: options of the data, and timm's augmentation."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from PIL import Image
from timm.data import create_transform
from torchvision.transforms import RandomCrop

from ...errors import UsageError
from ..ranges import COUNT, NOT_NEGATIVE, SHARE, SHARE_ABOVE_0, SHARE_BELOW_1, WORKERS, refuse
from .images import Images, open_images
from .split import split


@dataclass
class Data:
    """Labelled images, to train with and to evaluate with."""

    source: Literal["folder", "shards", "cifar10", "cifar100", "digits"] = "folder"
    root: Path = Path("data")
    train: str = "train"
    """the folder, or the shards' pattern (*.tar), below root"""
    valid: str = "val"
    split: float = field(default=0.0, metadata=SHARE_BELOW_1)
    """validate with this share of every class of the training images, instead of valid"""
    split_seed: int = field(default=0, metadata=NOT_NEGATIVE)
    """decides which images those are; not the run's seed, so that runs of several seeds validate with the same"""
    classes: int | None = field(default=None, metadata=COUNT)
    """needed for shards; otherwise checked if given"""
    size: int = field(default=224, metadata=COUNT)
    channels: Literal[1, 3] = 3
    mean: list[float] = field(default_factory=lambda: [0.485, 0.456, 0.406], metadata=SHARE)
    """mean of pixels in [0, 1]"""
    std: list[float] = field(default_factory=lambda: [0.229, 0.224, 0.225], metadata=SHARE_ABOVE_0)
    crop_pct: float = field(default=0.875, metadata=SHARE_ABOVE_0)
    """evaluation: the share of the resized image that is cropped"""
    workers: int = field(default=8, metadata=WORKERS)
    """processes that read images, for each process that trains"""
    broken: int = field(default=0, metadata=NOT_NEGATIVE)
    """how many images may be unreadable: training puts another in the place of one, validation leaves it out"""

    def __post_init__(self) -> None:
        if not len(self.mean) == len(self.std) == self.channels:
            raise UsageError(f"mean {self.mean} and std {self.std} need one number per channel, {self.channels}")


@dataclass
class Augment:
    """timm's ``create_transform``, ``Mixup`` and ``RandomErasing``."""

    crop: Literal["resized", "pad", "none"] = "resized"
    """resized: random size and aspect; pad: shift by an eighth; none: as in evaluation, and no flip"""
    scale: tuple[float, float] = field(default=(0.08, 1.0), metadata=SHARE_ABOVE_0)
    """resized: the least and the largest share of the image that is cropped"""
    hflip: float = field(default=0.5, metadata=SHARE)
    auto_augment: str | None = None
    color_jitter: float = field(default=0.4, metadata=NOT_NEGATIVE)
    """used without auto_augment"""
    interpolation: str = "bicubic"
    erase: float = field(default=0.0, metadata=SHARE)
    mixup: float = field(default=0.0, metadata=NOT_NEGATIVE)
    cutmix: float = field(default=0.0, metadata=NOT_NEGATIVE)
    smoothing: float = field(default=0.0, metadata=SHARE_BELOW_1)

    def __post_init__(self) -> None:
        if self.scale[0] > self.scale[1]:
            refuse("task.augment.scale", list(self.scale), "two numbers in (0, 1], the first not above the second")


def mode_of(data: Data) -> str:
    """Return Pillow's mode of the images that the model sees."""
    return "L" if data.channels == 1 else "RGB"


def open_part(data: Data, train: bool) -> Images:
    """Open the images to train with, or those to validate with."""
    if data.split:
        whole = open_images(data.source, data.root, data.train, True, data.classes, mode_of(data))
        return split(whole, data.split, data.split_seed)[0 if train else 1]
    part = data.train if train else data.valid
    return open_images(data.source, data.root, part, train, data.classes, mode_of(data))


def check_names(augment: Augment) -> None:
    """Refuse names of interpolation and augmentation that timm does not know."""
    allowed = ("random", *(mode.name.lower() for mode in Image.Resampling))
    if augment.interpolation not in allowed:
        refuse("task.augment.interpolation", augment.interpolation, ", ".join(allowed))
    if augment.auto_augment is not None:
        try:
            train_transform(Data(), augment)
        except Exception as error:  # timm's assertions, among others
            forms = "null, rand-m9-mstd0.5-inc1 and the like, original, originalr, v0, v0r, 3a, augmix-m3 and the like"
            refuse("task.augment.auto_augment", augment.auto_augment, f"{forms} ({error})")


def train_transform(data: Data, augment: Augment) -> Callable[[Any], Any]:
    """Return the transform up to uint8 pixels; the rest is done on the device, a batch at a time."""
    if augment.crop == "none":
        return eval_transform(data, augment)
    transform = create_transform(
        data.size,
        is_training=True,
        scale=augment.scale,
        hflip=augment.hflip,
        color_jitter=augment.color_jitter or None,  # type: ignore[arg-type]
        auto_augment=augment.auto_augment,
        interpolation=augment.interpolation,
        mean=tuple(data.mean),
        std=tuple(data.std),
        use_prefetcher=True,
    )
    if augment.crop == "pad":
        transform.transforms[0] = RandomCrop(data.size, padding=data.size // 8)
    for op in (op for step in transform.transforms for op in getattr(step, "ops", ())):
        if op.name == "PosterizeIncreasing":
            op.level_fn = at_least_one_bit
    return transform


def at_least_one_bit(level: float, hparams: dict[str, Any]) -> tuple[int]:
    """Return how many bits posterizing leaves: as in timm, but not 0 at the highest level, which Pillow 13 refuses."""
    return (max(1, 4 - int(level / 10 * 4)),)


def eval_transform(data: Data, augment: Augment) -> Callable[[Any], Any]:
    return create_transform(data.size, crop_pct=data.crop_pct, interpolation=augment.interpolation, use_prefetcher=True)
