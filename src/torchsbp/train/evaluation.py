"""Evaluation: a task's metrics for a model on the validation data, over all processes."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn

from ..errors import SignalError
from .config import Config
from .data.broken import Broken
from .data.loader import loader
from .distributed import Processes
from .task import Evaluator, Task


def autocast(config: Config, device: torch.device) -> Any:
    """The context of a forward in the run's precision."""
    if config.precision == "float32":
        return nullcontext()
    return torch.autocast(device.type, getattr(torch, config.precision))


@torch.no_grad()
def evaluated(
    task: Task,
    model: nn.Module,
    config: Config,
    processes: Processes,
    broken: Broken,
    stopping: Callable[[], bool] = lambda: False,
) -> tuple[Evaluator, dict[str, float]]:
    """Return the evaluator, which has seen all validation data, and its result. Raise ``SignalError`` as soon as
    ``stopping()`` is true."""
    model.eval()
    order = task.eval_order(config.per_forward(processes.world), processes.rank, processes.world)
    evaluator, device = task.evaluator(), processes.device
    batches = loader(task.valid_data, order, task.collate, task.workers, pin=device.type == "cuda")
    for number, (batch, unread) in enumerate(batches):
        if stopping():
            raise SignalError
        broken.add(message for _, message in unread)
        valid = order.valid(number)
        skipped = sum(place < valid for place, _ in unread)
        with autocast(config, device):
            evaluator.update(model, task.prepare(batch, training=False), valid - skipped)
    return evaluator, evaluator.result()
