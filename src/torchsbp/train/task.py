"""What the loop asks of a task: a model, data, a loss and metrics. Everything else is the loop's."""

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from .data import Samples


class Evaluator(Protocol):
    """Collects over batches what the metrics need; ``result`` is called by all processes together."""

    def update(self, model: nn.Module, batch: Any, valid: int) -> None:
        """The first ``valid`` samples of the batch count; the others only fill it."""
        ...

    def result(self) -> dict[str, float]: ...


class Task(Protocol):
    metric: str
    """the metric that decides which checkpoint is best; more is better"""
    train_data: Samples
    valid_data: Samples
    collate: Callable[[list[Any]], Any]

    def model(self) -> nn.Module: ...

    def to(self, device: torch.device, memory_format: torch.memory_format) -> None:
        """Where batches go, and in which layout."""
        ...

    def check(self, micro_batch: int) -> None:
        """Raise ``ValueError`` if this cannot be trained with so many samples per forward."""
        ...

    def prepare(self, batch: Any, training: bool) -> Any:
        """A collated batch on the device, ready for ``loss``: normalised, mixed."""
        ...

    def loss(self, model: nn.Module, batch: Any) -> Tensor: ...

    def evaluator(self) -> Evaluator: ...
