"""``torchsbp report RUN…``: what runs recorded, as a table and as one HTML page with curves. Standard library only."""

import argparse
import json
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from statistics import mean, median, stdev
from typing import Any

Point = tuple[float, float]
COLOURS = 8  # series colours in the style sheet


@dataclass
class Run:
    """The record of one run."""

    name: str
    lines: list[dict[str, Any]]

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [line for line in self.lines if line["kind"] == kind]

    @property
    def about(self) -> dict[str, Any]:
        return next(iter(self.of("run")), {})

    def curve(self, kind: str, key: str) -> list[Point]:
        """(epoch, value), where there is a value."""
        points = [(line["epoch"], line.get(key)) for line in self.of(kind)]
        return [(x, float(y)) for x, y in points if isinstance(y, int | float) and math.isfinite(y)]

    def last(self, kind: str, key: str) -> float | None:
        return next((y for _, y in reversed(self.curve(kind, key))), None)

    def accuracy_key(self) -> str:
        return "ema_top1" if self.curve("valid", "ema_top1") else "top1"

    def accuracy(self) -> float | None:
        return self.last("valid", self.accuracy_key())

    def best(self) -> float | None:
        return max((y for _, y in self.curve("valid", self.accuracy_key())), default=None)

    def loss(self) -> float | None:
        return self.last("train", "loss")

    def memory(self) -> float | None:
        return max((y for _, y in self.curve("train", "memory_mib")), default=None)

    def rate(self) -> float | None:
        rates = [y for _, y in self.curve("train", "images_per_s")]
        return median(rates) if rates else None

    def minutes(self) -> float | None:
        seconds = self.last("train", "seconds")
        return None if seconds is None else seconds / 60

    def progress(self) -> str:
        if self.of("end"):
            return "finished"
        steps = self.about.get("steps")
        step = self.lines[-1]["step"]
        return f"step {step} of {steps}" if steps else f"step {step}"

    def settings(self) -> str:
        """What makes runs repetitions of each other: everything but the seed and the place."""
        config = {k: v for k, v in self.about.get("config", {}).items() if k not in ("out", "seed", "resume", "log")}
        return json.dumps(config or self.name, sort_keys=True)


def read(path: Path) -> Run:
    file = path / "metrics.jsonl" if path.is_dir() else path
    try:
        text = file.read_text()
    except OSError as error:
        raise ValueError(f"{path} is no run: {error}") from error
    lines = []
    for line in text.splitlines():
        try:
            lines.append(json.loads(line))
        except ValueError:
            continue  # half a line of a killed process
    lines = [line for line in lines if isinstance(line, dict) and {"kind", "step"} <= line.keys()]
    if not lines:
        raise ValueError(f"{file} has no metrics")
    return Run(path.name if path.is_dir() else path.parent.name, lines)


def repetitions(runs: Sequence[Run]) -> list[list[Run]]:
    """Runs that differ by their seed only, together."""
    groups: dict[str, list[Run]] = {}
    for run in runs:
        groups.setdefault(run.settings(), []).append(run)
    return list(groups.values())


# Tables

Column = tuple[str, Callable[[Run], float | None], str]
COLUMNS: list[Column] = [
    ("top-1, %", Run.accuracy, ".2f"),
    ("best top-1, %", Run.best, ".2f"),
    ("training loss", Run.loss, ".3f"),
    ("memory, MiB", Run.memory, ".0f"),
    ("images/s", Run.rate, ".0f"),
    ("minutes", Run.minutes, ".1f"),
]


def rows(runs: Sequence[Run]) -> list[list[str]]:
    """A header, a row per run, and the mean ± standard deviation of every group of repetitions."""
    result = [["run", "seed", *(title for title, _, _ in COLUMNS), "state"]]
    for run in runs:
        seed = str(run.about.get("config", {}).get("seed", "–"))
        result.append([run.name, seed, *(number(value(run), form) for _, value, form in COLUMNS), run.progress()])
    for group in repetitions(runs):
        if len(group) > 1:
            cells = [spread([value(run) for run in group], form) for _, value, form in COLUMNS]
            result.append([f"mean of {common(group)}", f"{len(group)} seeds", *cells, ""])
    return result


