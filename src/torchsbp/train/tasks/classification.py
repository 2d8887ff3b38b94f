"""Image classification: a timm model, labelled images, timm's augmentation, cross entropy, top-1 and top-5."""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import timm
import torch
import torch.nn.functional as F
from PIL import Image
from timm.data import Mixup, create_transform
from timm.data.loader import fast_collate
from timm.data.random_erasing import RandomErasing
from torch import Tensor, nn
from torchvision.transforms import RandomCrop

from ...errors import DataError, UsageError
from ..accuracy import MANY, Accuracy
from ..data.images import check_same_classes, named, open_images
from ..data.samples import Samples
from ..data.seeds import generators_kept
from ..ranges import COUNT, NOT_NEGATIVE, SHARE, SHARE_ABOVE_0, SHARE_BELOW_1, ranged, refuse
from ..record import Metric
from ..runs.weights import load_weights
from ..task import Task, TaskOptions
from . import register

WORKERS = ranged(0, 1024)

Batch = tuple[Tensor, Tensor]
"""images, and class numbers or mixed targets"""


@dataclass
class Model:
    """timm's ``create_model``."""

    name: str = "vit_tiny_patch16_224"
    options: dict[str, Any] = field(default_factory=dict)
    """further arguments, such as embed_dim or ls_init_value"""
    drop_path: float = field(default=0.0, metadata=SHARE_BELOW_1)
    """stochastic depth"""
    init: dict[str, float] = field(default_factory=dict, metadata=NOT_NEGATIVE)
    """parameters to draw from a normal distribution of this standard deviation, such as {pos_embed: 1.0}"""
    pretrained: bool = False
    """timm's published weights (needs the internet)"""
    weights: Path | None = None
    """begin from these: a checkpoint of ours, or safetensors or a state dict of the same timm model"""
    new_head: bool = False
    """leave the classifier out of weights, for other classes"""


@dataclass
class Data:
    """Labelled images, to train with and to evaluate with."""

    source: Literal["folder", "shards", "cifar10", "cifar100", "digits"] = "folder"
    root: Path = Path("data")
    train: str = "train"
    """the folder, or the shards' pattern (*.tar), below root"""
    valid: str = "val"
    classes: int | None = field(default=None, metadata=COUNT)
    """needed for shards; otherwise checked if given"""
    size: int = field(default=224, metadata=COUNT)
    channels: Literal[1, 3] = 3
    mean: list[float] = field(default_factory=lambda: [0.485, 0.456, 0.406], metadata=SHARE)
    """of pixels in [0, 1]"""
    std: list[float] = field(default_factory=lambda: [0.229, 0.224, 0.225], metadata=SHARE_ABOVE_0)
    crop_pct: float = field(default=0.875, metadata=SHARE_ABOVE_0)
    """evaluation: the share of the resized image that is cropped"""
    workers: int = field(default=8, metadata=WORKERS)
    """processes that read images, for each process that trains"""

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
    """without auto_augment"""
    interpolation: str = "bicubic"
    erase: float = field(default=0.0, metadata=SHARE)
    mixup: float = field(default=0.0, metadata=NOT_NEGATIVE)
    cutmix: float = field(default=0.0, metadata=NOT_NEGATIVE)
    smoothing: float = field(default=0.0, metadata=SHARE_BELOW_1)

    def __post_init__(self) -> None:
        if self.scale[0] > self.scale[1]:
            refuse("task.augment.scale", list(self.scale), "two numbers in (0, 1], the first not above the second")


@dataclass
class ClassificationOptions(TaskOptions):
    """Classify images."""

    model: Model = field(default_factory=Model)
    data: Data = field(default_factory=Data)
    augment: Augment = field(default_factory=Augment)


