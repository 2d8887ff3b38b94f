"""Several runs at once on one device, each in a process of its own; what they report comes as it is found."""

import multiprocessing
import time
import traceback
from collections import deque
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path

import torch

from .training import Data, Row, Run, Settings, train

CONTEXT = multiprocessing.get_context("spawn")


def work(pipe: Connection, run: Run, settings: Settings, path: Path) -> None:
    """In the child: row after row, an error if it fails."""
    try:
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        for row in train(run, settings, Data.load(path, device)):
            pipe.send(row)
    except Exception as error:
        traceback.print_exception(error)
        text = str(error).strip().splitlines() or [""]
        pipe.send({"error": f"{type(error).__name__}: {text[0]}"})
    pipe.close()


class Child:
    """The parent's side of a run."""

    def __init__(self, run: Run, settings: Settings, path: Path) -> None:
        self.run, self.ended = run, False
        self.pipe, theirs = CONTEXT.Pipe()
        self.process = CONTEXT.Process(target=work, args=(theirs, run, settings, path), daemon=True)
        self.process.start()
        theirs.close()

    def row(self) -> Row | None:
        """What it says next; None, or why it failed, when it has ``ended``."""
        try:
            row: Row | None = self.pipe.recv()
        except EOFError:
            self.ended = True
            self.process.join()
            row = {"error": f"the process ended with {self.process.exitcode}"} if self.process.exitcode else None
        return row and {"run": self.run.name, "model": self.run.model, "arm": self.run.arm, "seed": self.run.seed} | row


def execute(runs: Sequence[Run], settings: Settings, path: Path, jobs: int, seconds: float) -> Iterator[Row]:
    """Rows with the name of their run. After so many seconds nothing new begins, and what still runs is ended."""
    left, end = deque(runs), time.monotonic() + seconds
    alive: dict[object, Child] = {}
    try:
        while (left or alive) and time.monotonic() < end:
            while left and len(alive) < jobs:
                child = Child(left.popleft(), settings, path)
                alive[child.pipe] = child
            for pipe in wait([child.pipe for child in alive.values()], timeout=min(3600.0, end - time.monotonic())):
                row = alive[pipe].row()
                if alive[pipe].ended:
                    del alive[pipe]
                if row is not None:
                    yield row
    finally:
        for child in alive.values():
            child.process.terminate()
            child.process.join()
