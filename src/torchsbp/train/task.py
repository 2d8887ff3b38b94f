"""What a task brings: options, model, data and their order, losses, metrics. Everything else is the loop's."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only
from torch.utils.data import default_collate

import torchsbp
from torchsbp import SBPConfig

from ..errors import UsageError
from .data.order import EvalOrder, TrainOrder
from .data.samples import Samples
from .predictor import Predictor
from .record import Metric

if TYPE_CHECKING:
    from .config import Optimizer


@dataclass
class TaskOptions:
    """What a recipe says under ``task``; a task adds fields of its own."""

    name: str = ""
    """which task: a registered name, or package.module:Class"""


class Evaluator:
    """Collects over batches what the metrics need."""

    def update(self, model: nn.Module, batch: Any, valid: int) -> None:
        """The first ``valid`` samples of the batch count; the others only fill it."""
        raise NotImplementedError

    def result(self) -> dict[str, float]:
        """By the metrics' names. Called by all processes together: ``distributed.all_sum`` adds theirs."""
        raise NotImplementedError

    def sections(self) -> Mapping[str, str | bytes]:
        """Further parts of a report: title -> HTML or SVG, or the bytes of a PNG. Called after ``result``, by one
        process."""
        return {}


class Task:
    """A task is a subclass: it names its options, its metrics and its unit, and makes its data when it is made."""

    Options: ClassVar[type[TaskOptions]] = TaskOptions
    metrics: tuple[Metric, ...]
    best_by: str
    """the metric that decides which checkpoint is best"""
    unit: str = "samples"
    """what throughput counts"""
    workers: int = 0
    """processes that read samples, for each process that trains"""
    notes: tuple[str, ...] = ()
    """said when a run begins, and recorded: what of the data is not as one might expect"""
    broken: int = 0
    """samples that may be unreadable, if the data are ``Samples(…, replace=True)``; one more ends the run"""
    collate: Callable[[list[Any]], Any] = staticmethod(default_collate)
    channels_last: torch.memory_format = torch.channels_last
    """what the option of this name means for the model's convolutions"""

    def __init__(self, options: Any, seed: int) -> None:
        self.options, self.seed = options, seed
        self.to(torch.device("cpu"), torch.contiguous_format)

    @classmethod
    def trained(cls, options: Any, seed: int, about: Mapping[str, str]) -> "Task":
        """The task of weights that are trained already; ``about`` is what ``weights_about`` said of them, {} if that is
        not known. A task that opens its data when they are first used, and takes from there what it would learn from
        them (names of classes), is evaluated without training data and predicts without any."""
        return cls(options, seed)

    def check(self, micro_batch: int) -> None:
        """Raise ``UsageError`` if this cannot be trained with so many samples per forward."""

    # Data: set when the task is made, or opened when they are first used

    @cached_property
    def train_data(self) -> Samples:
        raise NotImplementedError

    @cached_property
    def valid_data(self) -> Samples:
        raise NotImplementedError

    def train_order(self, batch: int, rank: int, world: int, multiple: int) -> TrainOrder:
        """Batches of one process; a multiple of ``multiple`` in every epoch."""
        return TrainOrder(len(self.train_data), batch, self.seed, rank, world, multiple)

    def eval_order(self, batch: int, rank: int, world: int) -> EvalOrder:
        return EvalOrder(len(self.valid_data), batch, rank, world)

    def to(self, device: torch.device, memory_format: torch.memory_format) -> None:
        """Where batches go, and in which layout."""
        self.device, self.memory_format = device, memory_format

    def prepare(self, batch: Any, training: bool) -> Any:
        """A collated batch on the device, ready for ``loss``."""
        return tree_map_only(Tensor, lambda part: part.to(self.device, non_blocking=True), batch)

    def state(self) -> dict[str, Any]:
        """What the run has learned of its data, for checkpoints; called in all processes together."""
        return {}

    def restore(self, state: dict[str, Any]) -> None:
        """Of such a checkpoint; {} of an older one."""

    # Model

    def model(self, start: bool) -> nn.Module:
        """``start``: with the weights that training begins from; without, others will be loaded."""
        raise NotImplementedError

    def apply_sbp(self, model: nn.Module, config: SBPConfig) -> None:
        torchsbp.apply(model, config=config)

    def set_step(self, model: nn.Module, number: int) -> None:
        """Tell SBP which training forward comes: masks and keep-ratio follow that number."""
        torchsbp.set_step(model, number)

    def compile(self, model: nn.Module, mode: str | None = None) -> None:
        """In place, in a mode of ``torch.compile``: the model, or the parts of it that can be."""
        model.compile(mode=mode)

    def parameters(self, model: nn.Module, optimizer: "Optimizer") -> Any:
        """What timm's ``create_optimizer_v2`` is given: the model, whose groups it makes, or groups of your own."""
        return model

    # Losses and metrics

    def loss(self, model: nn.Module, batch: Any) -> Tensor | dict[str, Tensor]:
        """Several are logged by name; their sum is trained."""
        raise NotImplementedError

    def evaluator(self) -> Evaluator:
        raise NotImplementedError

    def predictor(self) -> Predictor:
        """For inputs without targets (``torchsbp predict``)."""
        raise UsageError(f"task {self.options.name} has no predictions: its class needs a method predictor()")

    def example(self, samples: int) -> tuple[Tensor, ...]:
        """What the model is called with, of so many samples (``torchsbp export``)."""
        raise UsageError(f"task {self.options.name} can't be exported: its class needs a method example(samples)")

    def metric(self, name: str) -> Metric:
        """By its name, or that of its value for averaged weights."""
        return next((m for m in self.metrics if m.name == name.removeprefix("ema_")), Metric(name))

    def weights_about(self) -> dict[str, str]:
        """What whoever uses the weights needs to know, stored with them; see ``trained``."""
        return {}

    def described(self) -> dict[str, Any]:
        """What a report needs to show a run of this task."""
        return {
            "name": self.options.name,
            "unit": self.unit,
            "best_by": self.best_by,
            "metrics": [metric.recorded() for metric in self.metrics],
            **({"notes": list(self.notes)} if self.notes else {}),
        }