def number(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)


def spread(values: list[float | None], form: str) -> str:
    known = [value for value in values if value is not None]
    if len(known) < 2:
        return number(known[0] if known else None, form)
    return f"{mean(known):{form}} ± {stdev(known):{form}}"


def common(group: Sequence[Run]) -> str:
    """The beginning that the names share."""
    names = [run.name for run in group]
    length = next((i for i, letters in enumerate(zip(*names, strict=False)) if len(set(letters)) > 1), len(names[0]))
    return names[0][:length].rstrip("_-.0123456789 ") or names[0]


def markdown(table: list[list[str]]) -> str:
    """Aligned, so that it reads in a terminal too."""
    widths = [max(len(row[i]) for row in table) for i in range(len(table[0]))]
    padded = [[cell.ljust(width) for cell, width in zip(row, widths, strict=True)] for row in table]
    lines = [f"| {' | '.join(row)} |" for row in padded]
    lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return "\n".join(lines)


# Pictures: SVG whose colours come from the page's style sheet, light or dark

WIDTH, HEIGHT, LEFT, BOTTOM, TOP, RIGHT = 520, 300, 58, 40, 14, 14


@dataclass
class Series:
    name: str
    colour: int
    points: list[Point]


def ticks(low: float, high: float, about: int = 7) -> list[float]:
    """Round numbers from low to high."""
    span = high - low or 1.0
    rough = span / about
    base = 10 ** math.floor(math.log10(rough))
    step = next(m * base for m in (1, 2, 2.5, 5, 10) if m * base >= rough)
    first = math.ceil(low / step - 1e-9)
    return [n * step for n in range(first, math.floor(high / step + 1e-9) + 1)]


def label(value: float) -> str:
    return f"{value:,.0f}".replace(",", " ") if abs(value) >= 1000 else f"{value:g}"


def thinned(points: list[Point], most: int = 400) -> list[Point]:
    """Means of neighbours, so that a long run does not make a heavy page."""
    size = -(-len(points) // most)
    chunks = [points[i : i + size] for i in range(0, len(points), max(size, 1))]
    return [(mean(x for x, _ in chunk), mean(y for _, y in chunk)) for chunk in chunks]


def chart(title: str, unit: str, series: Sequence[Series], from_zero: bool = False) -> str:
    """Lines over epochs."""
    shown = [Series(s.name, s.colour, thinned(s.points)) for s in series if s.points]
    if not shown:
        return ""
    xs, ys = ([p[i] for s in shown for p in s.points] for i in (0, 1))
    right = max(xs) or 1.0
    low, high = (0.0 if from_zero else min(ys)), max(ys)
    low, high = (low, high) if high > low else (low - 0.5, high + 0.5)
    padding = 0 if from_zero else 0.04 * (high - low)
    low, high = low - padding, high + 0.04 * (high - low)

    def x(value: float) -> float:
        return round(LEFT + value / right * (WIDTH - LEFT - RIGHT), 1)

    def y(value: float) -> float:
        return round(HEIGHT - BOTTOM - (value - low) / (high - low) * (HEIGHT - BOTTOM - TOP), 1)

    def text(a: float, b: float, content: str, anchor: str) -> str:
        return f'<text class="tick" x="{a}" y="{b}" text-anchor="{anchor}">{content}</text>'

    foot = HEIGHT - BOTTOM
    parts = []
    for tick in ticks(low, high):
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(tick)}" y2="{y(tick)}"/>')
        parts.append(text(LEFT - 8, y(tick) + 4, label(tick), "end"))
    parts += [text(x(tick), foot + 18, label(tick), "middle") for tick in ticks(0, right)]
    parts.append(f'<line class="axis" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{foot}" y2="{foot}"/>')
    parts.append(text(WIDTH - RIGHT, HEIGHT - 6, "epoch", "end"))
    for s in shown:
        path = " ".join(f"{x(a)},{y(b)}" for a, b in s.points)
        hint = f"<title>{escape(s.name)}: {label(round(s.points[-1][1], 4))}</title>"
        parts.append(f'<polyline class="line c{s.colour}" points="{path}">{hint}</polyline>')
        if len(s.points) <= 40:
            parts += [
                f'<circle class="dot c{s.colour}" cx="{x(a)}" cy="{y(b)}" r="3">'
                f"<title>{escape(s.name)}, epoch {a:g}: {b:.4g}</title></circle>"
                for a, b in s.points
            ]
    return figure(title, unit, parts, HEIGHT)