@register("classification")
class Classification(Task):
    """Which class an image is of."""

    Options = ClassificationOptions
    metrics: tuple[Metric, ...] = (
        Metric("loss", "validation loss", format=".3f", higher=False, column=False),
        Metric("top1", "top-1", "%", chart="Validation accuracy"),
        Metric("top5", "top-5", "%", column=False),
    )
    best_by = "top1"
    unit = "images"
    collate = staticmethod(fast_collate)

    def __init__(self, options: ClassificationOptions, seed: int) -> None:
        data, augment = options.data, options.augment
        mode = "L" if data.channels == 1 else "RGB"
        train, valid = (
            open_images(data.source, data.root, part, part is data.train, data.classes, mode)
            for part in (data.train, data.valid)
        )
        check_same_classes(train, valid)
        check_names(augment)
        self.classes, self.names, self.workers = train.classes, train.names, data.workers
        if self.classes <= MANY:
            self.metrics = tuple(metric for metric in self.metrics if metric.name != "top5")
        self.train_data = Samples(train, OfImage(train_transform(data, augment)), seed)
        self.valid_data = Samples(valid, OfImage(eval_transform(data, augment)), seed)
        self.mix = None
        if augment.mixup > 0 or augment.cutmix > 0:
            self.mix = Mixup(
                mixup_alpha=augment.mixup,
                cutmix_alpha=augment.cutmix,
                label_smoothing=augment.smoothing,
                num_classes=self.classes,
            )
        super().__init__(options, seed)

    def check(self, micro_batch: int) -> None:
        if self.mix is not None and micro_batch % 2:
            raise UsageError(f"mixup and cutmix mix pairs: images per forward must be even, found {micro_batch}")

    def model(self, start: bool) -> nn.Module:
        config = self.options.model
        given = config.options.get("num_classes", self.classes)
        if given != self.classes:
            raise DataError(
                f"model.options.num_classes is {given}, but the data have {self.classes} classes: {named(self.names)}"
            )
        options = {"in_chans": self.options.data.channels, "drop_path_rate": config.drop_path, **config.options}
        options["num_classes"] = self.classes
        try:
            model: nn.Module = timm.create_model(config.name, pretrained=config.pretrained and start, **options)
        except Exception as error:  # an unknown name, an option it does not have, a value it can't use
            raise UsageError(f"task.model.name {config.name} with {options}: {error}") from error
        self.check_size(model)
        for name, deviation in config.init.items():
            parameters = dict(model.named_parameters())
            if name not in parameters:
                raise UsageError(f"task.model.init: {config.name} has no parameter {name!r}")
            nn.init.normal_(parameters[name], std=deviation)
        if config.weights is not None and start:
            load_weights(model, config.weights, new_head=config.new_head)
        return model

    @torch.no_grad()
    def check_size(self, model: nn.Module) -> None:
        """Whether images of this size pass through the model; one does, and nothing else changes."""
        name, size, channels = self.options.model.name, self.options.data.size, self.options.data.channels
        try:
            with generators_kept():
                model.eval()(torch.zeros(1, channels, size, size))
        except Exception as error:  # models say it by assertions, or not at all
            own = getattr(model, "default_cfg", {}).get("input_size", (0, 0, 0))[-1]
            raise UsageError(
                f"task.data.size={size} does not fit {name}: {error}. Set task.data.size to the model's (as published: "
                f"{own}), or task.model.options.img_size={size} if it has that option"
            ) from error
        model.train()

    def to(self, device: torch.device, memory_format: torch.memory_format) -> None:
        super().to(device, memory_format)
        data, augment = self.options.data, self.options.augment
        self.mean = 255 * torch.tensor(data.mean, device=device).view(-1, 1, 1)
        self.std = 255 * torch.tensor(data.std, device=device).view(-1, 1, 1)
        self.erase = RandomErasing(augment.erase, mode="pixel", device=str(device)) if augment.erase > 0 else None

    def prepare(self, batch: Batch, training: bool) -> Batch:
        pixels, labels = (part.to(self.device, non_blocking=True) for part in batch)
        images = ((pixels.float() - self.mean) / self.std).contiguous(memory_format=self.memory_format)
        if training and self.erase is not None:
            images = self.erase(images)
        if training and self.mix is not None:
            return self.mix(images, labels)
        return images, labels

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        images, targets = batch
        smoothing = 0.0 if targets.is_floating_point() else self.options.augment.smoothing  # mixed ones are smooth
        return F.cross_entropy(model(images).float(), targets, label_smoothing=smoothing)

    def weights_about(self) -> dict[str, str]:
        """The classes' names, in the order of the model's outputs."""
        return {"classes": json.dumps(self.names)} if self.names else {}

    def evaluator(self) -> Accuracy:
        return Accuracy(self.device, self.classes, self.names)


class OfImage:
    """A transform of the image alone: the class stays."""

    def __init__(self, transform: Callable[[Any], Any]) -> None:
        self.transform = transform

    def __call__(self, image: Any, label: int) -> tuple[Any, int]:
        return self.transform(image), label


def check_names(augment: Augment) -> None:
    """Of interpolation and augmentation, as timm knows them."""
    allowed = ("random", *(mode.name.lower() for mode in Image.Resampling))
    if augment.interpolation not in allowed:
        refuse("task.augment.interpolation", augment.interpolation, ", ".join(allowed))
    if augment.auto_augment is not None:
        try:
            train_transform(Data(), augment)
        except Exception as error:  # timm says it by assertions
            forms = "null, rand-m9-mstd0.5-inc1 and the like, original, originalr, v0, v0r, 3a, augmix-m3 and the like"
            refuse("task.augment.auto_augment", augment.auto_augment, f"{forms} ({error})")


def train_transform(data: Data, augment: Augment) -> Callable[[Any], Any]:
    """Up to uint8 pixels; the rest is done on the device, for a batch at a time."""
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
    """How many bits posterizing leaves: as in timm, but not its 0 at the highest level, which Pillow 13 refuses."""
    return (max(1, 4 - int(level / 10 * 4)),)


def eval_transform(data: Data, augment: Augment) -> Callable[[Any], Any]:
    return create_transform(data.size, crop_pct=data.crop_pct, interpolation=augment.interpolation, use_prefetcher=True)
