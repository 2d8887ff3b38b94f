"""Detection and instance segmentation: Mask R-CNN and Cascade Mask R-CNN on a timm backbone, data in COCO's layout."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn
from torchvision.transforms import v2

import torchsbp
from torchsbp import SBPConfig

from ...adapters.blocks import blocks_of
from ...errors import DataError, UsageError
from ..data.coco import Objects, open_coco
from ..data.images import named
from ..data.order import TrainOrder
from ..data.samples import Samples
from ..data.shapes import shapes
from ..detection.backbone import Backbone, body
from ..detection.batches import (
    Batch,
    CropBetween,
    GroupedOrder,
    Prepared,
    ShortestSize,
    check_shape,
    collate,
    turned,
)
from ..detection.evaluate import Precision, metrics
from ..detection.heads import CASCADE, GROUPS, MASK_RCNN, Heads, HeadSpec
from ..detection.model import Detector, compile_backbone, parameter_groups
from ..detection.predict import DetectionPredictor
from ..detection.rpn import RPN
from ..ranges import COUNT, NOT_NEGATIVE, SHARE, SHARE_ABOVE_0, SHARE_BELOW_1, WORKERS, refuse
from ..task import Task, TaskOptions
from . import register

if TYPE_CHECKING:
    from ..config import Optimizer

KINDS = {"mask_rcnn": (MASK_RCNN, 0.0), "cascade_mask_rcnn": (CASCADE, 1 / 9)}
"""kind -> stages of heads, and β of the smooth L1 loss of proposals"""


@dataclass
class Model:
    """The detector, on a backbone made by timm's ``create_model(features_only=True)``."""

    kind: Literal["mask_rcnn", "cascade_mask_rcnn"] = "mask_rcnn"
    name: str = "convnext_tiny"
    """the backbone's name in timm: a model with maps of strides 4 to 32, or a plain ViT"""
    options: dict[str, Any] = field(default_factory=dict)
    """further arguments of the backbone, such as depths or ls_init_value"""
    drop_path: float = field(default=0.0, metadata=SHARE_BELOW_1)
    """rate of stochastic depth"""
    pretrained: bool = False
    """begin from timm's published weights of the backbone (needs the internet)"""
    weights: Path | None = None
    """begin from the backbone's weights in this run's folder, checkpoint of ours, or classifier (same timm model)"""
    masks: bool = True
    """find masks too; false: boxes alone"""
    width: int = field(default=256, metadata=COUNT)
    """channels of the pyramid and of the heads' convolutions"""
    hidden: int = field(default=1024, metadata=COUNT)
    """channels of the heads' linear layers"""
    norm: Literal["batch", "group"] = "batch"
    """norm of the cascade's convolutions; batch norm is synchronised over processes"""
    anchor_scale: int = field(default=8, metadata=COUNT)
    """side of a map's anchors, as a multiple of its stride"""
    proposals: int = field(default=1000, metadata=COUNT)
    """proposals per image that the RPN makes in training"""
    sampled: int = field(default=512, metadata=COUNT)
    """proposals per image that a stage of heads is trained with"""


@dataclass
class Lean:
    """Less memory in RPN and heads, besides what SBP saves in the backbone."""

    rpn: bool = False
    """run the RPN's backward for the anchors in its loss alone, not for whole maps; gradients are exact"""
    recompute: bool = False
    """run the heads on proposals again in backward; gradients are exact"""
    proposals: float = field(default=1.0, metadata=SHARE_ABOVE_0)
    """share of the sampled proposals through which heads get gradients"""


@dataclass
class Data:
    """Images with boxes and masks: COCO's layout, or generated shapes."""

    source: Literal["coco", "shapes"] = "coco"
    root: Path = Path("data/coco")
    train: str = "train2017"
    """the folder of training images, below root"""
    valid: str = "val2017"
    """the folder of validation images, below root"""
    train_json: str = "annotations/instances_train2017.json"
    """the training annotations, below root"""
    valid_json: str = "annotations/instances_val2017.json"
    """the validation annotations, below root"""
    count: int = field(default=640, metadata=COUNT)
    """source shapes: how many images to train with; a quarter as many are evaluated with"""
    mean: tuple[float, float, float] = field(default=(0.485, 0.456, 0.406), metadata=SHARE)
    """mean of the channels of pixels in [0, 1]"""
    std: tuple[float, float, float] = field(default=(0.229, 0.224, 0.225), metadata=SHARE_ABOVE_0)
    """their standard deviation"""
    multiple: int = field(default=32, metadata=COUNT)
    """batches are padded to multiples of so many pixels"""
    buckets: list[tuple[int, int]] = field(default_factory=list)
    """pad batches to the smallest of these sizes instead, [height, width] or turned; needed to compile, which makes a
    graph for each"""
    workers: int = field(default=4, metadata=WORKERS)
    """processes that read images, for each process that trains"""
    broken: int = field(default=0, metadata=NOT_NEGATIVE)
    """how many images may be unreadable: training takes others in their place, evaluation leaves them and their objects
    out; one more ends the run"""

    def __post_init__(self) -> None:
        multiple = max(1, self.multiple)  # one below 1 is refused with the other numbers
        wrong = [side for bucket in self.buckets for side in bucket if side < 1 or side % multiple]
        if wrong:
            refuse("task.data.buckets", self.buckets, f"sides that are multiples of task.data.multiple={self.multiple}")