def bars(title: str, unit: str, values: Sequence[tuple[str, int, float | None]]) -> str:
    """One bar per run."""
    known = [(name, colour, value) for name, colour, value in values if value is not None]
    if not known:
        return ""
    most = max(value for _, _, value in known) or 1.0
    height = 24 + 34 * len(known)
    parts = []
    for i, (name, colour, value) in enumerate(known):
        top, length = 12 + 34 * i, round(value / most * (WIDTH - 280), 1)
        parts.append(f'<text class="name" x="180" y="{top + 16}" text-anchor="end">{escape(shortened(name))}</text>')
        parts.append(f'<rect class="bar c{colour}" x="190" y="{top}" width="{length}" height="22" rx="3"/>')
        parts.append(f'<text class="tick" x="{198 + length}" y="{top + 16}">{label(round(value, 1))}</text>')
    return figure(title, unit, parts, height)


def shortened(name: str) -> str:
    return name if len(name) <= 26 else name[:25] + "…"


def figure(title: str, unit: str, parts: list[str], height: int) -> str:
    heading = f"<figcaption>{escape(title)} <small>{escape(unit)}</small></figcaption>"
    svg = f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{escape(title)}">{"".join(parts)}</svg>'
    return f"<figure>{heading}{svg}</figure>"


def colours_of(runs: Sequence[Run]) -> dict[int, int]:
    """By the run's id: one colour for all repetitions."""
    return {id(run): i % COLOURS for i, group in enumerate(repetitions(runs)) for run in group}


def charts(runs: Sequence[Run]) -> str:
    colours = colours_of(runs)

    def lines(kind: str, key: Callable[[Run], str], scale: float = 1.0) -> list[Series]:
        return [Series(r.name, colours[id(r)], [(x, y * scale) for x, y in r.curve(kind, key(r))]) for r in runs]

    def values(value: Callable[[Run], float | None]) -> list[tuple[str, int, float | None]]:
        return [(run.name, colours[id(run)], value(run)) for run in runs]

    kinds = {run.about.get("environment", {}).get("memory", "") for run in runs} - {""}
    return "".join(
        [
            chart("Training loss", "", lines("train", lambda r: "loss")),
            chart("Validation accuracy", "top-1, %", lines("valid", Run.accuracy_key)),
            chart("Training time", "minutes", lines("train", lambda r: "seconds", 1 / 60), from_zero=True),
            chart("Learning rate", "", lines("train", lambda r: "lr"), from_zero=True),
            bars("Memory", f"MiB, {' or '.join(sorted(kinds)) or 'peak'}", values(Run.memory)),
            bars("Throughput", "images/s", values(Run.rate)),
        ]
    )


