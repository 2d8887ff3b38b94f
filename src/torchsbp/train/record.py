"""What a run's record is made of, for those who write it and those who read it. Standard library only."""

import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

FILE = "metrics.jsonl"
"""in a run's folder: one JSON line per event"""
WEIGHTS = "model.safetensors"
"""in a run's folder, when it has ended"""
SECTIONS = "report"
"""in a run's folder: further parts of its report, a file for each, TITLE.html or TITLE.png"""


@dataclass(frozen=True)
class Metric:
    """A number that evaluation gives, and how it is shown."""

    name: str
    """its key in the lines of the record"""
    title: str = ""
    unit: str = ""
    format: str = ".2f"
    higher: bool = True
    """more is better"""
    column: bool = True
    """in the report's table, its last and its best value"""
    chart: str = ""
    """the title of its curve in the report; none without one"""

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
        """As a run recorded it, maybe of another version."""
        return cls(**{its.name: recorded[its.name] for its in fields(cls) if its.name in recorded})


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The lines of a record that can be used. A killed process may have left half of one, an editor anything."""
    lines = []
    for text in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            line = json.loads(text)
        except ValueError:
            continue
        if isinstance(line, dict) and isinstance(line.get("kind"), str) and isinstance(line.get("step"), int):
            lines.append(line)
    return lines
