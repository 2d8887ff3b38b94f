"""Charts of runs as SVG. Their colours come from the page's style sheet, light or dark."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from html import escape
from statistics import mean
from typing import NamedTuple

from ..train.record import Metric
from .runs import Point, Run, metrics_of, repetitions, units_of
from .tables import rate_in

COLOURS, DASHES = 8, 4  # how many the style sheet has for series
MOST = 400  # points of a series
WIDTH, HEIGHT, LEFT, BOTTOM, TOP, RIGHT = 520, 300, 58, 40, 14, 14


@dataclass
class Series:
    """A line of a chart. ``spread``: half of the interval of each point, where that is known."""

    name: str
    number: int
    points: list[Point]
    spread: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Axis:
    """The vertical axis, from low to high; ``log``: with a logarithmic scale."""

    low: float
    high: float
    log: bool = False

    @classmethod
    def of(cls, values: Sequence[float], from_zero: bool = False, log: bool = False) -> "Axis":
        """An axis for all values, with a little room."""
        if log:
            return cls(min(values) / 1.3, max(values) * 1.3, log=True)
        low, high = (0.0 if from_zero else min(values)), max(values)
        low, high = (low, high) if high > low else (low - 0.5, high + 0.5)
        padding = 0 if from_zero else 0.04 * (high - low)
        low -= padding
        return cls(low, high + 0.04 * (high - padding - low))

    def place(self, value: float) -> float:
        """The y coordinate of a value in the picture."""
        low, high, value = (math.log10(its) if self.log else its for its in (self.low, self.high, value))
        return round(HEIGHT - BOTTOM - (value - low) / (high - low) * (HEIGHT - BOTTOM - TOP), 1)

    def marks(self) -> dict[float, str]:
        """Round values and their labels."""
        if self.log:
            return {value: short(value) for value in powers(self.low, self.high)}
        values = ticks(self.low, self.high)
        decimals = decimals_of(values)
        return {value: label(value, decimals) for value in values}


def style(number: int) -> str:
    """CSS classes of a series. Series differ in colour, and in dashes for readers who don't see or print colours."""
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


def powers(low: float, high: float) -> list[float]:
    """Powers of ten from low to high; if these are few, also twice and five times each."""
    exponents = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    steps = (1, 2, 5) if high < 100 * low else (1,)
    return [step * 10.0**exponent for exponent in exponents for step in steps if low <= step * 10.0**exponent <= high]


def short(value: float) -> str:
    """A label on a logarithmic axis: 0.001, but 10⁻⁴."""
    if value >= 1e-3:
        return f"{value:g}"
    factor, exponent = f"{value:.0e}".split("e")
    power = "10" + str(int(exponent)).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))
    return power if factor == "1" else f"{factor} · {power}"


def label(value: float, decimals: int = 0) -> str:
    return f"{value:,.{decimals}f}".replace(",", " ")


def decimals_of(values: Sequence[float]) -> int:
    """As many decimals as the value that needs most: 2 for 1.00, 1.25, 1.50."""
    return max((len(f"{value:.8f}".rstrip("0").partition(".")[2]) for value in values), default=0)


def thinned(points: list[Point]) -> list[Point]:
    """Means of neighbours, so that a long run does not make a heavy page."""
    size = -(-len(points) // MOST)
    chunks = [points[i : i + size] for i in range(0, len(points), max(size, 1))]
    return [(mean(x for x, _ in chunk), mean(y for _, y in chunk)) for chunk in chunks]


class Drawing(NamedTuple):
    """A chart: the parts of its SVG picture, the height of that, and (name, number) of each series for the key.
    ``joined``: lines join the points."""

    title: str
    unit: str
    parts: list[str]
    height: int
    key: tuple[tuple[str, int], ...] = ()
    joined: bool = True


def chart(title: str, unit: str, series: Sequence[Series], from_zero: bool = False) -> str:
    """A chart of lines over epochs, "" without points. It has no key: the page's table has one for all charts."""
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
    axis: Axis | None = None,
) -> Drawing:
    """A chart of lines over a quantity, or with ``names`` over 0, 1, …, which they label. ``axis``: a vertical axis
    that several charts share."""
    shown = [Series(s.name, s.number, thinned(s.points), s.spread) for s in series if s.points]
    if not shown:
        return Drawing(title, unit, [], 0)
    axis = axis or Axis.of([value for s in shown for _, value in s.points], from_zero)
    first, right = (-0.5, len(names) - 0.5) if names else (0.0, max(at for s in shown for at, _ in s.points) or 1.0)

    def x(value: float) -> float:
        return round(LEFT + (value - first) / (right - first) * (WIDTH - LEFT - RIGHT), 1)

    parts = [*axes(axis), *foot(x, right, names, below)]
    for s in shown:
        parts += line(s, x, axis, below, joined)
    return Drawing(title, unit, parts, HEIGHT, tuple((s.name, s.number) for s in shown), joined)


def foot(x: Callable[[float], float], right: float, names: Sequence[str], below: str) -> list[str]:
    """The horizontal axis: values or names, and ``below``, which says what they are."""
    level = HEIGHT - BOTTOM
    marks = dict(enumerate(names)) if names else dict.fromkeys(ticks(0, right), "")
    decimals = decimals_of([*marks])
    crowded = 6.5 * max(map(len, names), default=0) > (WIDTH - LEFT - RIGHT) / max(1, len(names))
    lines = [level + 18 + 14 * (crowded and i % 2) for i in range(len(marks))]  # every other name a line lower
    texts = [
        tick_text(x(at), line, escape(name) or label(at, decimals), "middle")
        for line, (at, name) in zip(lines, marks.items(), strict=True)
    ]
    rule = f'<line class="axis" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{level}" y2="{level}"/>'
    return [*texts, rule, tick_text(WIDTH - RIGHT, HEIGHT - 6, below, "end")]


def line(s: Series, x: Callable[[float], float], axis: Axis, below: str, joined: bool) -> list[str]:
    """A series: its line, its points, and their intervals."""
    parts = []
    if joined:
        path = " ".join(f"{x(a)},{axis.place(b)}" for a, b in s.points)
        hint = f"<title>{escape(s.name)}: {s.points[-1][1]:.4g}</title>"
        parts.append(f'<polyline class="line {style(s.number)}" points="{path}">{hint}</polyline>')
    for (a, b), half in zip(s.points, s.spread, strict=False):
        low, high = (axis.place(min(max(b + its, axis.low), axis.high)) for its in (-half, half))
        parts.append(f'<line class="line c{s.number % COLOURS}" x1="{x(a)}" x2="{x(a)}" y1="{low}" y2="{high}"/>')
    if len(s.points) <= 40:
        parts += [
            mark(s.number, x(a), axis.place(b), f"<title>{escape(s.name)}, {below} {a:g}: {b:.4g}</title>")
            for a, b in s.points
        ]
    return parts


def tick_text(x: float, y: float, content: str, anchor: str) -> str:
    return f'<text class="tick" x="{x}" y="{y}" text-anchor="{anchor}">{content}</text>'


def axes(axis: Axis) -> list[str]:
    """Horizontal grid lines with their values."""
    parts = []
    for value, name in axis.marks().items():
        y = axis.place(value)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y}" y2="{y}"/>')
        parts.append(tick_text(LEFT - 8, y + 4, name, "end"))
    return parts


def bars(title: str, unit: str, values: Sequence[tuple[str, int, float | None]]) -> str:
    """A chart with one bar per run."""
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
    """id(run) -> the number that decides how its series looks; all repetitions have the same."""
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
