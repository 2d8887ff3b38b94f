"""SIGTERM and SIGINT ask the loop to stop; a second one ends the process at once."""

import signal
from types import FrameType
from typing import Any


class Signals:
    """A context in which ``came`` says whether a signal has come."""

    def __init__(self) -> None:
        self.came = False
        self.before: dict[int, Any] = {}

    def __enter__(self) -> "Signals":
        self.before = {number: signal.signal(number, self.note) for number in (signal.SIGTERM, signal.SIGINT)}
        return self

    def note(self, number: int, frame: FrameType | None) -> None:
        self.came = True
        self.__exit__()

    def __exit__(self, *_: Any) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)
