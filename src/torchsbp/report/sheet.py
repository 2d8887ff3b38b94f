"""Sheets: several charts with their keys in one SVG file that needs no page, in the page's colours."""

from collections.abc import Mapping, Sequence
from html import escape

from .charts import WIDTH, Axis, Drawing, Series, curves, mark, style
from .page import CHART_STYLE, COLOUR_STYLE
from .runs import Point

COLUMNS, GAP, HEAD, LINE = 2, 28, 26, 20
STYLE = """
.sheet { fill: var(--card); } .frame { fill: none; stroke: var(--rule); }
text { font-family: system-ui, "Segoe UI", Roboto, "Helvetica Neue", sans-serif; }
.title { fill: var(--ink); font-size: 15px; font-weight: 600; } .unit { fill: var(--soft); font-weight: 400; }
"""


def drawn(
    title: str,
    unit: str,
    below: str,
    lines: Mapping[str, Sequence[Point]],
    *,
    names: Sequence[str] = (),
    joined: bool = True,
    axis: Axis | None = None,
    numbers: Mapping[str, int] | None = None,
    spreads: Mapping[str, Sequence[float]] | None = None,
) -> Drawing:
    """A chart of lines by name. ``numbers``, by default their order, decide how they look; ``spreads`` are half of the
    interval of each point."""
    series = [
        Series(name, (numbers or {}).get(name, i), list(points), list((spreads or {}).get(name, ())))
        for i, (name, points) in enumerate(lines.items())
    ]
    return curves(title, unit, series, below, names=names, joined=joined, axis=axis)


def sheet(drawings: Sequence[Drawing]) -> str:
    """All charts in one SVG, row by row."""
    parts, top = [], GAP
    columns = min(COLUMNS, len(drawings))
    for start in range(0, len(drawings), columns):
        row = drawings[start : start + columns]
        parts += [placed(its, GAP + (WIDTH + GAP) * column, top) for column, its in enumerate(row)]
        top += max(HEAD + its.height + key_height(its) for its in row) + GAP
    width = GAP + (WIDTH + GAP) * columns
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {top}" width="{width}" height="{top}">'
        f'<style>{COLOUR_STYLE}{CHART_STYLE}{STYLE}</style><rect class="sheet" width="{width}" height="{top}"/>'
        f"{''.join(parts)}</svg>\n"
    )


def placed(its: Drawing, left: int, top: int) -> str:
    """A chart at its place in the sheet: title, picture, key."""
    title = f'{escape(its.title)} <tspan class="unit" dx="4">{escape(its.unit)}</tspan>'
    return (
        f'<g transform="translate({left},{top})"><text class="title" y="14">{title}</text>'
        f'<g transform="translate(0,{HEAD})">{"".join(its.parts)}</g>'
        f'<g transform="translate(0,{HEAD + its.height})">{key(its)}</g></g>'
    )


def key(its: Drawing) -> str:
    """The key of a chart: every series, in lines of the chart's width."""
    parts = []
    for (name, number), (x, y) in zip(its.key, key_places(its), strict=True):
        line = f'<line class="line {style(number)}" x1="0" x2="28" y1="0" y2="0"/>' if its.joined else ""
        text = f'<text class="tick" x="34" y="4">{escape(name)}</text>'
        parts.append(f'<g transform="translate({x},{y})">{line}{mark(number, 14, 0, "")}{text}</g>')
    return "".join(parts)


def key_places(its: Drawing) -> list[tuple[int, int]]:
    places, x, y = [], 0, 10
    for name, _ in its.key:
        wide = 50 + 7 * len(name)
        if x and x + wide > WIDTH:
            x, y = 0, y + LINE
        places.append((x, y))
        x += wide
    return places


def key_height(its: Drawing) -> int:
    return max((y for _, y in key_places(its)), default=0) + LINE // 2
