"""Pictures of runs: SVG whose colours come from the page's style sheet, light or dark."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from statistics import mean
from typing import NamedTuple

from ..train.record import Metric
from .runs import Point, Run, metrics_of, repetitions, units_of
from .tables import rate_in

COLOURS, DASHES = 8, 4  # of series, in the style sheet
WIDTH, HEIGHT, LEFT, BOTTOM, TOP, RIGHT = 520, 300, 58, 40, 14, 14


@dataclass
class Series:
    name: str
    number: int
    points: list[Point]


def style(number: int) -> str:
    """The classes of a series: told apart by colour, and by dashes for those who don't see it or print it."""
    return f"c{number % COLOURS} d{(number + number // COLOURS) % DASHES}"


def mark(number: int, x: float, y: float, hint: str) -> str:
    """A point of a series: a disc, a square, a triangle or a diamond."""
    shapes = ["M-3,0a3,3 0 1,0 6,0a3,3 0 1,0 -6,0", "M-3,-3h6v6h-6z", "M0,-4l4,7h-8z", "M0,-4l4,4l-4,4l-4,-4z"]
    shape = shapes[(number + number // COLOURS) % DASHES]
    return f'<path class="dot c{number % COLOURS}" transform="translate({x},{y})" d="{shape}">{hint}</path>'


def ticks(low: float, high: float, about: int = 7) -> list[float]:
    """Round numbers from low to high."""
    span = high - low or 1.0
    rough = span / about
    base = 10 ** math.floor(math.log10(rough))
    step = next(m * base for m in (1, 2, 2.5, 5, 10) if m * base >= rough)
    first = math.ceil(low / step - 1e-9)
    return [n * step for n in range(first, math.floor(high / step + 1e-9) + 1)]


def label(value: float, decimals: int = 0) -> str:
    return f"{value:,.{decimals}f}".replace(",", " ")


def decimals_of(values: Sequence[float]) -> int:
    """As many as the one that needs most: 1.00, 1.25, 1.50."""
    return max((len(f"{value:.8f}".rstrip("0").partition(".")[2]) for value in values), default=0)


def thinned(points: list[Point], most: int = 400) -> list[Point]:
    """Means of neighbours, so that a long run does not make a heavy page."""
    size = -(-len(points) // most)
    chunks = [points[i : i + size] for i in range(0, len(points), max(size, 1))]
    return [(mean(x for x, _ in chunk), mean(y for _, y in chunk)) for chunk in chunks]


class Drawing(NamedTuple):
    """A chart: what is in its picture, how high that is, and (name, number) of the series to explain beside it;
    ``joined``: their points are."""

    title: str
    unit: str
    parts: list[str]
    height: int
    key: tuple[tuple[str, int], ...] = ()
    joined: bool = True


def chart(title: str, unit: str, series: Sequence[Series], from_zero: bool = False) -> str:
    """Lines over epochs; "" without points. The page explains them once for all its charts."""
    drawing = curves(title, unit, series, "epoch", from_zero)
    return figure(drawing.title, drawing.unit, drawing.parts, drawing.height) if drawing.key else ""


def curves(
    title: str,
    unit: str,
    series: Sequence[Series],
    below: str,
    from_zero: bool = False,
    names: Sequence[str] = (),
    joined: bool = True,
) -> Drawing:
    """Lines over a quantity, or, with ``names``, over 0, 1, …, which are called that."""
    shown = [Series(s.name, s.number, thinned(s.points)) for s in series if s.points]
    if not shown:
        return Drawing(title, unit, [], 0)
    xs, ys = ([p[i] for s in shown for p in s.points] for i in (0, 1))
    first, right = (-0.5, len(names) - 0.5) if names else (0.0, max(xs) or 1.0)
    low, high = (0.0 if from_zero else min(ys)), max(ys)
    low, high = (low, high) if high > low else (low - 0.5, high + 0.5)
    padding = 0 if from_zero else 0.04 * (high - low)
    low, high = low - padding, high + 0.04 * (high - low)

    def x(value: float) -> float:
        return round(LEFT + (value - first) / (right - first) * (WIDTH - LEFT - RIGHT), 1)

    def y(value: float) -> float:
        return round(HEIGHT - BOTTOM - (value - low) / (high - low) * (HEIGHT - BOTTOM - TOP), 1)

    foot = HEIGHT - BOTTOM
    parts = axes(ticks(low, high), y)
    marks = dict(enumerate(names)) if names else dict.fromkeys(ticks(0, right), "")
    decimals = decimals_of([*marks])
    crowded = 6.5 * max(map(len, names), default=0) > (WIDTH - LEFT - RIGHT) / max(1, len(names))
    lines = [foot + 18 + 14 * (crowded and i % 2) for i in range(len(marks))]  # every other name a line lower
    parts += [
        tick_text(x(at), line, escape(name) or label(at, decimals), "middle")
        for line, (at, name) in zip(lines, marks.items(), strict=True)
    ]
    parts.append(f'<line class="axis" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{foot}" y2="{foot}"/>')
    parts.append(tick_text(WIDTH - RIGHT, HEIGHT - 6, below, "end"))
    for s in shown:
        path = " ".join(f"{x(a)},{y(b)}" for a, b in s.points)
        hint = f"<title>{escape(s.name)}: {s.points[-1][1]:.4g}</title>"
        if joined:
            parts.append(f'<polyline class="line {style(s.number)}" points="{path}">{hint}</polyline>')
        if len(s.points) <= 40:
            parts += [
                mark(s.number, x(a), y(b), f"<title>{escape(s.name)}, {below} {a:g}: {b:.4g}</title>")
                for a, b in s.points
            ]
    return Drawing(title, unit, parts, HEIGHT, tuple((s.name, s.number) for s in shown), joined)


def tick_text(x: float, y: float, content: str, anchor: str) -> str:
    return f'<text class="tick" x="{x}" y="{y}" text-anchor="{anchor}">{content}</text>'


def axes(beside: Sequence[float], y: Callable[[float], float]) -> list[str]:
    """Lines across, with their values."""
    parts = []
    for tick in beside:
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(tick)}" y2="{y(tick)}"/>')
        parts.append(tick_text(LEFT - 8, y(tick) + 4, label(tick, decimals_of(beside)), "end"))
    return parts


def bars(title: str, unit: str, values: Sequence[tuple[str, int, float | None]]) -> str:
    """One bar per run."""
    known = [(name, number, value) for name, number, value in values if value is not None]
    if not known:
        return ""
    most = max(value for _, _, value in known) or 1.0
    height = 24 + 34 * len(known)
    parts = []
    for i, (name, number, value) in enumerate(known):
        top, length = 12 + 34 * i, round(value / most * (WIDTH - 280), 1)
        parts.append(f'<text class="name" x="180" y="{top + 16}" text-anchor="end">{escape(shortened(name))}</text>')
        parts.append(f'<rect class="bar c{number % COLOURS}" x="190" y="{top}" width="{length}" height="22" rx="3"/>')
        parts.append(f'<text class="tick" x="{198 + length}" y="{top + 16}">{label(value, 1)}</text>')
    return figure(title, unit, parts, height)


def shortened(name: str) -> str:
    return name if len(name) <= 26 else name[:25] + "…"


def figure(title: str, unit: str, parts: list[str], height: int) -> str:
    heading = f"<figcaption>{escape(title)} <small>{escape(unit)}</small></figcaption>"
    svg = f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{escape(title)}">{"".join(parts)}</svg>'
    return f"<figure>{heading}{svg}</figure>"


def numbers_of(runs: Sequence[Run]) -> dict[int, int]:
    """By the run's id: all repetitions look the same."""
    return {id(run): i for i, group in enumerate(repetitions(runs)) for run in group}


def charts(runs: Sequence[Run]) -> str:
    """Losses, the tasks' metrics, time and learning rate over epochs; memory and throughput as bars."""
    numbers = numbers_of(runs)

    def lines(curve: Callable[[Run], list[Point]], scale: float = 1.0) -> list[Series]:
        return [Series(run.name, numbers[id(run)], [(x, y * scale) for x, y in curve(run)]) for run in runs]

    def training(key: str) -> Callable[[Run], list[Point]]:
        return lambda run: run.curve("train", key)

    def metric_chart(metric: Metric) -> str:
        return chart(metric.chart, metric.heading, lines(lambda run: run.evaluated(metric)))

    def values(value: Callable[[Run], float | None]) -> list[tuple[str, int, float | None]]:
        return [(run.name, numbers[id(run)], value(run)) for run in runs]

    kinds = {run.about.get("environment", {}).get("memory", "") for run in runs} - {""}
    further = dict.fromkeys(key for run in runs for key in run.further())
    return "".join(
        [
            chart("Training loss", "", lines(training("loss"))),
            *(metric_chart(metric) for metric in metrics_of(runs) if metric.chart),
            *(chart(key.replace("_", " ").capitalize(), "", lines(training(key))) for key in further),
            chart("Training time", "minutes", lines(training("seconds"), 1 / 60), from_zero=True),
            chart("Learning rate", "", lines(training("lr")), from_zero=True),
            bars("Memory", f"MiB, {' or '.join(sorted(kinds)) or 'peak'}", values(Run.memory)),
            *(bars("Throughput", f"{unit}/s", values(rate_in(unit))) for unit in units_of(runs)),
        ]
    )