@dataclass
class Augment:
    """A random flip and a random size; with crop, half of the images are first resized and cropped."""

    hflip: float = field(default=0.5, metadata=SHARE)
    """probability of a horizontal flip"""
    short: list[int] = field(default_factory=lambda: [*range(480, 801, 32)], metadata=COUNT)
    """resize the shorter side to one of these"""
    long: int = field(default=1333, metadata=COUNT)
    """but the longer side to no more than this"""
    crop: bool = False
    """before that, resize the shorter side of half of the images to one of crop_short, and crop them"""
    crop_short: list[int] = field(default_factory=lambda: [400, 500, 600], metadata=COUNT)
    crop_sides: tuple[int, int] = field(default=(384, 600), metadata=COUNT)
    """the least and the largest height and width of the crop"""
    eval_short: int = field(default=800, metadata=COUNT)
    """the shorter side in evaluation"""

    def __post_init__(self) -> None:
        if self.crop_sides[0] > self.crop_sides[1]:
            refuse("task.augment.crop_sides", list(self.crop_sides), "two integers, the first not above the second")


@dataclass
class DetectionOptions(TaskOptions):
    """Detect objects in images."""

    model: Model = field(default_factory=Model)
    lean: Lean = field(default_factory=Lean)
    data: Data = field(default_factory=Data)
    augment: Augment = field(default_factory=Augment)


