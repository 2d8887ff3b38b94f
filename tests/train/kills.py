"""Runs that are killed: a run says when a phase begins, and SIGKILL comes at a random moment from then on."""

import random
import subprocess
import time
from collections.abc import Callable
from functools import partial, wraps
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from torchsbp.train.loop import Trainer

from .runs import ENVIRONMENT, SERVER, command, fork, ranks

PHASES = {"importing": 3.0, "starting": 0.3, "training": 0.03, "evaluating": 0.1, "saving": 0.02, "finishing": 0.02}
"""and about how long each lasts, in seconds"""
METHODS = {"training": "update", "evaluating": "evaluate", "saving": "save", "finishing": "finish"}


def announce(connection: Connection) -> None:
    """In the process that trains."""
    connection.send("starting")
    for phase, name in METHODS.items():
        setattr(Trainer, name, announced(getattr(Trainer, name), partial(connection.send, phase)))


def announced(method: Callable[..., Any], say: Callable[[], None]) -> Callable[..., Any]:
    @wraps(method)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        say()
        return method(*args, **kwargs)

    return wrapper


def killed(path: Path, phase: str, processes: int, chance: random.Random) -> str | None:
    """Resume and SIGKILL in this phase or soon after: in which one it was, None if the run had ended."""
    if phase == "importing":
        return killed_while_importing(path, chance.uniform(0, PHASES[phase]))
    receiver, sender = SERVER.Pipe(duplex=False)
    resumed = [
        fork(path, "--resume=auto", told=path.parent / f"{rank}", environment=environment,
             before=partial(announce, sender) if rank == 0 else None)
        for rank, environment in enumerate(ranks(processes))
    ]  # fmt: skip
    sender.close()
    wait_for(receiver, phase, chance.randint(1, 4) if phase in ("training", "saving") else 1)
    time.sleep(chance.uniform(0, PHASES[phase]))
    chance.shuffle(resumed)
    alive = all(process.is_alive() for process in resumed)
    for process in resumed:
        process.kill()
    for process in resumed:
        process.join()
    return wait_for(receiver) or phase if alive else None


def killed_while_importing(path: Path, seconds: float) -> str:
    process = subprocess.Popen(
        command(path, "--resume=auto"), env=ENVIRONMENT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    time.sleep(seconds)
    process.kill()
    process.wait()
    return "importing"


def wait_for(receiver: Connection, phase: str | None = None, times: int = 1) -> str | None:
    """The last phase that was announced, once ``phase`` was so often, or when no more will come."""
    last = None
    try:
        while times:
            last = receiver.recv()
            times -= last == phase
    except EOFError:
        pass
    return last


def ended(path: Path, processes: int = 1) -> Path:
    """Resumed to the end: the run's folder."""
    told = [path.parent / f"{rank}" for rank in range(processes)]
    resumed = [
        fork(path, "--resume=auto", told=file, environment=environment)
        for file, environment in zip(told, ranks(processes), strict=True)
    ]
    for process, file in zip(resumed, told, strict=True):
        process.join(120)
        assert process.exitcode == 0, file.read_text()
    return path.parent / "run"
