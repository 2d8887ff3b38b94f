"""Plots of measured rows: the front of memory and speed (run.py), largest batches (limits.py), growth (growth.py).

    python benchmarks/plot.py benchmarks/results/h200.json --out front.png
    python benchmarks/plot.py benchmarks/results/growth.json --out growth.svg

The rows decide which plot it is, the suffix of ``--out`` its format.
"""

import argparse
import json
from collections.abc import Iterator, Sequence
from itertools import product
from math import cos, nan, pi, sin
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.transforms import Bbox

from commandline import fastest_mode

Row = dict[str, Any]

SBP, EXACT, OTHER, FRONT, LIGHT = "#d1495b", "#2e86ab", "#6b7280", "#f0b9bf", "#d7dae0"
MODES = {"eager": "eager", "compiled": "compiled", "graphs": "compiled with CUDA graphs"}
MARKERS = {"full": "*", "checkpoint": "D", "budget": "P", "offload": "v", "algorithm": "X", "patch": "^", "exact": "h"}
MANY = 6  # a model with so many methods gets a panel of its own
OTHER_FORWARD = ("patch drop",)  # these change the forward pass: not on the front
STYLE: Any = {
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": OTHER,
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "svg.fonttype": "none",
}
FRONT_LEGEND = [
    Line2D([], [], ls="", marker="o", color=SBP, label="SBP, recomputes kept rows"),
    Line2D([], [], ls="", marker="s", color=SBP, label="SBP, saves kept rows"),
    Line2D([], [], ls="", marker="h", color=EXACT, label="SBP's code, exact gradients"),
    Line2D([], [], ls="", marker="D", color=OTHER, label="alternatives"),
    Line2D([], [], color=FRONT, lw=1.5, label="front (patch drop changes the forward pass: left out)"),
]


def is_sbp(method: str) -> bool:
    return method.startswith(("sbp", "own rows", "norm rows"))


def style(method: str) -> tuple[str, str]:
    """Colour and marker: SBP has one colour, and squares where it saves instead of recomputing."""
    if is_sbp(method):
        return SBP, "s" if "saved" in method else "o"
    word = method.split()[0].strip(",")
    return EXACT if word == "exact" else OTHER, MARKERS.get(word, "o")


def unique(rows: Sequence[Row], key: str) -> list[Any]:
    return list(dict.fromkeys(row[key] for row in rows))


