"""``torchsbp profile MODEL``: show the memory of a training step, by method and by block."""

import argparse
import json
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..config import PRESETS, SBPConfig
from ..errors import UsageError
from ..memory import chart
from ..memory.estimate import Config, Estimate, build, describe, estimate
from ..memory.measure import Measurement, measure_config
from ..memory.sizes import mib
from .arguments import heading, parser, sbp_options
from .named import Named, find_model

PURPOSE = "memory of a training step, by method and by block"
METHODS = ("full", "checkpoint", "exact", "sbp")


def run(argv: list[str]) -> None:
    """Show the memory of a training step, by method and by block: measured if there is a CUDA device, otherwise
    predicted for one."""
    arguments = parser("profile", run.__doc__ or "")
    arguments.add_argument("--methods", nargs="+", choices=METHODS, help="compared; all that the model supports")
    arguments.add_argument("--out", type=Path, help="a chart of it, chart.png or chart.svg")
    arguments.add_argument("--predict", action="store_true", help="do not measure, also if there is a CUDA device")
    args = arguments.parse_args(argv)
    if args.out:
        chart.check_format(args.out)
    named = find_model(args.model, args.size, args.channels_last, args.shape)
    shape = (args.batch, *named.shape)
    given = sbp_options(args)
    configs: dict[str, Config] = {
        "full": "full",
        "checkpoint": "checkpoint",
        "exact": SBPConfig(**given | PRESETS["exact"]),
        "sbp": SBPConfig(**PRESETS["fast"] | given),
    }
    model, methods, notes = build(named.build), args.methods or METHODS, []
    chosen = {describe(configs[method], model): configs[method] for method in methods}
    if len(chosen) < len(set(methods)) and "keep_ratio" not in given:
        notes.append("sbp is exact: nothing that is sampled is recommended for this model; --keep-ratio samples")
    estimates = predictions(model, args, shape, chosen, notes)
    measuring = torch.cuda.is_available() and not args.predict
    measured = measurements(named, args, shape, chosen, estimates, notes) if measuring else {}
    results: dict[str, chart.Result] = {**estimates, **measured}
    title = f"{heading(args, named)}: {how_known(measured, args.predict)}"
    if args.out:
        chart.draw(results, title, args.out)
        notes.append(f"chart: {args.out}")
    if args.json:
        print(json.dumps({"title": title, "measured": bool(measured), "notes": notes} | as_json(estimates, measured)))
    else:
        print("\n".join([title, "", table(columns(estimates, measured), results), *notes]))


def how_known(measured: Mapping[str, Measurement], predict: bool) -> str:
    if measured:
        return f"measured on {torch.cuda.get_device_name()}, eager"
    missing = "" if predict or torch.cuda.is_available() else "; there is none here to measure on"
    return "predicted for a CUDA device" + missing


def predictions(
    model: nn.Module, args: argparse.Namespace, shape: tuple[int, ...], configs: Mapping[str, Config], notes: list[str]
) -> dict[str, Estimate]:
    """Estimates by method. One that the model does not support is left out with a note, unless it was asked for."""
    found = {}
    for title, config in configs.items():
        try:
            found[title] = estimate(model, shape, config, args.precision, args.optimizer)
        except UsageError as error:
            if args.methods or config == "full":
                raise
            notes.append(f"{title} is left out: {str(error).split('. ')[0]}")
    return found


def measurements(
    named: Named,
    args: argparse.Namespace,
    shape: tuple[int, ...],
    configs: Mapping[str, Config],
    estimates: Mapping[str, Estimate],
    notes: list[str],
) -> dict[str, Measurement]:
    """Measurements by method, of those methods that were predicted for the whole model and that fit."""
    found = {}
    for title, its in estimates.items():
        if its.covers:
            continue
        torch.cuda.empty_cache()  # what the method before has left
        try:
            found[title] = measure_config(named.build, shape, configs[title], args.precision, args.optimizer)
        except torch.OutOfMemoryError:
            notes.append(f"{title} ran out of memory: predicted only")
    return found


def columns(estimates: Mapping[str, Estimate], measured: Mapping[str, Measurement]) -> dict[str, dict[str, int | None]]:
    """Method -> what -> bytes."""
    result: dict[str, dict[str, int | None]] = {}
    for title, its in estimates.items():
        rows: dict[str, int | None] = {name: at_peak if size is None else size for name, size, at_peak in its.rows()}
        rows["peak, or more" if its.covers else "peak"] = its.peak
        if title in measured:
            real = measured[title]
            rows |= {"saved activations": real.saved_bytes, "measured peak": real.peak, "reserved": real.reserved}
            rows["predicted peak"] = rows.pop("peak")
        result[title] = rows
    return result


def table(columns: Mapping[str, Mapping[str, int | None]], results: Mapping[str, chart.Result]) -> str:
    """Methods side by side; blocks that save the same as their neighbours share a line."""
    widths = [max(12, len(title)) for title in columns]

    def line(name: str, cells: Sequence[str]) -> str:
        return f"{name:<32}" + "".join(f"  {cell:>{width}}" for cell, width in zip(cells, widths, strict=True))

    names = list(dict.fromkeys(name for rows in columns.values() for name in rows))
    lines = [line("", list(columns))]
    for name in names:
        sizes = [rows.get(name) for rows in columns.values()]
        lines.append(line(name, ["–" if size is None else mib(size) for size in sizes]))
    kinds = ("measured peak", "peak", "peak, or more")
    peaks = [next(rows[kind] or 0 for kind in kinds if kind in rows) for rows in columns.values()]
    lines.append(line("", [f"{peak / peaks[0]:.2f}×" for peak in peaks]))
    lines += ["", "saved by block"]
    saved = [result.saved for result in results.values()]
    rows = [(name, tuple(its.get(name, 0) for its in saved)) for name in saved[0]]
    for sizes, group in groupby(rows, key=lambda row: row[1]):
        same = [name for name, _ in group]
        title = same[0] if len(same) == 1 else f"{same[0]} … {same[-1].rpartition('.')[2]}, each"
        lines.append(line(f"  {title}", [mib(size) for size in sizes]))
    lines.append(line("  other layers", [mib(result.saved_elsewhere) for result in results.values()]))
    covers = next((r.covers for r in results.values() if isinstance(r, Estimate)), "")
    if covers:
        lines.append(f"Activations are those of {covers} alone: the rest depends on data and is not covered.")
    return "\n".join(lines)


def as_json(estimates: Mapping[str, Estimate], measured: Mapping[str, Measurement]) -> dict[str, Any]:
    return {
        "predicted": {title: its.to_dict() for title, its in estimates.items()},
        "measurements": {title: its.to_dict() for title, its in measured.items()},
    }