STYLE = """
:root { color-scheme: light dark; --page: #f7f7f5; --card: #fff; --ink: #1c1d1f; --soft: #6a6e74; --rule: #e3e4e1;
  --c0: #0072b2; --c1: #d55e00; --c2: #009e73; --c3: #cc79a7; --c4: #b58900; --c5: #4b9fd5; --c6: #7a5195; --c7: #555; }
@media (prefers-color-scheme: dark) { :root { --page: #15171a; --card: #1e2125; --ink: #e8e9ea; --soft: #9aa0a8;
  --rule: #33373d; --c0: #56b4e9; --c1: #ff9d5c; --c2: #3fd0a4; --c3: #e8a5cb; --c4: #f0c94a; --c5: #8fc7ee;
  --c6: #b697d6; --c7: #bbb; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 2.5rem 1.5rem; max-width: 1180px; background: var(--page); color: var(--ink);
  font: 16px/1.5 system-ui, "Segoe UI", Roboto, "Helvetica Neue", sans-serif; }
h1 { font-size: 1.6rem; margin: 0 0 .2rem; } h2 { font-size: 1.1rem; margin: 2rem 0 .6rem; }
p { color: var(--soft); margin: 0 0 1.5rem; }
.scroll { overflow-x: auto; background: var(--card); border: 1px solid var(--rule); border-radius: 10px; }
table { border-collapse: collapse; width: 100%; font-size: .92rem; font-variant-numeric: tabular-nums; }
th, td { padding: .55rem .7rem; text-align: right; white-space: nowrap; border-bottom: 1px solid var(--rule); }
th:first-child, td:first-child, th:last-child, td:last-child { text-align: left; }
th { color: var(--soft); font-weight: 600; } tr:last-child td { border-bottom: 0; } tr.mean { font-weight: 600; }
.key { display: inline-block; width: .8em; height: .8em; border-radius: 3px; margin-right: .55em; }
.grid-of { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(440px, 100%), 1fr)); gap: 1rem;
  margin-top: 1rem; }
figure { margin: 0; padding: 1rem 1rem .6rem; background: var(--card); border: 1px solid var(--rule);
  border-radius: 10px; }
figcaption { font-weight: 600; margin-bottom: .4rem; } figcaption small { color: var(--soft); font-weight: 400; }
svg { display: block; width: 100%; height: auto; }
.grid { stroke: var(--rule); } .axis { stroke: var(--soft); }
.tick { fill: var(--soft); font-size: 12px; } .name { fill: var(--ink); font-size: 13px; }
.line { fill: none; stroke: var(--c); stroke-width: 1.8; stroke-linejoin: round; } .dot, .bar { fill: var(--c); }
.key { background: var(--c); }
details { margin-top: 1rem; } summary { cursor: pointer; }
pre { overflow-x: auto; padding: 1rem; background: var(--card);
  border: 1px solid var(--rule); border-radius: 10px; font-size: .82rem; }
""" + "".join(f".c{i} {{ --c: var(--c{i}); }}\n" for i in range(COLOURS))


def html(runs: Sequence[Run], title: str) -> str:
    """One page, nothing outside it."""
    header, *body = rows(runs)
    colours = colours_of(runs)
    head = "".join(f"<th>{escape(cell)}</th>" for cell in header)
    lines = []
    for i, row in enumerate(body):
        key = f'<span class="key c{colours[id(runs[i])]}"></span>' if i < len(runs) else ""
        cells = "".join(f"<td>{key if j == 0 else ''}{escape(cell)}</td>" for j, cell in enumerate(row))
        lines.append(f"<tr>{cells}</tr>" if key else f'<tr class="mean">{cells}</tr>')
    settings = "".join(
        f"<details><summary>{escape(run.name)}</summary><pre>{escape(json.dumps(run.about, indent=1))}</pre></details>"
        for run in runs
    )
    where = sorted({about(run) for run in runs} - {""})
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1"><link rel="icon" href="data:,">'
        f"<style>{STYLE}</style></head><body><h1>{escape(title)}</h1><p>{escape('; '.join(where))}</p>"
        f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{"".join(lines)}</tbody></table></div>'
        f'<div class="grid-of">{charts(runs)}</div><h2>Settings</h2>{settings}</body></html>\n'
    )


def about(run: Run) -> str:
    environment = run.about.get("environment", {})
    parts = [environment.get("device", ""), f"torch {environment['torch']}" if "torch" in environment else ""]
    if environment.get("processes", 1) > 1:
        parts.insert(1, f"{environment['processes']} processes")
    return ", ".join(part for part in parts if part)


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="torchsbp report", description="Compare runs: a table and an HTML page.")
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="a run's folder")
    parser.add_argument("--html", type=Path, default=Path("report.html"), help="the page (default: %(default)s)")
    parser.add_argument("--title", default="Training runs")
    options = parser.parse_args(argv)
    try:
        runs = [read(path) for path in options.runs]
        options.html.parent.mkdir(parents=True, exist_ok=True)
        options.html.write_text(html(runs, options.title), encoding="utf-8")
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(markdown(rows(runs)))
    print(f"\npage: {options.html}")
    return 0
