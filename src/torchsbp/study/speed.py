"""Time of a training step and peak memory, one run at a time: the contest's table at equal time rests on them."""

import time
from collections.abc import Iterator
from statistics import median

import torch

from ..memory.peak import peak_bytes
from . import results
from .plan import Plan
from .training import Data, Place, Row, Run, Settings, Training

WARM, ROUNDS, STEPS = 5, 5, 8


def jobs(plan: Plan) -> list[Run]:
    return [Run(model, arm) for model in plan.models for arm in plan.arms_of(model, trained=False)]


def work(run: Run, settings: Settings, place: Place) -> Iterator[Row]:
    """Milliseconds of a step (the median of rounds of some), steps in an epoch, and bytes above those of the data."""
    data = Data.load(place.data, settings.images)
    cuda = data.x_train.is_cuda
    before = torch.cuda.memory_allocated() if cuda else 0
    training = Training(run, settings, data)
    chosen = torch.arange(training.batch, device=data.x_train.device)
    times = []
    for number in range(-WARM, ROUNDS):
        if number == 0 and cuda:
            torch.cuda.reset_peak_memory_stats()
        start = time.perf_counter()
        for _ in range(STEPS if number >= 0 else 1):
            training.step(chosen, 0.0)
        if cuda:
            torch.cuda.synchronize()
        times.append((time.perf_counter() - start) / STEPS)
    peak = peak_bytes() - before if cuda else 0
    yield {"ms": 1000 * median(times[WARM:]), "steps": training.steps, "peak_bytes": peak}


def table(rows: list[Row]) -> str:
    measured = {(row["model"], row["arm"]): row for row in results.of(rows, "speed", "ms")}
    cells = []
    for (model, arm), row in measured.items():
        full = measured.get((model, "full"), row)
        memory = results.relative(row["peak_bytes"], full["peak_bytes"])
        epoch = row["ms"] * row["steps"] / 1000
        faster = full["ms"] * full["steps"] / 1000 / epoch
        cells.append((model, arm, f"{row['ms']:.2f}", f"{epoch:.2f}", f"{faster:.2f}×", memory))
    return results.table(("model", "arm", "ms a step", "s an epoch", "speed", "peak memory"), cells)
