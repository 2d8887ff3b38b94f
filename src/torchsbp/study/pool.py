"""Several runs at once on one device, in processes that report rows as they find them.

A process takes one run after the other. It prefers one of the same model and arm, as it already has what they share.
"""

import multiprocessing
import os
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from itertools import takewhile
from multiprocessing.connection import Connection, wait
from threading import Thread

from .training import Place, Row, Run, Settings

CONTEXT = multiprocessing.get_context("spawn")
Work = Callable[[Run, Settings, Place], Iterator[Row]]


def reported(work: Work, run: Run, settings: Settings, place: Place) -> Iterator[Row]:
    """Yield the rows of a run, then a row that says that it is done, or why it failed."""
    try:
        yield from work(run, settings, place)
        yield {"done": True}
    except Exception as error:
        traceback.print_exception(error)
        text = str(error).strip().splitlines() or [""]
        yield {"error": f"{type(error).__name__}: {text[0]}"}


def work_on(pipe: Connection, work: Work, settings: Settings, place: Place) -> None:
    """The child's loop: do runs from the pipe until it gives None or a run fails, which may leave a GPU unusable."""
    Thread(target=end_with_parent, daemon=True).start()
    while (run := pipe.recv()) is not None:
        for row in reported(work, run, settings, place):
            pipe.send(row)
            if "error" in row:
                return


def end_with_parent() -> None:
    """Wait until the parent has ended, then end this process. A killed parent leaves its children as they are."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def labelled(run: Run, row: Row) -> Row:
    return {"run": run.name} | asdict(run) | row


class Child:
    """The parent's side of a process."""

    def __init__(self, work: Work, settings: Settings, place: Place, run: Run) -> None:
        self.ended = False
        self.pipe, theirs = CONTEXT.Pipe()
        self.process = CONTEXT.Process(target=work_on, args=(theirs, work, settings, place), daemon=True)
        self.process.start()
        theirs.close()
        self.give(run)

    def give(self, run: Run) -> None:
        self.run = run
        self.pipe.send(run)

    def row(self) -> Row | None:
        """The child's next row. When it has ``ended``: None, or a row that says why it failed."""
        try:
            row: Row | None = self.pipe.recv()
        except EOFError:
            self.ended = True
            self.process.join()
            row = {"error": f"the process ended with {self.process.exitcode}"} if self.process.exitcode else None
        return row and labelled(self.run, row)


def next_of(left: list[Run], run: Run | None = None) -> Run:
    """Take out of ``left`` the first run that is like ``run``, or else the first."""

    def kind(its: Run) -> tuple[str, str, float]:
        return its.model, its.arm, its.drop_path

    alike = [its for its in left if run is not None and kind(its) == kind(run)]
    return left.pop(left.index((alike or left)[0]))


def execute(
    work: Work, runs: Sequence[Run], settings: Settings, place: Place, jobs: int, seconds: float
) -> Iterator[Row]:
    """Yield the rows of all runs, labelled with their run, from ``jobs`` processes. After ``seconds`` none is started,
    and those that still run are stopped. With ``jobs=0`` they run in this process, one after the other, to their end.
    """
    left, end = list(runs), time.monotonic() + seconds
    if not jobs:
        for run in takewhile(lambda _: time.monotonic() < end, runs):
            yield from (labelled(run, row) for row in reported(work, run, settings, place))
        return
    alive: dict[object, Child] = {}
    try:
        while (left or alive) and time.monotonic() < end:
            while left and len(alive) < jobs:
                child = Child(work, settings, place, next_of(left))
                alive[child.pipe] = child
            for pipe in wait([child.pipe for child in alive.values()], timeout=min(3600.0, end - time.monotonic())):
                child = alive[pipe]
                row = child.row()
                if child.ended:
                    del alive[pipe]
                elif row and "done" in row:
                    child.give(next_of(left, child.run)) if left else child.pipe.send(None)
                if row is not None:
                    yield row
    finally:
        for child in alive.values():
            child.process.terminate()
        for child in alive.values():
            child.process.join()
