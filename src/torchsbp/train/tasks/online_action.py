"""Online action detection: a frame encoder and LSTR, trained together; per-frame mAP and temporal detection."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torchvision.transforms import v2

from torchsbp import SBPConfig

from ...errors import DataError, UsageError
from ..config import Optimizer
from ..data.actions import Videos, WholeVideos, Windows
from ..data.generated import Generated
from ..data.order import EvalOrder
from ..data.samples import OfInput, Samples
from ..data.thumos import Thumos
from ..data.videos import Video
from ..data.window import Window
from ..frames import check_some_dropped
from ..online.detector import OnlineDetector
from ..online.encoder import Encoder, make_encoder, width
from ..online.evaluation import Precision
from ..online.lstr import LSTR, Temporal
from ..online.segments import OVERLAPS
from ..online.stream import Stream
from ..optimizer import WARMUP
from ..predictor import Predictor
from ..ranges import COUNT, NOT_NEGATIVE, POSITIVE, SHARE, SHARE_ABOVE_0, WORKERS, refuse
from ..record import Metric
from ..task import Task, TaskOptions
from . import register

DECODED = 64
"""frames of a video file that are read together"""
Batch = tuple[Tensor, tuple[Tensor, Tensor]]
"""frames; which slots of the long memory are empty; targets of the frames in the work memory"""


@dataclass
class Data:
    """Untrimmed videos, to train with and to evaluate with."""

    source: Literal["thumos", "generated"] = "thumos"
    root: Path = Path("data/thumos")
    train: str = "train"
    """name of the list of training videos: train means ROOT/train.txt"""
    valid: str = "test"
    """name of the list of validation videos"""
    size: int = field(default=224, metadata=COUNT)
    """side of the frames that the model sees, in pixels"""
    mean: list[float] = field(default_factory=lambda: [0.485, 0.456, 0.406], metadata=SHARE)
    """mean of the channels of pixels in [0, 1]"""
    std: list[float] = field(default_factory=lambda: [0.229, 0.224, 0.225], metadata=SHARE_ABOVE_0)
    """their standard deviation"""
    fps: float = field(default=4.0, metadata=POSITIVE)
    """frames per second"""
    crop_pct: float = field(default=0.875, metadata=SHARE_ABOVE_0)
    """evaluation: the share of the resized frame that is cropped"""
    workers: int = field(default=8, metadata=WORKERS)
    """processes that read videos, for each process that trains"""
    videos: tuple[int, int] = field(default=(64, 32), metadata=COUNT)
    """source generated: how many videos to train with, and how many to evaluate with"""
    frames: int = field(default=160, metadata=COUNT)
    """source generated: frames of each video"""

    def __post_init__(self) -> None:
        if not len(self.mean) == len(self.std) == 3:
            raise UsageError(f"mean {self.mean} and std {self.std} need one number per channel, 3")


@dataclass
class Augment:
    """Random changes in training, the same for all frames of a clip."""

    scale: tuple[float, float] = field(default=(0.4, 1.0), metadata=SHARE_ABOVE_0)
    """the least and the largest share of the frame that a crop has"""
    hflip: float = field(default=0.5, metadata=SHARE)
    """probability of a horizontal flip"""
    color_jitter: float = field(default=0.0, metadata=NOT_NEGATIVE)
    """strength of changes of brightness, contrast and saturation"""

    def __post_init__(self) -> None:
        if self.scale[0] > self.scale[1]:
            refuse("task.augment.scale", list(self.scale), "two numbers in (0, 1], the first not above the second")


@dataclass
class OnlineActionOptions(TaskOptions):
    """Detect actions in the newest frame of a video."""

    encoder: Encoder = field(default_factory=Encoder)
    temporal: Temporal = field(default_factory=Temporal)
    window: Window = field(default_factory=Window)
    data: Data = field(default_factory=Data)
    augment: Augment = field(default_factory=Augment)


@register("online_action")
class OnlineAction(Task):
    """The task of telling which action is going on in the newest frame."""

    Options = OnlineActionOptions
    metrics: tuple[Metric, ...] = (
        Metric("map", "per-frame mAP", "%", chart="Per-frame mAP"),
        Metric("tad", "mAP at tIoU 0.3–0.7", "%", chart="Detection mAP"),
        *(Metric(f"tad_{overlap}", f"mAP at tIoU {overlap}", "%", column=False) for overlap in OVERLAPS),
    )
    best_by = "map"
    unit = "clips"

    def __init__(self, options: OnlineActionOptions, seed: int) -> None:
        super().__init__(options, seed)
        self.workers = options.data.workers

    @classmethod
    def trained(cls, options: OnlineActionOptions, seed: int, about: Mapping[str, str]) -> "OnlineAction":
        task = cls(options, seed)
        if "classes" in about:
            task.names = json.loads(about["classes"])
        return task

    # Data

    def open(self, training: bool) -> Videos:
        data = self.options.data
        if data.source == "thumos":
            return Thumos(data.root, data.train if training else data.valid, data.fps)
        return Generated(data.videos[not training], data.frames, data.size, seed=int(training))

    @cached_property
    def valid_videos(self) -> Videos:
        return self.open(training=False)

    @cached_property
    def names(self) -> list[str]:
        """Names of the columns of targets: background, actions, ambiguous."""
        return self.valid_videos.names

    @cached_property
    def train_data(self) -> Samples:
        videos = self.open(training=True)
        if videos.names != self.names:
            raise DataError(f"training data have the columns {videos.names}, validation data {self.names}")
        windows = Windows(videos, self.options.window)
        if windows.short:
            span = self.options.window.span
            self.notes = (
                f"{windows.short} of {len(videos.counts)} videos are shorter than the work memory, {span} frames",
            )
        return Samples(windows, OfInput(train_transform(self.options)), self.seed)

    @cached_property
    def valid_data(self) -> Samples:
        return Samples(WholeVideos(self.valid_videos), OfInput(eval_transform(self.options.data)), self.seed)

    def eval_order(self, batch: int, rank: int, world: int) -> EvalOrder:
        """One video at a time, as their lengths differ."""
        return super().eval_order(1, rank, world)

    # Model

    def model(self, start: bool) -> nn.Module:
        options, data = self.options, self.options.data
        encoder = make_encoder(options.encoder, data.size, data.mean, data.std, start)
        classes = len(self.names) - 1  # the model does not predict the ambiguous column
        features = width(encoder, data.size, options.encoder.name)
        return OnlineDetector(encoder, LSTR(features, classes, options.window, options.temporal), options.encoder)

    def apply_sbp(self, model: nn.Module, config: SBPConfig) -> None:
        assert isinstance(model, OnlineDetector)
        model.apply_sbp(config)
        if self.options.encoder.tokens is None:
            check_some_dropped(config)

    def set_step(self, model: nn.Module, number: int) -> None:
        assert isinstance(model, OnlineDetector)
        model.set_step(number)

    def sharded(self, model: nn.Module) -> list[str]:
        raise UsageError(
            "parallel=fsdp does not go with task online_action, which uses parts of LSTR one by one: use ddp"
        )

    def parameters(self, model: nn.Module, optimizer: Optimizer) -> list[dict[str, Any]]:
        """Parameter groups: the encoder has a learning rate and a warm-up of its own; vectors have no weight decay."""
        if optimizer.layer_decay is not None:
            refuse("optimizer.layer_decay", optimizer.layer_decay, "null; task.encoder.lr is the encoder's rate")
        encoder = self.options.encoder
        own = {"lr": optimizer.lr if encoder.lr is None else encoder.lr, WARMUP: encoder.warmup_epochs}
        groups = []
        for name, options in (("encoder", own), ("temporal", {"lr": optimizer.lr})):
            trained = [its for its in model.get_submodule(name).parameters() if its.requires_grad]
            for decays in (True, False):
                params = [its for its in trained if (its.dim() > 1) == decays]
                decay = {} if decays else {"weight_decay": 0.0}
                groups += [{"params": params, **options, **decay}] if params else []
        return groups

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        frames, (empty, targets) = batch
        return multi_label_loss(model(frames, empty), targets)

    def evaluator(self) -> Precision:
        if self.valid_videos.names != self.names:
            raise DataError(f"validation data have the columns {self.valid_videos.names}, the weights {self.names}")
        return Precision(self.valid_videos)

    def weights_about(self) -> dict[str, str]:
        return {"classes": json.dumps(self.names)}

    def predictor(self) -> Predictor:
        raise UsageError("runs of task online_action see a video over time: use torchsbp detect RUN VIDEO")

    def follow(self, model: nn.Module, video: Video) -> tuple[list[float], np.ndarray]:
        """Follow a video frame by frame. Return the moments in seconds, and scores ``[moments, classes]``."""
        assert isinstance(model, OnlineDetector)
        transform, stream = eval_transform(self.options.data), Stream(model)
        times = video.moments(self.options.data.fps)
        scores = []
        for begin in range(0, len(times), DECODED):
            frames = transform(video.frames_at(times[begin : begin + DECODED])).to(self.device)
            scores += [stream.step(frame) for frame in frames]
        return times, torch.stack(scores).float().cpu().numpy()


def multi_label_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """−Σ_c t_c log softmax(logits)_c, the mean over frames that are not ambiguous (the last column of targets)."""
    clear = 1 - targets[..., -1]
    losses = -(targets[..., :-1] * logits.log_softmax(-1)).sum(-1)
    return (clear * losses).sum() / clear.sum().clamp(min=1)


def train_transform(options: OnlineActionOptions) -> Any:
    """Return a transform of frames, the same for all of them."""
    augment, jitter = options.augment, options.augment.color_jitter
    steps: list[nn.Module] = [v2.RandomResizedCrop(options.data.size, augment.scale, antialias=True)]
    if augment.hflip:
        steps.append(v2.RandomHorizontalFlip(augment.hflip))
    if jitter:
        steps.append(v2.ColorJitter(jitter, jitter, jitter))
    return v2.Compose(steps)


def eval_transform(data: Data) -> Any:
    side = round(data.size / data.crop_pct)
    return v2.Compose([v2.Resize(side, antialias=True), v2.CenterCrop(data.size)])
