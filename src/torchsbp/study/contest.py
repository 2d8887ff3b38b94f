"""The contest: arms that differ in how gradients are taken, on the same models, data and seeds.

An arm is plain backpropagation or the options of ``torchsbp.apply``. Results are lines of JSON, one per evaluation; a
contest that is started again with the same file goes on with the runs that are not done.
"""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from .training import Row, Run

SAMPLED: dict[str, Any] = {"sampler": "random", "per_sample": True}
BALANCED: dict[str, Any] = {"sampler": "random", "per_sample": "balanced"}
ROWS: dict[str, Any] = {"scale": "rows"}
OWN: dict[str, Any] = BALANCED | {"per_block": True}
FULL = "full"

ARMS: dict[str, dict[str, Any] | None] = {
    FULL: None,
    "exact": {"keep_ratio": 1.0},
    "grid 0.5": {"keep_ratio": 0.5},
    "random 0.5": SAMPLED | {"keep_ratio": 0.5},
    "balanced 0.5": BALANCED | {"keep_ratio": 0.5},
    "balanced 0.25": BALANCED | {"keep_ratio": 0.25},
    "rows 0.5": BALANCED | ROWS | {"keep_ratio": 0.5},
    "rows 0.25": BALANCED | ROWS | {"keep_ratio": 0.25},
    "mlp 0.5": BALANCED | {"attention": "exact", "keep_ratio": 0.5},
    "mlp 0.25": BALANCED | {"attention": "exact", "keep_ratio": 0.25},
    "mlp rows 0.25": BALANCED | ROWS | {"attention": "exact", "keep_ratio": 0.25},
    "own 0.5": OWN | {"keep_ratio": 0.5},
    "own rows 0.5": OWN | ROWS | {"keep_ratio": 0.5},
    "own rows 0.25": OWN | ROWS | {"keep_ratio": 0.25},
    "down exact 0.5": {"exact_downsampling": True, "keep_ratio": 0.5},
    "down exact, balanced 0.5": BALANCED | {"exact_downsampling": True, "keep_ratio": 0.5},
    "down exact, rows 0.5": BALANCED | ROWS | {"exact_downsampling": True, "keep_ratio": 0.5},
    "down exact, own 0.5": OWN | {"exact_downsampling": True, "keep_ratio": 0.5},
    "down exact, own rows 0.5": OWN | ROWS | {"exact_downsampling": True, "keep_ratio": 0.5},
    "down exact, own rows 0.75": OWN | ROWS | {"exact_downsampling": True, "keep_ratio": 0.75},
}
WITHOUT = {"vit": ("down exact",), "convnext": ("mlp", "own"), "swin": ("mlp", "down exact")}
"""How arms begin that a model does not enter: it has no down-sampling layers to sample, or not that rule of attention;
masks of their own need exact down-sampling layers."""


def runs(models: Sequence[str], arms: Sequence[str], seeds: Iterable[int]) -> list[Run]:
    """Every arm of every model with the first seed, then with the next: what is stopped early has pairs."""
    return [
        Run(model, arm, seed, ARMS[arm])
        for seed in seeds
        for arm in arms
        for model in models
        if not arm.startswith(WITHOUT[model])
    ]


def read(path: Path) -> list[Row]:
    """The rows of a contest; a line that was cut short is left out."""
    rows = []
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return rows


def done(rows: list[Row], epochs: int) -> set[str]:
    """The names of the runs that have trained that long."""
    return {row["run"] for row in rows if row.get("epoch") == epochs}


def table(rows: list[Row]) -> str:
    """Of every model, arm by arm: accuracy at the last epoch that all its seeds have, the paired difference to full
    backpropagation, peak memory and time of training (that of runs at once, which share the device)."""
    lines = [
        "| model | arm | epoch | accuracy by seed | mean | against full | peak memory | s per epoch |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for model, arm in dict.fromkeys((row["model"], row["arm"]) for row in rows if "epoch" in row):
        epoch, found = last(rows, model, arm)
        full = {row["seed"]: row for row in rows if key(row) == (model, FULL, epoch)}
        pairs = [row["accuracy"] - full[row["seed"]]["accuracy"] for row in found if row["seed"] in full]
        memory = [row["peak_bytes"] / full[row["seed"]]["peak_bytes"] for row in found if full_bytes(full, row)]
        cells = [
            model, arm, str(epoch), ", ".join(f"{row['accuracy']:.1f}" for row in found),
            f"{mean(row['accuracy'] for row in found):.2f}", f"{mean(pairs):+.2f} ({len(pairs)})" if pairs else "–",
            f"{mean(memory):.2f}×" if memory else "–", f"{mean(row['seconds'] / epoch for row in found):.1f}",
        ]  # fmt: skip
        lines.append("| " + " | ".join(cells) + " |")
    failed = {row["run"]: row["error"] for row in rows if "error" in row}
    return "\n".join([*lines, *(f"\n{name}: {error}" for name, error in failed.items())])


def key(row: Row) -> tuple[Any, ...]:
    return row["model"], row["arm"], row.get("epoch")


def full_bytes(full: dict[int, Row], row: Row) -> int:
    """Of full backpropagation with that seed; 0 if it has not run, or not on a GPU."""
    return full[row["seed"]]["peak_bytes"] if row["seed"] in full else 0


def last(rows: list[Row], model: str, arm: str) -> tuple[int, list[Row]]:
    """The last epoch that every seed of an arm has been evaluated at, and its rows."""
    mine = [row for row in rows if (row["model"], row["arm"]) == (model, arm) and "epoch" in row]
    epochs = [max(row["epoch"] for row in mine if row["seed"] == seed) for seed in {row["seed"] for row in mine}]
    chosen = {row["seed"]: row for row in mine if row["epoch"] == min(epochs)}  # of repeated runs the newest
    return min(epochs), [chosen[seed] for seed in sorted(chosen)]
