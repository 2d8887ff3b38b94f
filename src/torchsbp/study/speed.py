"""Time of a training step and peak memory, which the contest's table at equal time needs.

Runs are prepared side by side, as that takes the CPU long. They are timed one at a time, while no other is prepared.
"""

import fcntl
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from ..memory.peak import peak_bytes
from . import results
from .arms import FULL
from .data import Data
from .plan import Plan
from .training import Place, Row, Run, Settings, Training, wait

ROUNDS, STEPS = 8, 20


def jobs(plan: Plan) -> list[Run]:
    return [Run(model, arm) for model in plan.models for arm in plan.arms_of(model)]


def work(run: Run, settings: Settings, place: Place) -> Iterator[Row]:
    """Yield one row: milliseconds of a step in the fastest round, steps in an epoch, peak bytes without the data."""
    data = Data.load(place.data, settings.images)
    cuda = data.device.type == "cuda"
    before = torch.cuda.memory_allocated() if cuda else 0
    with held(place.out, fcntl.LOCK_SH):
        training = Training(run, settings, data)
        wait(data.device)
    captured = training.advance != training.step  # then the capture was the last to allocate memory
    if cuda and not captured:
        torch.cuda.reset_peak_memory_stats()
    with held(place.out, fcntl.LOCK_EX):
        ms = sum(share * timed(training, number) for number, share in parts(training))
    peak = ((training.peak if captured else peak_bytes()) - before) if cuda else 0
    yield {"ms": ms, "steps": training.steps, "peak_bytes": peak}


def parts(training: Training) -> list[tuple[int, float]]:
    """(epoch, share): one epoch of each kind of step that a run has, and the share of the run with such steps."""
    falling = training.settings.decay if training.arm.changes else 0.0
    return [(0, 1 - falling), *([(training.run.epochs - 1, falling)] if falling else [])]


def timed(training: Training, epoch: int) -> float:
    """Milliseconds of a step of that epoch."""
    training.fill(epoch, training.run.epochs)
    wait(training.data.device)
    times = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        for _ in range(STEPS):
            training.advance()
        wait(training.data.device)
        times.append((time.perf_counter() - start) / STEPS)
    return 1000 * min(times)


@contextmanager
def held(folder: Path, lock: int) -> Iterator[None]:
    """Hold the folder's lock: shared while runs are prepared, exclusive while one is timed."""
    with (folder / "speed.lock").open("w") as file:
        fcntl.flock(file, lock)
        yield


def table(rows: list[Row]) -> str:
    measured = {(row["model"], row["arm"]): row for row in results.of(rows, "speed", "ms")}
    cells = []
    for (model, arm), row in measured.items():
        full = measured.get((model, FULL), {"ms": 0, "steps": 0, "peak_bytes": 0})
        memory = results.relative(row["peak_bytes"], full["peak_bytes"])
        epoch, of_full = (its["ms"] * its["steps"] / 1000 for its in (row, full))
        faster = f"{of_full / epoch:.2f}×" if of_full else "–"
        cells.append((model, arm, f"{row['ms']:.2f}", f"{epoch:.2f}", faster, memory))
    return results.table(("model", "arm", "ms a step", "s an epoch", "speed", "peak memory"), cells)