@register("detection")
class Detection(Task):
    """The task of finding objects: their boxes, classes and masks."""

    Options = DetectionOptions
    best_by = "box_ap"
    unit = "images"
    told_of_sizes = False
    """whether SBP takes account of images that are smaller than their batch: ``torchsbp.set_sizes``"""

    def __init__(
        self, options: DetectionOptions, seed: int, names: list[str] | None = None, ids: list[int] | None = None
    ) -> None:
        """``names`` of the classes and ``ids`` of their categories (by default 1, 2, …), if they are known without
        data."""
        check_norm(options.model, options.lean)
        self.metrics = metrics(options.model.masks)
        self.workers, self.broken = options.data.workers, options.data.broken
        self.collate = partial(collate, buckets=options.data.buckets, multiple=options.data.multiple)
        super().__init__(options, seed)
        if names is not None:
            self.names, self.category_ids = names, ids or [*range(1, 1 + len(names))]
        else:
            self.names, self.category_ids = self.train_objects.names, self.train_objects.category_ids
            self.check_classes()
            self.notes = (self.train_objects.notes, self.valid_objects.notes)

    @classmethod
    def trained(cls, options: Any, seed: int, about: Mapping[str, str]) -> "Detection":
        names, ids = (json.loads(about.get(name, "null")) for name in ("classes", "category_ids"))
        return cls(options, seed, names, ids)  # weights from older versions have no ids

    # Data

    @cached_property
    def train_objects(self) -> Objects:
        return self.open(training=True)

    @cached_property
    def valid_objects(self) -> Objects:
        return self.open(training=False)

    def open(self, training: bool) -> Objects:
        data, masks = self.options.data, self.options.model.masks
        if data.source == "shapes":
            return shapes(data.count if training else max(1, data.count // 4), training, masks)
        folder, file = (data.train, data.train_json) if training else (data.valid, data.valid_json)
        objects = open_coco(data.root / file, data.root / folder, training, masks)
        for index, its in enumerate(objects.images):
            try:
                check_shape(its["height"], its["width"], self.options.augment.long)
            except DataError as error:
                raise DataError(f"{objects.where(index)}: {error}") from error
        return objects

    @cached_property
    def train_data(self) -> Samples:
        augment = self.options.augment
        size = ShortestSize(augment.short, augment.long)
        if augment.crop:
            first = ShortestSize(augment.crop_short, augment.long)
            size = v2.RandomChoice([size, v2.Compose([first, CropBetween(*augment.crop_sides), size])])
        transform = Prepared(v2.RandomHorizontalFlip(augment.hflip), size, v2.SanitizeBoundingBoxes())
        return Samples(self.train_objects, transform, self.seed, replace=self.broken > 0)

    @cached_property
    def valid_data(self) -> Samples:
        return Samples(self.valid_objects, self.eval_transform(), self.seed, replace=self.broken > 0)

    def eval_transform(self) -> Prepared:
        augment = self.options.augment
        return Prepared(ShortestSize([augment.eval_short], augment.long))

    def check_classes(self) -> None:
        """Raise ``DataError`` if the validation data have other classes than the training data."""
        if self.valid_objects.names != self.names:
            found, known = named(self.valid_objects.names), named(self.names)
            raise DataError(f"{self.valid_objects.file} has the categories {found}; those of training are {known}")

    def train_order(self, batch: int, rank: int, world: int, multiple: int) -> TrainOrder:
        order = GroupedOrder(len(self.train_data), batch, self.seed, rank, world, multiple)
        order.upright = torch.tensor([its["height"] > its["width"] for its in self.train_objects.images])
        return order

    def to(self, device: torch.device, memory_format: torch.memory_format) -> None:
        super().to(device, memory_format)
        data = self.options.data
        self.mean, self.std = (255 * torch.tensor(its, device=device).view(3, 1, 1) for its in (data.mean, data.std))

    def prepare(self, batch: Batch, training: bool) -> Batch:
        """Move images to the device, normalise them and zero their padding. ``sizes`` stay on the CPU, where they can
        be read without waiting for the device."""
        sizes, batch = batch.sizes, super().prepare(batch, training)
        images = ((batch.images.float() - self.mean) / self.std).masked_fill_(padding_of(batch), 0)
        return batch._replace(images=images.contiguous(memory_format=self.memory_format), sizes=sizes)

    # Model

    def model(self, start: bool) -> nn.Module:
        model, lean = self.options.model, self.options.lean
        stages, beta = KINDS[model.kind]
        options = {"drop_path_rate": model.drop_path, **model.options}
        weights = model.weights if start else None
        inner = body(model.name, options, model.pretrained and start, weights, self.options.data.multiple)
        spec = HeadSpec(
            len(self.names) + 1, model.width, model.hidden, model.sampled, model.masks, model.norm, lean.proposals,
            lean.recompute,
        )  # fmt: skip
        rpn = RPN(model.width, model.anchor_scale, model.proposals, beta, lean.rpn)
        return Detector(Backbone(inner, model.width), rpn, Heads(stages, spec))

    def apply_sbp(self, model: nn.Module, config: SBPConfig) -> None:
        super().apply_sbp(model, config)
        self.told_of_sizes = config.scale == "none"  # ``set_sizes`` refuses other scales

    def compile(self, model: nn.Module, mode: str | None = None) -> None:
        assert isinstance(model, Detector)
        shapes = turned(self.options.data.buckets)
        if not shapes:
            raise UsageError(
                "compile needs task.data.buckets, which are empty: each of many sizes of batches would be compiled; "
                "set buckets, such as those of the coco recipes, or compile=false"
            )
        compile_backbone(model, len(shapes), mode)

    def sharded(self, model: nn.Module) -> list[str]:
        return [f"backbone.{name}" for name in blocks_of(model.get_submodule("backbone"))]

    def parameters(self, model: nn.Module, optimizer: "Optimizer") -> Any:
        assert isinstance(model, Detector)
        return parameter_groups(model, optimizer.weight_decay, optimizer.layer_decay)

    # Losses and metrics

    def loss(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        if self.told_of_sizes:
            torchsbp.set_sizes(model, batch.sizes, batch.images.shape[-2:])
        return model(batch.images, batch.sizes, batch.targets)

    def evaluator(self) -> Precision:
        self.check_classes()
        return Precision(self.valid_objects)

    def predictor(self) -> DetectionPredictor:
        categories = dict(zip(self.category_ids, self.names, strict=True))
        return DetectionPredictor(categories, self.eval_transform(), self.collate, self.prepare)

    def weights_about(self) -> dict[str, str]:
        """The classes' names in the order of the model's outputs, without the background, and their ids in the data."""
        return {"classes": json.dumps(self.names), "category_ids": json.dumps(self.category_ids)}


def check_norm(model: Model, lean: Lean) -> None:
    """Raise ``UsageError`` if the norm of the cascade's convolutions does not go with other options."""
    if model.kind != "cascade_mask_rcnn":
        return
    if model.norm == "batch" and lean.proposals < 1:
        raise UsageError(
            "task.lean.proposals samples them, whose batch statistics would differ; set task.model.norm=group"
        )
    if model.norm == "group" and model.width % GROUPS:
        allowed = f"multiples of {GROUPS}, the groups of task.model.norm=group; or set task.model.norm=batch"
        refuse("task.model.width", model.width, allowed)


def padding_of(batch: Batch) -> Tensor:
    """A mask ``[B, 1, H, W]`` that is true outside the images."""
    height, width = (torch.arange(n, device=batch.sizes.device) for n in batch.images.shape[-2:])
    below = height[None, :, None] >= batch.sizes[:, 0, None, None]
    beside = width[None, None, :] >= batch.sizes[:, 1, None, None]
    return (below | beside)[:, None]
