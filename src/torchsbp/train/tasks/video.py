"""Video action recognition: clips of videos, a video transformer or an image model on frames, top-1 over views."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchsbp import SBPConfig

from ...errors import DataError, UsageError
from ..data.clips import SHORT, UNREAD, Clips, EvalClips, Sampling, Target, TrainClips
from ..data.images import named
from ..data.lists import Epic, Listed
from ..data.moving import Moving
from ..data.samples import Samples
from ..distributed import gather
from ..frames import check_some_dropped
from ..ranges import COUNT, SHARE, SHARE_ABOVE_0, WORKERS, refuse
from ..task import Task, TaskOptions
from ..video.evaluation import Batch, Views, metrics
from ..video.kept import kept_cells
from ..video.model import Classifier, Frames, Model, groups, is_video, make_model
from ..video.picture import strip
from ..video.predictions import Actions
from ..video.views import Augment, EvalViews, TrainView
from . import register

if TYPE_CHECKING:
    from ..config import Optimizer

FRAME_SAMPLERS = ("frames", "frames_jitter")
LONGER = 1.25
"""source generated: how many times as long as a clip a video is"""


@dataclass
class Data:
    """Labelled videos, to train with and to evaluate with."""

    source: Literal["list", "epic", "generated"] = "list"
    root: Path = Path("data/kinetics400")
    train: str = "train.txt"
    """the list of training videos, or Epic-Kitchens' annotations, below root"""
    valid: str = "val.txt"
    """the same for validation"""
    held_out: list[str] = field(default_factory=lambda: [f"P{number}" for number in range(26, 32)])
    """source epic: participants to evaluate with; the others are trained with"""
    videos: tuple[int, int] = field(default=(512, 128), metadata=COUNT)
    """source generated: how many videos to train with, and how many to evaluate with"""
    frames: int = field(default=32, metadata=COUNT)
    """frames of a clip"""
    stride: int = field(default=2, metadata=COUNT)
    """distance from one frame of a clip to the next, in frames of the video"""
    size: int = field(default=224, metadata=COUNT)
    """side of the frames that the model sees, in pixels"""
    side: int | None = field(default=None, metadata=COUNT)
    """evaluation: resize the shorter side of frames to this before they are cropped, by default to size"""
    views: tuple[int, int] = field(default=(1, 1), metadata=COUNT)
    """evaluation: how many clips of a video, and how many crops of each"""
    mean: list[float] = field(default_factory=lambda: [0.485, 0.456, 0.406], metadata=SHARE)
    """mean of the channels of pixels in [0, 1]"""
    std: list[float] = field(default_factory=lambda: [0.229, 0.224, 0.225], metadata=SHARE_ABOVE_0)
    """their standard deviation"""
    workers: int = field(default=8, metadata=WORKERS)
    """processes that read videos, for each process that trains"""

    def __post_init__(self) -> None:
        if not len(self.mean) == len(self.std) == 3:
            raise UsageError(f"mean {self.mean} and std {self.std} need one number per channel, 3")
        if self.side is not None and self.side < self.size:
            refuse("task.data.side", self.side, f"at least task.data.size={self.size}")


@dataclass
class VideoOptions(TaskOptions):
    """Recognise actions in clips."""

    model: Model = field(default_factory=Model)
    data: Data = field(default_factory=Data)
    augment: Augment = field(default_factory=Augment)


