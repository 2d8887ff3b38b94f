"""Results of studies: lines of JSON, statistics over several seeds, and tables."""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import Any, NamedTuple

Row = dict[str, Any]
STUDENT = (12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060, 2.2622)
"""Student's t of two-sided 95 % intervals, for 1, 2, … degrees of freedom. The last is used for more: a little wide."""


class Finding(NamedTuple):
    """What a paper found, what we find, and whether they agree; None if these results can not tell."""

    figure: str
    paper: str
    ours: str
    agrees: bool | None


def above(better: float, worse: float, margin: float) -> bool | None:
    """Whether ``better`` is above ``worse``; None if they are closer than the margin."""
    return None if abs(better - worse) < margin else better > worse


def read(folder: Path) -> list[Row]:
    """The rows of all studies in a folder, without lines that were cut short."""
    rows = []
    for path in sorted(folder.glob("*.jsonl")):
        for line in path.read_text(encoding="utf-8").splitlines():
            try:
                rows.append(json.loads(line))
            except json.JSONDecodeError:
                continue
    return [row for row in rows if "study" in row]


def of(rows: Iterable[Row], study: str, key: str) -> list[Row]:
    """The rows of a study that have this key; the newest where a run was repeated."""
    found = {(row["run"], row.get("epoch")): row for row in rows if row["study"] == study and key in row}
    return list(found.values())


def interval(values: Sequence[float]) -> float | None:
    """Half of the 95 % interval of the mean; None for a single value."""
    n = len(values)
    if n < 2:
        return None
    return STUDENT[min(n - 1, len(STUDENT)) - 1] * stdev(values) / n**0.5


def difference(values: Sequence[float]) -> str:
    """Mean, half interval and number of values: "+0.12 ± 0.34 (5)"."""
    if not values:
        return "–"
    half = interval(values)
    return f"{mean(values):+.2f}{'' if half is None else f' ± {half:.2f}'} ({len(values)})"


def relative(value: float, full: float) -> str:
    """The ratio, such as "0.25×"; "–" if ``full`` was not measured."""
    return f"{value / full:.2f}×" if full else "–"


def table(header: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


def findings_table(findings: Sequence[Finding]) -> str:
    words = {True: "yes", False: "no", None: "open"}
    cells = [(its.figure, its.paper, its.ours, words[its.agrees]) for its in findings]
    return table(("figure", "the paper's finding", "ours", "agrees"), cells)
