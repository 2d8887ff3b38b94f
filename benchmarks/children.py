"""Cases in processes of their own: prepared several at a time, measured one at a time.

Every case has a clean allocator and compiler, and one that fails, dies or hangs does not affect the others. The time of
steps that wait for the CPU changes by 20 % from one minute to the next, so cases can take turns: all see the same.
"""

import multiprocessing
import os
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import groupby
from multiprocessing.connection import Connection
from multiprocessing.context import BaseContext

from case import Row, Setting

CONTEXT = multiprocessing.get_context("spawn")
OUT_OF_MEMORY = "out of memory"
NO_MEMORY = (OUT_OF_MEMORY, "ALLOC_FAILED", "allocate memory")  # the words of torch, cuBLAS, and torch on a CPU
Work = Callable[[Setting], Iterator[Row]]


def serve(pipe: Connection, work: Work, setting: Setting) -> None:
    """The child's loop: prepare, which is done when ``work`` yields for the first time, then send a row when asked."""
    try:
        rows = work(setting)
        pipe.send(next(rows))
        pipe.recv()
        for row in rows:
            pipe.send(row)
            pipe.recv()
    except EOFError:  # the parent has closed the pipe
        pass
    except Exception as error:
        pipe.send({"error": reason(error)})
    pipe.close()


def reason(error: Exception) -> str:
    text = str(error)
    if isinstance(error, MemoryError) or any(words in text for words in NO_MEMORY):
        return OUT_OF_MEMORY
    traceback.print_exception(error)
    return f"{type(error).__name__}: {text.strip().splitlines()[0] if text.strip() else ''}"


class Child:
    """The parent's side: ``listen`` returns what the child sends next, or an error if it dies or is late."""

    def __init__(self, work: Work, setting: Setting, limit: float, context: BaseContext = CONTEXT) -> None:
        self.setting, self.limit = setting, limit
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=serve, args=(theirs, work, setting))
        self.process.start()
        theirs.close()
        self.deadline = time.monotonic() + limit

    def listen(self) -> Row | None:
        """The next row; None when the child has ended."""
        error: Row | None = {"error": f"not done after {self.limit:.0f} s"}
        try:
            if self.pipe.poll(max(0.0, self.deadline - time.monotonic())):
                return self.pipe.recv()
        except (EOFError, OSError):
            self.process.join()
            code = self.process.exitcode
            error = {"error": f"the process ended with exit code {code}"} if code else None
        self.stop()
        return error

    def measure(self) -> Iterator[Row]:
        """Yield row after row. The child waits in between."""
        row: Row | None = {}
        while row is not None and not self.pipe.closed:
            self.deadline = time.monotonic() + self.limit
            with suppress(OSError):  # the child died while it waited: ``listen`` reports it
                self.pipe.send("measure")
            row = self.listen()
            if row is not None:
                yield row
        self.stop()

    def stop(self) -> None:
        self.process.kill()
        self.process.join()
        self.pipe.close()


def run_group(work: Work, settings: Sequence[Setting], limit: float, turns: bool) -> Iterator[tuple[Setting, Row]]:
    """Yield the rows of all cases as they come. All prepare at the same time. Then one after the other is measured to
    its end, or, with ``turns``, they give one row each in turn."""
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = str(max(1, (os.cpu_count() or 1) // len(settings)))
    children = [Child(work, setting, limit) for setting in settings]
    try:
        prepared = [child.listen() for child in children]
        left = [iter([said]) if said else child.measure() for child, said in zip(children, prepared, strict=True)]
        pending = list(zip(children, left, strict=True))
        while pending:
            child, rows = pending.pop(0)
            row = next(rows, None)
            if row is not None:
                yield child.setting, child.setting.names | row
                pending.insert(len(pending) if turns else 0, (child, rows))
    finally:
        for child in children:
            child.stop()


def run(work: Work, settings: Sequence[Setting], jobs: int, limit: float, turns: bool = False) -> Iterator[Row]:
    """Yield rows as they are measured. A case that runs out of memory beside the others of its group runs again alone.
    If cases take turns, a row is the middle one of those that its case has had so far."""
    for group in groups(settings, jobs):
        again = []
        found = run_group(work, group, limit, turns)
        for setting, row in middles(found) if turns else found:
            if len(group) > 1 and row.get("error") == OUT_OF_MEMORY:
                again.append(setting)
            else:
                yield row
        for setting in again:
            yield from run(work, [setting], 1, limit, turns)


def middles(found: Iterator[tuple[Setting, Row]]) -> Iterator[tuple[Setting, Row]]:
    """Replace every row by the middle one of its case so far."""
    rounds: dict[int, list[Row]] = {}
    for setting, row in found:
        if "error" not in row:
            rounds.setdefault(id(setting), []).append(row)
            row = middle(rounds[id(setting)])
        yield setting, row


def middle(rounds: Sequence[Row]) -> Row:
    """The row of a case with the median step time; if there are several rows, with the times of all."""
    row = sorted(rounds, key=lambda row: row["step ms"])[(len(rounds) - 1) // 2]
    return row | {"rounds ms": [each["step ms"] for each in rounds]} if len(rounds) > 1 else row


def replaced(rows: Sequence[Row], row: Row, names: Sequence[str]) -> list[Row]:
    """The rows with this one added, which replaces an earlier row of the same case (one with the same names)."""
    return [*(known for known in rows if any(known[name] != row[name] for name in names)), row]


def groups(settings: Sequence[Setting], jobs: int) -> list[list[Setting]]:
    """Groups of up to ``jobs`` cases, in order. The methods of a model and mode stay together where they fit."""
    found: list[list[Setting]] = []
    for _, same in groupby(settings, key=lambda setting: (setting.model, setting.mode)):
        family = list(same)
        if found and len(found[-1]) + len(family) <= jobs:
            found[-1] += family
        else:
            found += [family[i : i + jobs] for i in range(0, len(family), jobs)]
    return found
