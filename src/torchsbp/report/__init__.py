"""The records of runs as a table, and as one HTML page with curves. Standard library only."""

from .page import html
from .runs import Run, read, read_all, repetitions
from .tables import markdown, rows

__all__ = ["Run", "html", "markdown", "read", "read_all", "repetitions", "rows"]