@register("video")
class Video(Task):
    """The task of naming the action that a clip shows."""

    Options = VideoOptions
    best_by = "top1"
    unit = "clips"

    def __init__(self, options: VideoOptions, seed: int, known: dict[str, list[str]] | None = None) -> None:
        """``known``: the names of the classes of each head, if they are known without training data."""
        super().__init__(options, seed)
        clips = None if known else self.train_clips
        self.classes = known or dict(zip(clips.heads, map(list, clips.names), strict=True))  # type: ignore[union-attr]
        self.counts = [len(names) for names in self.classes.values()]
        self.metrics = metrics(list(self.classes), self.counts)
        self.workers = options.data.workers
        if is_video(options.model.name):
            self.channels_last = torch.channels_last_3d
        self.clip_notes: dict[str, set[str]] = {}
        self.sampled: Classifier | None = None
        """the model that SBP is applied to"""

    @classmethod
    def trained(cls, options: VideoOptions, seed: int, about: Mapping[str, str]) -> "Video":
        return cls(options, seed, json.loads(about["classes"]) if "classes" in about else None)

    # Data

    def open(self, training: bool) -> Clips:
        data = self.options.data
        part = data.train if training else data.valid
        if data.source == "epic":
            return Epic(data.root, part, data.held_out, training)
        if data.source == "list":
            return Listed(data.root, part)
        frames = round(LONGER * self.sampling.span)
        return Moving(data.videos[not training], frames, data.size, seed=int(training))

    @property
    def sampling(self) -> Sampling:
        return Sampling(self.options.data.frames, self.options.data.stride)

    @cached_property
    def train_clips(self) -> Clips:
        return self.open(training=True)

    @cached_property
    def train_data(self) -> Samples:
        view = TrainView(self.options.augment, self.options.data.size)
        return Samples(TrainClips(self.train_clips, self.sampling), view, self.seed)

    @cached_property
    def valid_data(self) -> Samples:
        clips = self.open(training=False)
        for head, names in zip(clips.heads, clips.names, strict=True):
            known = self.classes[head]
            if len(names) > len(known):
                raise DataError(
                    f"validation data have {len(names)} classes of {head}, training data {len(known)}: {named(known)}"
                )
        return Samples(EvalClips(clips, self.sampling, self.options.data.views[0]), self.eval_views, self.seed)

    @property
    def eval_views(self) -> EvalViews:
        data = self.options.data
        return EvalViews(data.size, data.side or data.size, data.frames, data.views[1])

    @staticmethod
    def collate(samples: list[tuple[Tensor, Target]]) -> Batch:
        clips, targets = zip(*samples, strict=True)
        notes = [note for target in targets for note in target.notes]
        return torch.stack(clips), torch.stack([target.labels for target in targets]), notes

    def to(self, device: torch.device, memory_format: torch.memory_format) -> None:
        super().to(device, memory_format)
        data = self.options.data
        self.mean, self.std = (torch.tensor(its, device=device).view(3, 1, 1, 1) for its in (data.mean, data.std))

    def prepare(self, batch: Batch, training: bool) -> Batch:
        clips, labels, notes = batch
        if training:
            for note in notes:
                self.clip_notes.setdefault(note.kind, set()).add(note.text)
        clips = self.normalised(clips)
        if training and self.memory_format == torch.channels_last_3d:
            clips = clips.contiguous(memory_format=self.memory_format)
        return clips, labels.to(self.device, non_blocking=True), notes

    def normalised(self, clips: Tensor) -> Tensor:
        """Move pixels from 0 to 255 to the device and normalise them."""
        return (clips.to(self.device, non_blocking=True) / 255 - self.mean) / self.std

    def state(self) -> dict[str, Any]:
        """The notes on training videos from all processes."""
        found = gather(self.clip_notes)
        return {kind: sorted(set().union(*(its.get(kind, ()) for its in found))) for kind in (UNREAD, SHORT)}

    def restore(self, state: dict[str, Any]) -> None:
        self.clip_notes = {kind: set(texts) for kind, texts in state.items()}

    # Model

    def model(self, start: bool) -> nn.Module:
        data = self.options.data
        return make_model(self.options.model, data.frames, data.size, sum(self.counts), start)

    def apply_sbp(self, model: nn.Module, config: SBPConfig) -> None:
        assert isinstance(model, Classifier)
        if isinstance(model.body, Frames) and config.sampler in FRAME_SAMPLERS:
            check_some_dropped(config)
            model.body.sample(config)
        else:
            super().apply_sbp(model, config)
        self.sampled = model

    def set_step(self, model: nn.Module, number: int) -> None:
        assert isinstance(model, Classifier)
        if isinstance(model.body, Frames) and model.body.sampling is not None:
            model.body.step = number
        else:
            super().set_step(model, number)

    def parameters(self, model: nn.Module, optimizer: "Optimizer") -> list[dict[str, Any]]:
        assert isinstance(model, Classifier)
        if optimizer.layer_decay is not None:
            refuse(
                "optimizer.layer_decay", optimizer.layer_decay, "null; task.model.lr is the share of all but the head"
            )
        return groups(model, optimizer.lr, self.options.model.lr)

    # Losses and metrics

    def loss(self, model: nn.Module, batch: Batch) -> Tensor | dict[str, Tensor]:
        clips, labels, _ = batch
        logits = model(clips).float().split(self.counts, 1)
        smoothing = self.options.augment.smoothing
        losses = [F.cross_entropy(its, labels[:, i], label_smoothing=smoothing) for i, its in enumerate(logits)]
        return dict(zip(self.classes, losses, strict=True)) if len(losses) > 1 else losses[0]

    def evaluator(self) -> Views:
        return Views(self.device, list(self.classes), list(self.classes.values()), self.clip_notes, self.picture)

    def picture(self, clip: Tensor) -> bytes:
        """A PNG of a normalised clip, and of the positions that the last training forward kept."""
        kept = None if self.sampled is None else kept_cells(self.sampled, clip.shape[1])
        return strip(clip * self.std + self.mean, kept)

    def weights_about(self) -> dict[str, str]:
        """The classes' names, by head, in the order of the model's outputs."""
        return {"classes": json.dumps(self.classes)}

    def predictor(self) -> Actions:
        return Actions(self)

    def example(self, samples: int) -> tuple[Tensor, ...]:
        data, chance = self.options.data, torch.Generator().manual_seed(0)
        return (torch.randn(samples, 3, data.frames, data.size, data.size, generator=chance),)
