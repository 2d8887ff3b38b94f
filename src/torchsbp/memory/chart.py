"""Draw the memory of a step: what is alive at the peak, and what each block saves, methods side by side."""

import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..errors import UsageError
from .estimate import Estimate
from .measure import Measurement
from .sizes import MIB

FORMATS = (".png", ".svg")
KINDS = {
    "parameters": "#4e5d6c",
    "optimizer state": "#8795a1",
    "input, libraries": "#c3ccd4",
    "CUDA graphs": "#76b7b2",
    "gradients": "#b07aa1",
    "allocated before": "#8795a1",
    "saved activations": "#2a7ab8",
    "short-lived": "#f2b134",
    "short-lived, gradients": "#f2b134",
}
COLOURS = ("#2a7ab8", "#e8743b", "#19a979", "#945ecf", "#c9b037", "#9aa5ae")
WHOLE = "block as a whole"

Result = Estimate | Measurement


def check_format(path: Path) -> None:
    if path.suffix.lower() not in FORMATS:
        raise UsageError(
            f"{str(path)!r} is not allowed as a chart; allowed: a file name that ends in {' or '.join(FORMATS)}"
        )


def at_peak(result: Result) -> dict[str, int]:
    """Return what is alive at the peak, in bytes. A measurement tells fewer kinds apart than an estimate."""
    if isinstance(result, Estimate):
        return {
            "parameters": result.parameters,
            "optimizer state": result.optimizer,
            "input, libraries": result.input + result.libraries,
            "CUDA graphs": result.graphs,
            "gradients": result.gradients_at_peak,
            "saved activations": result.saved_at_peak,
            "short-lived": result.short_lived,
        }
    before, peak = result.before or 0, result.peak or result.saved_bytes
    saved = min(result.saved_bytes, peak - before)
    return {
        "allocated before": before,
        "saved activations": saved,
        "short-lived, gradients": peak - before - saved,
    }


def part_colours(results: Mapping[str, Result]) -> dict[str, str]:
    """Return a colour for each part of blocks, the largest parts first; the smallest share the last colour."""
    totals: Counter[str] = Counter()
    for result in results.values():
        for parts in result.parts.values():
            totals.update(parts)
    ordered = [name for name, size in totals.most_common() if size]
    return {name: COLOURS[min(i, len(COLOURS) - 1)] for i, name in enumerate(ordered)}


def short(name: str) -> str:
    """Return a short name of a block: "2.5" for "stages.2.blocks.5"."""
    return ".".join(re.findall(r"\d+", name)) or name


def draw(results: Mapping[str, Result], title: str, path: Path) -> None:
    """Draw one bar per method for its peak and, for each method, one bar per block for what it saves."""
    check_format(path)
    try:
        from matplotlib.figure import Figure
        from matplotlib.patches import Patch
    except ImportError as error:
        raise UsageError("a chart needs matplotlib: pip install matplotlib") from error

    count, most = len(results), max(len(result.saved) for result in results.values())
    width = max(2.4, min(4.5, 0.9 + 0.17 * most))
    figure = Figure(figsize=(4.2 + 1.0 * count + width * count, 4.6), layout="constrained")
    axes = figure.subplots(1, 1 + count, width_ratios=[1.2 + 0.9 * count, *[width] * count])
    draw_peaks(axes[0], results)
    colours = part_colours(results)
    for axis, (name, result) in zip(axes[1:], results.items(), strict=True):
        draw_blocks(axis, name, result, colours)
        if axis is not axes[1]:
            axis.sharey(axes[1])
            axis.tick_params(labelleft=False)
    axes[1].set_ylabel("saved for backward, MiB")
    handles = [Patch(color=colour, label=part or WHOLE) for part, colour in colours.items()][::-1]
    style = {"fontsize": 8, "title_fontsize": 8, "frameon": False}
    figure.legend(handles=handles, loc="outside right center", title="part of the block", **style)
    figure.suptitle(title, fontsize=11)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def draw_peaks(axis: Any, results: Mapping[str, Result]) -> None:
    seen: set[str] = set()
    for i, result in enumerate(results.values()):
        bottom = 0.0
        for kind, size in at_peak(result).items():
            label = "" if kind in seen or not size else kind
            seen |= {kind} if label else set()
            axis.bar(i, size / MIB, 0.68, bottom=bottom, color=KINDS[kind], label=label)
            bottom += size / MIB
        axis.text(i, bottom, f"{bottom:.0f}", ha="center", va="bottom", fontsize=8)
    axis.set_xticks(range(len(results)), [wrapped(name) for name in results], fontsize=8)
    axis.set_ylabel("alive at the peak, MiB")
    axis.margins(y=0.08)
    tidy(axis)
    handles, labels = axis.get_legend_handles_labels()
    beside = {"loc": "upper left", "bbox_to_anchor": (1.0, 1.0)}  # inside it would cover a bar
    axis.legend(handles[::-1], labels[::-1], fontsize=8, frameon=False, **beside)


def draw_blocks(axis: Any, name: str, result: Result, colours: Mapping[str, str]) -> None:
    for i, parts in enumerate(result.parts.values()):
        bottom = 0.0
        for part, colour in colours.items():
            size = parts.get(part, 0) / MIB
            axis.bar(i, size, 0.8, bottom=bottom, color=colour)
            bottom += size
    every = -(-len(result.parts) // 14)
    names = [short(block) if i % every == 0 else "" for i, block in enumerate(result.parts)]
    axis.set_xticks(range(len(names)), names, fontsize=8, rotation=90 if max(map(len, names), default=0) > 2 else 0)
    axis.set_xlabel("block")
    axis.set_title(f"{name}\n{result.saved_bytes / MIB:.0f} MiB saved", fontsize=9)
    tidy(axis)


def wrapped(name: str) -> str:
    return name.replace(", ", ",\n").replace(" r=", "\nr=")


def tidy(axis: Any) -> None:
    axis.spines[["top", "right"]].set_visible(False)
    axis.tick_params(axis="both", labelsize=8)
    axis.grid(axis="y", color="#e6e9ec", linewidth=0.8)
    axis.set_axisbelow(True)
