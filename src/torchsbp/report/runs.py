"""The record of a run, and what it says about its task: metrics with their titles, units and formats."""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from ..errors import RunError
from ..train.record import BESIDE, FILE, SECTIONS, Metric, read_lines

Point = tuple[float, float]
COMMON = ("epoch", "loss", "lr", "memory_mib", "seconds")
"""keys in the training lines of every task, besides throughput"""


UNDESCRIBED = {
    "unit": "images",
    "metrics": [{"name": "top1", "title": "top-1", "unit": "%", "chart": "Validation accuracy"}],
}
"""the task of a run whose record does not describe it: earlier versions had this one task"""


@dataclass
class Run:
    """The record of one run."""

    name: str
    lines: list[dict[str, Any]]
    folder: Path | None = None

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [line for line in self.lines if line["kind"] == kind]

    @property
    def about(self) -> dict[str, Any]:
        """What the run recorded last about its configuration, task and environment."""
        return next(reversed(self.of("run")), {})

    @property
    def changes(self) -> list[tuple[int, str, list[str]]]:
        """(step, when, what) for every time the run was resumed with other settings."""
        return [(line["step"], line.get("when", ""), line["changed"]) for line in self.of("run") if "changed" in line]

    @property
    def finished(self) -> bool:
        return bool(self.of("end"))

    @property
    def task(self) -> dict[str, Any]:
        return self.about.get("task") or UNDESCRIBED

    @property
    def metrics(self) -> list[Metric]:
        return [Metric.of(recorded) for recorded in self.task["metrics"]]

    @property
    def unit(self) -> str:
        """What throughput counts."""
        return self.task["unit"]

    def curve(self, kind: str, key: str) -> list[Point]:
        """(epoch, value), where there is a value."""
        points: list[tuple[Any, Any]] = [(line.get("epoch"), line.get(key)) for line in self.of(kind)]
        return [(float(x), float(y)) for x, y in points if is_number(x) and is_number(y)]

    def last(self, kind: str, key: str) -> float | None:
        return next((y for _, y in reversed(self.curve(kind, key))), None)

    def evaluated(self, metric: Metric) -> list[Point]:
        """The metric's curve; if there are averaged weights, it is theirs."""
        if metric not in self.metrics:
            return []
        return self.curve("valid", f"ema_{metric.name}") or self.curve("valid", metric.name)

    def result(self, metric: Metric) -> float | None:
        return next((y for _, y in reversed(self.evaluated(metric))), None)

    def best(self, metric: Metric) -> float | None:
        values = [y for _, y in self.evaluated(metric)]
        return (max if metric.higher else min)(values, default=None)

    def loss(self) -> float | None:
        return self.last("train", "loss")

    def memory(self) -> float | None:
        return max((y for _, y in self.curve("train", "memory_mib")), default=None)

    def rates(self) -> list[Point]:
        return self.curve("train", f"{self.unit}_per_s")

    def rate(self) -> float | None:
        rates = [y for _, y in self.rates()]
        return median(rates) if rates else None

    def minutes(self) -> float | None:
        seconds = self.last("train", "seconds")
        return None if seconds is None else seconds / 60

    def further(self) -> list[str]:
        """Further keys in the training lines: several losses by name, or whatever else the loop logs."""
        keys = dict.fromkeys(key for line in self.of("train") for key in line)
        known = ("kind", "step", *COMMON, f"{self.unit}_per_s")
        return [key for key in keys if key not in known and self.curve("train", key)]

    def sections(self) -> list[tuple[str, Path]]:
        """(title, file) of what the task added to its report."""
        found = sorted((self.folder / SECTIONS).iterdir()) if self.folder and (self.folder / SECTIONS).is_dir() else []
        return [(path.stem, path) for path in found if path.suffix in (".html", ".png")]

    def progress(self) -> str:
        steps = self.about.get("steps")
        step = self.lines[-1]["step"]
        state = "finished" if self.finished else f"unfinished, step {step}{f' of {steps}' if steps else ''}"
        changed = ", ".join(str(at) for at, *_ in self.changes)
        return f"{state}; settings changed at step {changed}" if changed else state

    def settings(self) -> str:
        """All settings that two runs share if one repeats the other: all that change training but the seed."""
        config = {k: v for k, v in self.about.get("config", {}).items() if k not in (*BESIDE, "seed")}
        return json.dumps([config or self.name, [(at, what) for at, _, what in self.changes]], sort_keys=True)


def read(path: Path) -> Run:
    folder = path if path.is_dir() else path.parent
    file = path / FILE if path.is_dir() else path
    try:
        lines = read_lines(file)
    except OSError as error:
        raise RunError(f"{path} is no run: {error}") from error
    if not lines:
        raise RunError(f"{file} has no metrics")
    return Run(folder.resolve().name, lines, folder)


def read_all(paths: Sequence[Path]) -> list[Run]:
    """Read runs: each once, even if it is given several times, and under names that all differ."""
    runs: list[Run] = []
    for run in map(read, paths):
        if all(run.lines != other.lines for other in runs):
            runs.append(run)
    return told_apart(runs)


def told_apart(runs: list[Run]) -> list[Run]:
    """Rename runs whose folders have the same name: put as many parent folders before it as make the difference."""
    same: dict[str, list[Run]] = {}
    for run in runs:
        same.setdefault(run.name, []).append(run)
    for group in (group for group in same.values() if len(group) > 1):
        parts = [run.folder.resolve().parts if run.folder else (run.name,) for run in group]
        depths = range(1, 1 + max(map(len, parts)))
        depth = next((n for n in depths if len({its[-n:] for its in parts}) == len(group)), None)
        for number, (run, its) in enumerate(zip(group, parts, strict=True), 1):
            run.name = f"{run.name} ({number})" if depth is None else "/".join(its[-depth:])
    return runs


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def repetitions(runs: Sequence[Run]) -> list[list[Run]]:
    """Groups of runs that differ only by their seed."""
    groups: dict[str, list[Run]] = {}
    for run in runs:
        groups.setdefault(run.settings(), []).append(run)
    return list(groups.values())


def metrics_of(runs: Sequence[Run]) -> list[Metric]:
    """All metrics of these runs' tasks, each once."""
    return list(dict.fromkeys(metric for run in runs for metric in run.metrics))


def units_of(runs: Sequence[Run]) -> list[str]:
    return list(dict.fromkeys(run.unit for run in runs))