def pareto(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Points that no other point beats in both memory (x) and speed (y), in order of memory."""
    best: list[tuple[float, float]] = []
    for x, y in sorted(points, key=lambda point: (point[0], -point[1])):
        if not best or y > best[-1][1]:
            best.append((x, y))
    return best


def front(rows: Sequence[Row]) -> Figure:
    """Memory against speed, both relative to full backprop."""
    rows = [row for row in rows if "memory" in row and "speed" in row]
    if not rows:
        raise ValueError("no rows with both ratios: memory is measured on CUDA, and ratios need the method full")
    groups = panels_of(rows)
    columns = min(2, len(groups))
    lines = -(-len(groups) // columns)
    figure = Figure(figsize=(6.4 * columns, 4.8 * lines), layout="constrained")
    for i, group in enumerate(groups):
        draw_front(figure.add_subplot(lines, columns, i + 1), group)
    figure.legend(handles=FRONT_LEGEND, loc="outside upper center", ncols=len(FRONT_LEGEND), frameon=False, fontsize=8)
    figure.draw_without_rendering()  # the layout must be known before labels are placed in it
    figure.set_layout_engine("none")
    for axes, group in zip(figure.axes, groups, strict=True):
        place_labels(axes, group)
    return figure


def panels_of(rows: Sequence[Row]) -> list[list[Row]]:
    """A panel for each model with at least MANY rows, and one for all others if there are any."""
    by_model = [[row for row in rows if row["model"] == model] for model in unique(rows, "model")]
    own = [group for group in by_model if len(group) >= MANY]
    others = [row for group in by_model if len(group) < MANY for row in group]
    full = [row for row in others if row["method"] == "full"]  # the same point for all models
    return [*own, [row for row in others if row not in full[1:]]] if others else own


def draw_front(axes: Axes, rows: Sequence[Row]) -> None:
    axes.axhline(1, color=LIGHT, lw=1, zorder=0)
    axes.axvline(1, color=LIGHT, lw=1, zorder=0)
    right = 1.12 * max(1, *(row["memory"] for row in rows))
    if len(unique(rows, "model")) == 1:  # several models have no common front
        same_forward = [row for row in rows if not row["method"].startswith(OTHER_FORWARD)]
        best = pareto([(row["memory"], row["speed"]) for row in same_forward])
        stairs = [x for x, _ in best for _ in range(2)] + [right], [0.0] + [y for _, y in best for _ in range(2)]
        axes.plot(*stairs, color=FRONT, lw=1.5, zorder=1)
    for row in rows:
        colour, marker = style(row["method"])
        size = 130 if marker == "*" else 42
        axes.scatter(row["memory"], row["speed"], s=size, c=colour, marker=marker, edgecolors="white", lw=0.6, zorder=3)
    axes.set_title("\n".join(unique([{"title": title(row)} for row in rows], "title")))
    axes.set_xlabel("peak memory, × full backprop  (← better)")
    axes.set_ylabel("speed, × full backprop  (better →)")
    speeds = [row["speed"] for row in rows]
    space = 0.2 * (max(speeds) - min(speeds)) or 0.1
    axes.set(xlim=(0, right), ylim=(min(speeds) - space, max(speeds) + space))


def title(row: Row) -> str:
    return f"{row['model']}, batch {row['batch']}, {MODES[row['mode']]}"


def name(row: Row, rows: Sequence[Row]) -> str:
    """The name of a point, with its model's where there are several."""
    method = row["method"].removeprefix("sbp ")
    return method if method == "full" or len(unique(rows, "model")) == 1 else f"{row['model']}: {method}"


def place_labels(axes: Axes, rows: Sequence[Row]) -> None:
    """Write every point's name as near to it as possible without covering a line, a point or another name."""
    figure = axes.get_figure(root=True)
    assert figure is not None
    unit, to_data = figure.dpi / 72, axes.transData.inverted().transform
    lines = [line.get_transform().transform_path(line.get_path()) for line in axes.lines]
    points = [axes.transData.transform((row["memory"], row["speed"])) for row in rows]
    taken = [Bbox.from_bounds(x - 5 * unit, y - 5 * unit, 10 * unit, 10 * unit) for x, y in points]

    def free(box: Bbox) -> bool:
        crossed = any(line.intersects_bbox(box, filled=False) for line in lines)
        return not crossed and not any(box.overlaps(other) for other in taken) and within(box, axes.get_window_extent())

    for (x, y), row in sorted(zip(points, rows, strict=True), key=lambda item: -item[0][1]):
        colour = style(row["method"])[0]
        text = axes.text(0, 0, name(row, rows), color=colour, fontsize=8, va="center", zorder=4)
        extent = text.get_window_extent()
        places = list(around(x, y, extent.width, extent.height, unit))
        box = next(filter(free, places), places[0])
        taken.append(box)
        text.set_position(tuple(to_data((box.x0, (box.y0 + box.y1) / 2))))
        end = min(max(x, box.x0), box.x1), min(max(y, box.y0), box.y1)
        axes.plot(*to_data([(x, y), end]).T, color=colour, alpha=0.5, lw=0.7, zorder=2)


def around(x: float, y: float, width: float, height: float, unit: float) -> Iterator[Bbox]:
    """Yield boxes around a point, near ones first, and those beside it before those above and below."""
    angles = [pi * k / 8 for k in (0, 8, 1, -1, 7, -7, 2, -2, 6, -6, 3, -3, 5, -5, 4, -4)]
    for radius, angle in product(range(9, 240, 3), angles):
        dx, dy = radius * unit * cos(angle), radius * unit * sin(angle)
        yield Bbox.from_bounds(x + dx - width * (1 - cos(angle)) / 2, y + dy - height / 2, width, height)


def within(inner: Bbox, outer: Bbox) -> bool:
    return outer.contains(*inner.min) and outer.contains(*inner.max)


def growth(rows: Sequence[Row]) -> Figure:
    """Peak memory and time per image, with a column per axis. A point that did not fit is a gap."""
    rows = [row for row in rows if "axis" in row]
    axes_names, methods = unique(rows, "axis"), unique(rows, "method")
    figure = Figure(figsize=(4 * len(axes_names), 6.2), layout="constrained")
    panels = figure.subplots(2, len(axes_names), squeeze=False)
    for column, axis in enumerate(axes_names):
        values = sorted({row["value"] for row in rows if row["axis"] == axis})
        for method in methods:
            found = {row["value"]: row for row in rows if row["axis"] == axis and row["method"] == method}
            points = [found.get(value, {}) for value in values]
            memory = [point.get("peak MiB", nan) / 1024 for point in points]
            time = [point.get("step ms", nan) / point.get("batch", 1) for point in points]
            draw_line(panels[0, column], values, memory, method)
            draw_line(panels[1, column], values, time, method)
        for panel in panels[:, column]:
            panel.set_xscale("log", base=2)
            panel.set_xticks(values, [str(value) for value in values])
            panel.minorticks_off()
            panel.set_ylim(bottom=0)
        panels[0, column].set_title(f"{axis}, {constant(rows, axis)}")
        panels[1, column].set_xlabel(axis)
    panels[0, 0].set_ylabel("peak memory, GiB")
    panels[1, 0].set_ylabel("ms per image")
    handles, labels = panels[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=len(labels), frameon=False)
    return figure


def draw_line(axes: Axes, x: Sequence[float], y: Sequence[float], method: str) -> None:
    colour, marker = style(method)
    dashes = "--" if method != "full" and not is_sbp(method) else "-"
    axes.plot(
        x, y, dashes, color=colour, marker=marker, ms=9 if marker == "*" else 5, mec="white", mew=0.6, label=method
    )


def constant(rows: Sequence[Row], axis: str) -> str:
    """What stays the same over an axis, for its title."""
    first = next(row for row in rows if row["axis"] == axis and "batch" in row)
    batch, size = f"batch {first['batch']}", f"{first['size']}²"
    return {"batch": size, "resolution": batch}.get(axis, f"{batch}, {size}")


def limits(rows: Sequence[Row]) -> Figure:
    """Images/s at the largest batch that fits (written beside the bar), with a row per model and a column per limit."""
    rows = [row for row in rows if "limit GiB" in row]
    models, sizes, methods = unique(rows, "model"), sorted(set(unique(rows, "limit GiB"))), unique(rows, "method")
    height = len(models) * (0.34 * len(methods) + 0.8)
    figure = Figure(figsize=(3.4 * len(sizes) + 1.4, height), layout="constrained")
    panels = figure.subplots(len(models), len(sizes), sharey=True, sharex="row", squeeze=False)
    for (i, model), (j, limit) in product(enumerate(models), enumerate(sizes)):
        found = {row["method"]: row for row in rows if row["model"] == model and row["limit GiB"] == limit}
        draw_bars(panels[i, j], [found.get(method, {}) for method in methods], methods)
        panels[i, j].set_title(f"{model}, {limit:g} GiB")
    for panel in panels[-1]:
        panel.set_xlabel("images/s")
    panels[0, 0].invert_yaxis()
    return figure


def draw_bars(axes: Axes, rows: Sequence[Row], methods: Sequence[str]) -> None:
    speeds = [row.get("images/s", 0) for row in rows]
    bars = axes.barh(methods, speeds, height=0.7, color=[style(method)[0] for method in methods])
    batches = [f" batch {row['batch']}" if row.get("batch") else " does not fit" for row in rows]
    axes.bar_label(bars, batches, fontsize=8)
    axes.margins(x=0.35)
    axes.tick_params(axis="y", length=0)


def draw(rows: Sequence[Row], out: Path) -> None:
    """Draw the plot that these rows are for. Each model has rows of one mode."""
    kinds = {"axis": growth, "limit GiB": limits, "step ms": front}
    picture = next(kind for key, kind in kinds.items() if any(key in row for row in rows))
    out.parent.mkdir(parents=True, exist_ok=True)
    with matplotlib.rc_context(STYLE):
        picture(rows).savefig(out, dpi=160)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, help="JSON file of run.py, limits.py or growth.py")
    parser.add_argument("--out", type=Path, required=True, help="picture: .png, .svg, …")
    parser.add_argument("--mode", choices=list(MODES), help="default: for each model the fastest for plain training")
    parser.add_argument("--models", nargs="+", metavar="MODEL", help="only these")
    args = parser.parse_args(argv)

    rows = json.loads(args.results.read_text())["rows"]
    rows = [row for row in rows if not args.models or row["model"] in args.models]
    draw([row for row in rows if row["mode"] == (args.mode or fastest_mode(rows, row["model"]))], args.out)


if __name__ == "__main__":
    main()
