"""Image classification: a timm model, labelled images, timm's augmentation, cross entropy, top-1 and top-5."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
import timm
import torch
import torch.nn.functional as F
from timm.data import Mixup
from timm.data.loader import fast_collate
from timm.data.random_erasing import RandomErasing
from torch import Tensor, nn

from ...errors import DataError, UsageError
from ..accuracy import MANY, Accuracy
from ..data.images import Images, check_same_classes, named
from ..data.pictures import read_picture
from ..data.samples import OfInput, Samples
from ..data.seeds import generators_kept
from ..data.views import Augment, Data, check_names, eval_transform, mode_of, open_part, train_transform
from ..predictor import Prediction, Predictor
from ..ranges import NOT_NEGATIVE, SHARE_BELOW_1, refuse
from ..record import Metric
from ..runs.weights import load_weights
from ..task import Task, TaskOptions
from . import register

Batch = tuple[Tensor, Tensor]
"""images, and class numbers or mixed targets"""
Classes = tuple[list[str], int]
"""names of the classes (empty if not known), and how many there are"""


@dataclass
class Model:
    """The model, made by timm's ``create_model``."""

    name: str = "vit_tiny_patch16_224"
    """its name in timm"""
    options: dict[str, Any] = field(default_factory=dict)
    """further arguments of the model, such as embed_dim or ls_init_value"""
    drop_path: float = field(default=0.0, metadata=SHARE_BELOW_1)
    """rate of stochastic depth"""
    init: dict[str, float] = field(default_factory=dict, metadata=NOT_NEGATIVE)
    """parameters to initialise from a normal distribution, with its standard deviation, such as {pos_embed: 1.0}"""
    pretrained: bool = False
    """begin from timm's published weights (needs the internet)"""
    weights: Path | None = None
    """begin from the weights of this run's folder, checkpoint of ours, safetensors or state dict (same timm model)"""
    new_head: bool = False
    """take all of these weights but the classifier's, for data with other classes"""


@dataclass
class ClassificationOptions(TaskOptions):
    """Classify images."""

    model: Model = field(default_factory=Model)
    data: Data = field(default_factory=Data)
    augment: Augment = field(default_factory=Augment)
    class_weights: Literal["none", "balanced"] | list[float] = field(default="none", metadata=NOT_NEGATIVE)
    """weights of the classes in the loss. balanced: images / (classes · images of the class); or a list with one for
    each class, in the order of their names"""


