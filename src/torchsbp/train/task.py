"""What a task defines: options, model, data and their order, losses, metrics. The loop does everything else."""

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

from ..adapters.blocks import blocks_of
from ..errors import UsageError
from .data.order import EvalOrder, TrainOrder
from .data.samples import Samples
from .predictor import Predictor
from .record import Metric

if TYPE_CHECKING:
    from .config import Optimizer


@dataclass
class TaskOptions:
    """The options under ``task`` in a recipe. A task derives a class with fields of its own."""

    name: str = ""
    """which task: a registered name, or package.module:Class"""


class Evaluator:
    """Collects over batches what the metrics need."""

    def update(self, model: nn.Module, batch: Any, valid: int) -> None:
        """The first ``valid`` samples of the batch count; the others only fill it."""
        raise NotImplementedError

    def result(self) -> dict[str, float]:
        """Values by the metrics' names. All processes call this together, so it can use ``distributed.all_sum``."""
        raise NotImplementedError

    def sections(self) -> Mapping[str, str | bytes]:
        """Further parts of a report: title -> HTML or SVG, or the bytes of a PNG. Called after ``result``, by one
        process."""
        return {}


class Task:
    """The base class of tasks. A subclass names its options, metrics and unit, and makes data, model and loss."""

    Options: ClassVar[type[TaskOptions]] = TaskOptions
    metrics: tuple[Metric, ...]
    best_by: str
    """the metric that decides which checkpoint is best"""
    unit: str = "samples"
    """what throughput counts"""
    workers: int = 0
    """processes that read samples, for each process that trains"""
    notes: tuple[str, ...] = ()
    """what is unexpected about the data: shown when a run begins, and recorded"""
    broken: int = 0
    """how many samples may be unreadable, if the data are ``Samples(…, replace=True)``; one more ends the run"""
    collate: Callable[[list[Any]], Any] = staticmethod(default_collate)
    channels_last: torch.memory_format = torch.channels_last
    """the memory format that the option ``channels_last`` means for this task's models"""

    def __init__(self, options: Any, seed: int) -> None:
        self.options, self.seed = options, seed
        self.to(torch.device("cpu"), torch.contiguous_format)

    @classmethod
    def trained(cls, options: Any, seed: int, about: Mapping[str, str]) -> "Task":
        """The task for weights that are trained already; ``about`` is what ``weights_about`` said of them, {} if that
        is not known. A task that takes from ``about`` what it would otherwise learn from its data (names of classes),
        and opens data only when they are first used, needs no training data to evaluate and no data to predict."""
        return cls(options, seed)

    def check(self, micro_batch: int) -> None:
        """Raise ``UsageError`` if this task cannot be trained with so many samples per forward."""

    # Data: set when the task is made, or opened when they are first used

    @cached_property
    def train_data(self) -> Samples:
        raise NotImplementedError

    @cached_property
    def valid_data(self) -> Samples:
        raise NotImplementedError

    def train_order(self, batch: int, rank: int, world: int, multiple: int) -> TrainOrder:
        """The batches of one process; every epoch has a multiple of ``multiple`` of them."""
        return TrainOrder(len(self.train_data), batch, self.seed, rank, world, multiple)

    def eval_order(self, batch: int, rank: int, world: int) -> EvalOrder:
        return EvalOrder(len(self.valid_data), batch, rank, world)

    def to(self, device: torch.device, memory_format: torch.memory_format) -> None:
        """Set the device and the memory format of batches."""
        self.device, self.memory_format = device, memory_format

    def prepare(self, batch: Any, training: bool) -> Any:
        """Move a collated batch to the device and make it ready for ``loss``."""
        return tree_map_only(Tensor, lambda part: part.to(self.device, non_blocking=True), batch)

    def state(self) -> dict[str, Any]:
        """What the run has found out about its data, for checkpoints. All processes call this together."""
        return {}

    def restore(self, state: dict[str, Any]) -> None:
        """Take over the ``state`` of a checkpoint; it is {} if an older version wrote that."""

    # Model

    def model(self, start: bool) -> nn.Module:
        """Build the model. ``start``: with the weights that training begins from; otherwise the caller loads others."""
        raise NotImplementedError

    def apply_sbp(self, model: nn.Module, config: SBPConfig) -> None:
        torchsbp.apply(model, config=config)

    def set_step(self, model: nn.Module, number: int) -> None:
        """Tell SBP the number of the next training forward, which decides about masks and keep-ratio."""
        torchsbp.set_step(model, number)

    def compile(self, model: nn.Module, mode: str | None = None) -> None:
        """Compile the model in place, or the parts of it that can be; ``mode`` is that of ``torch.compile``."""
        model.compile(mode=mode)

    def sharded(self, model: nn.Module) -> list[str]:
        """The names of the modules that FSDP shards one by one: nothing but a call of the module uses its parameters.
        Raise ``UsageError`` if this task's model can't be sharded."""
        return blocks_of(model)

    def parameters(self, model: nn.Module, optimizer: "Optimizer") -> Any:
        """The first argument for timm's ``create_optimizer_v2``: the model, or parameter groups of the task's own."""
        return model

    # Losses and metrics

    def loss(self, model: nn.Module, batch: Any) -> Tensor | dict[str, Tensor]:
        """The loss, or several by name: each is logged, and their sum is minimised."""
        raise NotImplementedError

    def evaluator(self) -> Evaluator:
        raise NotImplementedError

    def predictor(self) -> Predictor:
        """What ``torchsbp predict`` uses, for inputs without targets."""
        raise UsageError(f"task {self.options.name} has no predictions: its class needs a method predictor()")

    def example(self, samples: int) -> tuple[Tensor, ...]:
        """Example inputs of the model, of so many samples, for ``torchsbp export``."""
        raise UsageError(
            f"task {self.options.name} can't be exported as a model: its class needs a method example(samples); "
            "--format safetensors exports the weights"
        )

    def metric(self, name: str) -> Metric:
        """The metric of this name; "ema_" before it, for averaged weights, makes no difference."""
        return next((m for m in self.metrics if m.name == name.removeprefix("ema_")), Metric(name))

    def weights_about(self) -> dict[str, str]:
        """What users of the weights need to know about them; it is stored with them and given to ``trained``."""
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
