"""Collects the samples that can't be read, and ends a run that has too many."""

from collections.abc import Callable, Iterable
from html import escape

from ...errors import DataError
from ..distributed import gather

TITLE = "Samples that can't be read"
SHOWN = 5


class Broken:
    """Messages about samples that can't be read, each once; more than ``limit`` raise ``DataError``."""

    def __init__(self, limit: int, say: Callable[[str], None]) -> None:
        self.limit, self.say = limit, say
        self.found: set[str] = set()

    def add(self, messages: Iterable[str]) -> None:
        for message in messages:
            if message not in self.found:
                self.found.add(message)
                self.say(f"{message}; skipped, {len(self.found)} of at most {self.limit} (task.data.broken)")
        if len(self.found) > self.limit:
            shown = [*sorted(self.found)[:SHOWN], *(["…"] if len(self.found) > SHOWN else [])]
            raise DataError(
                f"{len(self.found)} samples can't be read, more than the {self.limit} that task.data.broken allows: "
                f"{'; '.join(shown)}"
            )

    def gather(self) -> None:
        """Add what other processes found; too many raise ``DataError`` in all of them."""
        self.add(message for found in gather(self.listed()) for message in found)

    def listed(self) -> list[str]:
        return sorted(self.found)

    def section(self) -> dict[str, str]:
        """Return a section for the report; empty if all samples could be read."""
        lines = "".join(f"<li>{escape(message)}</li>" for message in self.listed())
        return {TITLE: f"<p>{len(self.found)}, skipped.</p><ul>{lines}</ul>"} if lines else {}