@register("classification")
class Classification(Task):
    """The task of naming the class of an image."""

    Options = ClassificationOptions
    metrics: tuple[Metric, ...] = (
        Metric("loss", "validation loss", format=".3f", higher=False, column=False),
        Metric("top1", "top-1", "%", chart="Validation accuracy"),
        Metric("top5", "top-5", "%", column=False),
    )
    best_by = "top1"
    unit = "images"
    collate = staticmethod(fast_collate)

    def __init__(self, options: ClassificationOptions, seed: int, known: Classes | None = None) -> None:
        """``known``: the classes, if they are known without training data."""
        super().__init__(options, seed)
        check_names(options.augment)
        self.names, self.classes = known or (self.train_images.names, self.train_images.classes)
        self.workers, self.broken = options.data.workers, options.data.broken
        if self.classes <= MANY:
            self.metrics = tuple(metric for metric in self.metrics if metric.name != "top5")
        self.mix = self.mixup(options.augment)

    @classmethod
    def trained(cls, options: ClassificationOptions, seed: int, about: Mapping[str, str]) -> "Classification":
        names = json.loads(about.get("classes", "[]"))
        classes = len(names) or options.data.classes
        return cls(options, seed, (names, classes) if classes else None)

    @cached_property
    def train_images(self) -> Images:
        return open_part(self.options.data, train=True)

    @cached_property
    def train_data(self) -> Samples:
        transform = train_transform(self.options.data, self.options.augment)
        return Samples(self.train_images, OfInput(transform), self.seed, replace=self.broken > 0)

    @cached_property
    def valid_data(self) -> Samples:
        images = open_part(self.options.data, train=False)
        check_same_classes(self, images)
        return Samples(images, OfInput(self.eval_transform), self.seed, replace=self.broken > 0)

    @cached_property
    def eval_transform(self) -> Callable[[Any], Any]:
        return eval_transform(self.options.data, self.options.augment)

    def mixup(self, augment: Augment) -> Mixup | None:
        if augment.mixup == augment.cutmix == 0:
            return None
        return Mixup(
            mixup_alpha=augment.mixup,
            cutmix_alpha=augment.cutmix,
            label_smoothing=augment.smoothing,
            num_classes=self.classes,
        )

    def check(self, micro_batch: int) -> None:
        if self.class_weights is not None and self.mix is not None:
            raise UsageError(
                "task.class_weights and mixup: a mixed image has two classes; set task.augment.mixup and cutmix to 0, "
                "or task.class_weights to none"
            )
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
        """Raise ``UsageError`` if an image of the configured size does not pass through the model. Random generators
        are left as they were."""
        name, size, channels = self.options.model.name, self.options.data.size, self.options.data.channels
        try:
            with generators_kept():
                model.eval()(torch.zeros(1, channels, size, size))
        except Exception as error:  # models raise assertions, shape errors, or anything else
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
        pixels, labels = batch
        images, labels = self.normalised(pixels), labels.to(self.device, non_blocking=True)
        if training and self.erase is not None:
            images = self.erase(images)
        if training and self.mix is not None:
            return self.mix(images, labels)
        return images, labels

    def normalised(self, pixels: Tensor) -> Tensor:
        """Move pixels from 0 to 255 to the device and normalise them."""
        pixels = pixels.to(self.device, non_blocking=True)
        return ((pixels.float() - self.mean) / self.std).contiguous(memory_format=self.memory_format)

    @cached_property
    def class_weights(self) -> Tensor | None:
        """A weight for each class in the loss, or None."""
        given, name = self.options.class_weights, "task.class_weights"
        if given == "none":
            return None
        if given == "balanced":
            counts = torch.bincount(torch.tensor(self.train_images.labels), minlength=self.classes)
            if not counts.all():
                lacking = [self.name_of(number) for number in (counts == 0).nonzero().flatten().tolist()]
                raise DataError(f"{name} balanced: {named(lacking)} has no training images")
            return counts.sum() / (self.classes * counts)
        if len(given) != self.classes or not any(given):
            refuse(name, given, f"none, balanced, or {self.classes} numbers, not all 0: {named(self.names)}")
        return torch.tensor(given, dtype=torch.float32)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        images, targets = batch
        smoothing = 0.0 if targets.is_floating_point() else self.options.augment.smoothing  # mixup has smoothed its own
        scores = model(images).float()
        if self.class_weights is None:
            return F.cross_entropy(scores, targets, label_smoothing=smoothing)
        # The mean over images, not over weights: then it does not matter how a batch is cut into micro-batches.
        weights = self.class_weights.to(scores.device)
        return F.cross_entropy(scores, targets, weights, reduction="none", label_smoothing=smoothing).mean()

    def name_of(self, number: int) -> str:
        return self.names[number] if self.names else str(number)

    def weights_about(self) -> dict[str, str]:
        """The classes' names, in the order of the model's outputs."""
        return {"classes": json.dumps(self.names)} if self.names else {}

    def evaluator(self) -> Accuracy:
        return Accuracy(self.device, self.classes, self.names)

    def example(self, samples: int) -> tuple[Tensor, ...]:
        data, chance = self.options.data, torch.Generator().manual_seed(0)
        return (torch.randn(samples, data.channels, data.size, data.size, generator=chance),)

    def predictor(self) -> Predictor:
        return Labels(self)


class Labels(Predictor):
    """Predicts the most likely class, and lists those that follow it."""

    columns = ("class", "probability")

    def __init__(self, task: Classification) -> None:
        self.task, self.transform = task, task.eval_transform
        self.mode = mode_of(task.options.data)
        self.names = [task.name_of(number) for number in range(task.classes)]

    def read(self, path: Path) -> Any:
        with path.open("rb") as file:
            return self.transform(read_picture(file, self.mode))

    def predict(self, model: nn.Module, inputs: list[Any]) -> list[Prediction]:
        images = self.task.normalised(torch.from_numpy(np.stack(inputs)))
        found = model(images).float().softmax(1).topk(min(MANY, self.task.classes))
        return [self.prediction(*best) for best in zip(found.values.tolist(), found.indices.tolist(), strict=True)]

    def prediction(self, shares: list[float], numbers: list[int]) -> Prediction:
        top = [{"class": self.names[n], "probability": p} for p, n in zip(shares, numbers, strict=True)]
        name, share = self.names[numbers[0]], shares[0]
        return Prediction([(name, f"{share:.6f}")], {**top[0], "top": top}, f"{name}, {share:.1%}")
