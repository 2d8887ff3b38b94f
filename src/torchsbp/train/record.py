"""The format of a run's record, for the code that writes it and the code that reads it. Standard library only."""

import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

FILE = "metrics.jsonl"
"""in a run's folder: one JSON line per event"""
WEIGHTS = "model.safetensors"
"""in a run's folder: the weights, once it has ended"""
SECTIONS = "report"
"""in a run's folder: a folder with further parts of its report, files TITLE.html or TITLE.png"""

BESIDE = ("out", "resume", "log", "checkpoint", "throughput")
"""options of a run that do not change what it trains"""


@dataclass(frozen=True)
class Metric:
    """A number that an evaluation gives, and how it is shown."""

    name: str
    """its key in the lines of the record"""
    title: str = ""
    unit: str = ""
    format: str = ".2f"
    higher: bool = True
    """more is better"""
    column: bool = True
    """whether the report's table has its last and its best value"""
    chart: str = ""
    """the title of its curve in the report; without a title there is no curve"""

    @property
    def sign(self) -> int:
        return 1 if self.higher else -1

    @property
    def heading(self) -> str:
        return ", ".join(filter(None, (self.title or self.name, self.unit)))

    def recorded(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def of(cls, recorded: dict[str, Any]) -> "Metric":
        """The metric from a run's record, which another version of torchsbp may have written."""
        return cls(**{its.name: recorded[its.name] for its in fields(cls) if its.name in recorded})


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The valid lines of a record. It may have others: a killed process leaves half a line, an editor anything."""
    lines = []
    for text in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            line = json.loads(text)
        except ValueError:
            continue
        if isinstance(line, dict) and isinstance(line.get("kind"), str) and isinstance(line.get("step"), int):
            lines.append(line)
    return lines
