"""How far a run is: a bar on a terminal, a line now and then in a log."""

import sys
import time
from typing import Any

from tqdm import tqdm


def progress(total: int, done: int, every_seconds: float, shown: bool) -> Any:
    """An object with tqdm's ``update``, ``set_postfix_str`` and ``close``."""
    if shown and not sys.stderr.isatty():
        return Lines(total, done, every_seconds)
    return tqdm(total=total, initial=done, unit="step", dynamic_ncols=True, disable=not shown)


class Lines:
    """Prints ``step 20 of 90, …, 3:20 left`` as soon as a text is set, then every so many seconds, and at the end."""

    def __init__(self, total: int, done: int, every_seconds: float) -> None:
        self.total, self.done, self.every = total, done, every_seconds
        self.first, self.began = done, time.monotonic()
        self.text, self.told = "", -1
        self.due = 0.0

    def update(self) -> None:
        self.done += 1
        if self.text and time.monotonic() >= self.due:
            self.tell()

    def set_postfix_str(self, text: str) -> None:
        self.text = text

    def tell(self) -> None:
        self.due, self.told = time.monotonic() + self.every, self.done
        left = (time.monotonic() - self.began) / max(self.done - self.first, 1) * (self.total - self.done)
        parts = [f"step {self.done} of {self.total}", *filter(None, [self.text]), f"{tqdm.format_interval(left)} left"]
        print(", ".join(parts), file=sys.stderr, flush=True)

    def close(self) -> None:
        if self.told != self.done > self.first:
            self.tell()
