"""Runs as rows of a table. Columns are the metrics of their tasks, and what every run has."""

from collections.abc import Callable, Sequence
from statistics import mean, stdev
from typing import NamedTuple

from ..train.record import Metric
from .runs import Run, metrics_of, repetitions, units_of


class Column(NamedTuple):
    title: str
    value: Callable[[Run], float | None]
    format: str


def columns(runs: Sequence[Run]) -> list[Column]:
    result = [column for metric in metrics_of(runs) if metric.column for column in last_and_best(metric)]
    result.append(Column("training loss", Run.loss, ".3f"))
    result.append(Column("memory, MiB", Run.memory, ".1f"))
    result += [Column(f"{unit}/s", rate_in(unit), ".0f") for unit in units_of(runs)]
    result.append(Column("minutes", Run.minutes, ".1f"))
    return result


def last_and_best(metric: Metric) -> list[Column]:
    return [
        Column(metric.heading, lambda run: run.result(metric), metric.format),
        Column(f"best {metric.heading}", lambda run: run.best(metric), metric.format),
    ]


def rate_in(unit: str) -> Callable[[Run], float | None]:
    return lambda run: run.rate() if run.unit == unit else None


def rows(runs: Sequence[Run]) -> list[list[str]]:
    """A header, a row per run, and the mean ± standard deviation of the finished ones in every group of repetitions."""
    shown = columns(runs)
    result = [["run", "seed", *(column.title for column in shown), "state"]]
    for run in runs:
        seed = str(run.about.get("config", {}).get("seed", "–"))
        cells = [number(column.value(run), column.format) for column in shown]
        result.append([run.name, seed, *cells, run.progress()])
    for group in repetitions(runs):
        whole = [run for run in group if run.finished]
        if len(whole) > 1:
            cells = [spread([column.value(run) for run in whole], column.format) for column in shown]
            left = len(group) - len(whole)
            result.append(
                [f"mean of {common(whole)}", seeds(whole), *cells, f"without {left} unfinished" if left else ""]
            )
    return result


def seeds(group: Sequence[Run]) -> str:
    different = len({run.about.get("config", {}).get("seed") for run in group})
    return (
        f"{different} seeds"
        if different == len(group)
        else f"{len(group)} runs of {different} seed{'s' if different > 1 else ''}"
    )


def number(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)


def spread(values: list[float | None], form: str) -> str:
    known = [value for value in values if value is not None]
    if len(known) < 2:
        return number(known[0] if known else None, form)
    return f"{mean(known):{form}} ± {stdev(known):{form}}"


def common(group: Sequence[Run]) -> str:
    """The beginning that the names of the runs share."""
    names = [run.name for run in group]
    length = next((i for i, letters in enumerate(zip(*names, strict=False)) if len(set(letters)) > 1), len(names[0]))
    return names[0][:length].rstrip("_-.0123456789 ") or names[0]


def markdown(table: list[list[str]]) -> str:
    """The table in Markdown, aligned so that it can be read in a terminal too."""
    widths = [max(len(row[i]) for row in table) for i in range(len(table[0]))]
    padded = [[cell.ljust(width) for cell, width in zip(row, widths, strict=True)] for row in table]
    lines = [f"| {' | '.join(row)} |" for row in padded]
    lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return "\n".join(lines)
