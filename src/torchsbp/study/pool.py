"""Several runs at once on one device, each in a process of its own; what they report comes as it is found."""

import multiprocessing
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from multiprocessing.connection import Connection, wait

from .training import Place, Row, Run, Settings

CONTEXT = multiprocessing.get_context("spawn")
Work = Callable[[Run, Settings, Place], Iterator[Row]]


def reported(work: Work, run: Run, settings: Settings, place: Place) -> Iterator[Row]:
    """Row after row, at last that it is done, or why it failed."""
    try:
        yield from work(run, settings, place)
        yield {"done": True}
    except Exception as error:
        traceback.print_exception(error)
        text = str(error).strip().splitlines() or [""]
        yield {"error": f"{type(error).__name__}: {text[0]}"}


def work_on(pipe: Connection, work: Work, run: Run, settings: Settings, place: Place) -> None:
    """In the child."""
    for row in reported(work, run, settings, place):
        pipe.send(row)
    pipe.close()


def labelled(run: Run, row: Row) -> Row:
    return {"run": run.name} | asdict(run) | row


class Child:
    """The parent's side of a run."""

    def __init__(self, work: Work, run: Run, settings: Settings, place: Place) -> None:
        self.run, self.ended = run, False
        self.pipe, theirs = CONTEXT.Pipe()
        self.process = CONTEXT.Process(target=work_on, args=(theirs, work, run, settings, place), daemon=True)
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
        return row and labelled(self.run, row)


def execute(
    work: Work, runs: Sequence[Run], settings: Settings, place: Place, jobs: int, seconds: float
) -> Iterator[Row]:
    """Rows with their run. After so many seconds nothing new begins, and what still runs is ended. Without ``jobs``
    everything runs here, one after the other."""
    if not jobs:
        for run in runs:
            yield from (labelled(run, row) for row in reported(work, run, settings, place))
        return
    left, end = deque(runs), time.monotonic() + seconds
    alive: dict[object, Child] = {}
    try:
        while (left or alive) and time.monotonic() < end:
            while left and len(alive) < jobs:
                child = Child(work, left.popleft(), settings, place)
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
