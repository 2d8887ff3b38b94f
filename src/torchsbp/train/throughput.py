"""Where the time goes: samples per second of the loader alone, of the step alone, and of both together."""

import time
from collections.abc import Iterator
from itertools import repeat
from typing import Any

import torch

from .data.loader import PREFETCH
from .distributed import barrier
from .loop import Trainer

COMPILING = 3  # updates that are not counted, as torch.compile and the allocator are still at work


def warmup(trainer: Trainer) -> int:
    """Updates before the clock starts. They use up the batches that workers prefetched while nothing asked for them."""
    ahead = trainer.task.workers * PREFETCH
    return COMPILING + -(-ahead // trainer.accumulate)


def measure(trainer: Trainer, updates: int) -> dict[str, float]:
    trainer.learner.train()
    trainer.order.epochs = -(-3 * (updates + warmup(trainer)) // trainer.steps_per_epoch) + 1
    batches = trainer.batches()
    rates = {"loader": rate(trainer, batches, updates, step=False)}
    rates["step"] = rate(trainer, repeat(next(batches)), updates, step=True)
    rates["whole"] = rate(trainer, batches, updates, step=True)
    return rates


def rate(trainer: Trainer, batches: Iterator[Any], updates: int, step: bool) -> float:
    """Samples per second, over all processes."""
    for number in range(-warmup(trainer), updates):
        if number == 0:
            wait(trainer)
            start = time.perf_counter()
        if step:
            trainer.update(batches)
        else:
            for _ in range(trainer.accumulate):
                next(batches)
    wait(trainer)
    return updates * trainer.config.batch / (time.perf_counter() - start)


def wait(trainer: Trainer) -> None:
    if trainer.processes.device.type == "cuda":
        torch.cuda.synchronize(trainer.processes.device)
    barrier()


def report(trainer: Trainer, updates: int) -> None:
    rates = measure(trainer, updates)
    if trainer.processes.main:
        for name, value in rates.items():
            print(f"{name:7}{value:10.0f} {trainer.task.unit}/s")
        bound = min(rates["loader"], rates["step"])
        print(f"the whole reaches {rates['whole'] / bound:.0%} of the slower of the two")
