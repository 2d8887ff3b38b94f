"""Speed and memory of training steps, methods side by side.

    python benchmarks/run.py --models vit_tiny --methods full "sbp query r=0.25" --batch 8 --device cpu
    python benchmarks/run.py --jobs 16 --out benchmarks/results/h200.json        # on a GPU, bf16: the README's tables
    python benchmarks/run.py --show benchmarks/results/h200.json
    python benchmarks/run.py --show after.json --against before.json             # two commits, case by case
    python benchmarks/run.py --show benchmarks/results/h200.json --add more.json # takes the rows of a later run over
    python benchmarks/run.py --show benchmarks/results/h200.json --study benchmarks/results/study/cifar10  # README's

One row per model, mode and method: step time (median), times of forward and backward, images/s, peak memory, ratios to
full backprop in the same mode, and the ideal speed-up: multiply-adds of full backprop over those of the method.
Every case has a process of its own. ``--jobs`` of them compile at the same time; they are measured one at a time.
"""

import argparse
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import children
import commandline
from case import MODES, Row, measured
from methods import METHODS
from models import MODELS
from torchsbp.study import contest, results

TEXTS = ("profile", "snapshot")
SHARES = ("measured/ideal", "vs checkpoint", "build time")
COMPARED = ("step ms", "peak MiB")


def add_ratios(rows: list[Row]) -> None:
    """Add ratios to full backprop of the same model, mode and batch, and for compiled rows to checkpointing."""
    timed = {(row["model"], row["mode"], row["batch"], row["method"]): row for row in rows if "step ms" in row}
    for (*same, _), row in timed.items():
        full, checkpoint = (timed.get((*same, method), {}) for method in ("full", "checkpoint"))
        if full:
            row["speed"] = full["step ms"] / row["step ms"]
            if "peak MiB" in row:
                row["memory"] = row["peak MiB"] / full["peak MiB"]
            if "flops" in row:
                row["ideal speed"] = full["flops"] / row["flops"]
                row["measured/ideal"] = row["speed"] / row["ideal speed"]
            if "build s" in row:
                row["build time"] = row["build s"] / full["build s"]
        if checkpoint and row["mode"] != "eager":
            row["vs checkpoint"] = checkpoint["step ms"] / row["step ms"]


def show(row: Row) -> str:
    cells = [f"{row['model']:<14} {row['mode']:<9} {row['method']:<36}"]
    if "error" in row:
        return cells[0] + row["error"]
    cells.append(f"{row['step ms']:9.2f} ms {row['images/s']:8.0f} img/s")
    if "peak MiB" in row:
        cells.append(f"{row['peak MiB']:8.0f} MiB peak {row['activations MiB']:8.0f} act")
    if "build s" in row:
        cells.append(f"built in {row['build s']:.0f} s")
    for key in ("memory", "speed", "ideal speed", *SHARES):
        if key in row:
            cells.append(f"{key} {row[key]:.3f}×")
    return "  ".join(cells)


def markdown(rows: list[Row]) -> str:
    """A table: peak memory where it was measured, step time, both ratios, and the shares and commits that rows have."""
    rows = [row for row in rows if "speed" in row]
    shares = [key for key in SHARES if any(key in row for row in rows)]
    titles = ["model, batch", "method", "peak memory", "step time", *shares]
    titles += ["commit"] if any("commit" in row for row in rows) else []
    lines = [f"| {' | '.join(titles)} |", "|---" * len(titles) + "|"]
    for row in rows:
        memory = f"{row['peak MiB']:.0f} MiB, {row['memory']:.2f}×" if "memory" in row else "–"
        time_ = f"{row['step ms']:.1f} ms, {row['speed']:.2f}× speed"
        cells = [f"{row['model']}, {row['batch']}", row["method"], memory, time_]
        cells += [f"{row[key]:.2f}×" if key in row else "–" for key in shares]
        cells += [f"{row['commit']}{' *' if 'rounds ms' in row else ''}"] if "commit" in row else []
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


class Front(NamedTuple):
    """A line of the README's table: a model, the presets that are this method, in words what they keep, and the (model,
    arm) of the contest whose accuracy is shown."""

    title: str
    model: str
    presets: str
    kept: str
    method: str
    arm: tuple[str, str]


FRONT = [
    Front("ViT-B", "vit_base", "exact", "all", "exact, lean (r=1)", ("hybrid", "full")),
    Front("ViT-B", "vit_base", "default", "half", "own rows r=0.5", ("hybrid", "own rows 0.5")),
    Front(
        "ViT-B", "vit_base", "fast", "a quarter, of 9 blocks", "own rows r=0.25, 9 of 12 blocks",
        ("hybrid", "own rows 0.25"),
    ),
    Front("ConvNeXt-T", "convnext_tiny", "exact, default, fast", "all", "exact, lean (r=1)", ("convnext", "full")),
    Front("ConvNeXt-T", "convnext_tiny", "–", "half", "own rows r=0.5", ("convnext", "down exact, own rows 0.5")),
    Front("Swin-T", "swin_tiny", "exact, default, fast", "all", "exact, lean (r=1)", ("swin", "full")),
    Front("Swin-T", "swin_tiny", "–", "half", "own rows r=0.5", ("swin", "own rows 0.5")),
]  # fmt: skip


def front(rows: list[Row], studied: list[Row]) -> str:
    """The README's table: memory and speed against plain training in the same mode, accuracy against full backprop in
    the contest."""
    found = {(row["model"], row["mode"], row["method"]): row for row in rows}
    lines = [
        "| model, batch | preset | positions | eager: memory, speed | compiled: memory, speed | accuracy, points |",
        "|---|---|---|---|---|---|",
    ]
    for its in FRONT:
        cells = [found.get((its.model, mode, its.method)) for mode in ("eager", "compiled")]
        shown = [f"{row['memory']:.2f}×, {row['speed']:.2f}×" if row else "–" for row in cells]
        batch = found[its.model, "compiled", its.method]["batch"]
        accuracy = "same gradients" if its.arm[1] == "full" else accuracy_of(studied, *its.arm)
        lines.append(f"| {its.title}, {batch} | {its.presets} | {its.kept} | {' | '.join(shown)} | {accuracy} |")
    return "\n".join(lines)


PAIRS = 3
"""Pairs of seeds that a difference needs at least."""


def accuracy_of(studied: list[Row], model: str, arm: str) -> str:
    """The difference to full backprop after the largest number of epochs for which there are enough pairs."""
    pairs = contest.pairs_of(contest.curves(studied), model, arm)
    longest = max(length for length, values in pairs.items() if len(values) >= PAIRS)
    told = results.difference(pairs[longest]).split(" (")[0].replace("-", "−")
    return f"{told} ({len(pairs[longest])} pairs, {longest} epochs)"


def compare(rows: list[Row], before: list[Row]) -> str:
    """Step time and peak memory over those of another commit, case by case."""
    known = {(row["model"], row["mode"], row["method"]): row for row in before if "step ms" in row}
    lines = []
    for row in rows:
        other = known.get((row["model"], row["mode"], row["method"]))
        if other and "step ms" in row:
            keys = [key for key in COMPARED if key in row and key in other]
            ratios = [f"{key} {other[key]:9.2f} → {row[key]:9.2f} ({row[key] / other[key]:.3f}×)" for key in keys]
            lines.append(f"{row['model']:<14} {row['mode']:<9} {row['method']:<28}" + "  ".join(ratios))
    return "\n".join(lines)


def add(into: Path, later: Path) -> None:
    """Take the rows of a later run over into a file, each with its commit, in the order of the registries."""
    known, more = json.loads(into.read_text()), json.loads(later.read_text())
    differs = [name for name in known if name not in ("commit", "rows") and more[name] != known[name]]
    if differs:
        found = ", ".join(f"{name} {more[name]!r} instead of {known[name]!r}" for name in differs)
        raise SystemExit(f"--add: {later} was measured with {found}; keep its rows in a file of their own")
    for row in more["rows"]:
        names = ("model", "mode", "batch", "method")
        if "step ms" in row:
            known["rows"] = children.replaced(known["rows"], row | {"commit": more["commit"]}, names)
    models, modes, methods = list(MODELS), list(MODES), list(METHODS)

    def place(row: Row) -> tuple[int, int, int, int]:
        return models.index(row["model"]), modes.index(row["mode"]), row["batch"], methods.index(row["method"])

    into.write_text(json.dumps(known | {"rows": sorted(known["rows"], key=place)}, indent=1))


def file_name(row: Row) -> str:
    return "-".join(re.sub(r"[^\w.=]+", "_", row[key]).strip("_") for key in ("model", "mode", "method"))


def keep_texts(row: Row, args: argparse.Namespace) -> None:
    """Take the texts out of a row, print them, and write each to a file beside that of the rows."""
    for kind in TEXTS:
        text = row.pop(kind, None)
        if text:
            print(text, flush=True)
        if text and args.out:
            args.out.parent.mkdir(parents=True, exist_ok=True)
            args.out.with_name(f"{args.out.stem}-{file_name(row)}-{kind}.txt").write_text(text + "\n")


def main(argv: Sequence[str] | None = None) -> None:
    parser = commandline.parser(__doc__)
    parser.add_argument("--modes", nargs="+", choices=list(MODES), help="graphs: compiled, with CUDA graphs")
    parser.add_argument("--batch", type=int, help="instead of each model's own")
    parser.add_argument("--size", type=int, help="image size, instead of each model's own")
    parser.add_argument("--rounds", type=int, default=1, help="cases of a group take turns so often; medians are told")
    parser.add_argument("--profile", action="store_true", help="where the time of a step goes, one text per case")
    parser.add_argument("--snapshot", action="store_true", help="what is alive at the peak of memory (CUDA)")
    parser.add_argument("--show", type=Path, help="print the tables of a JSON file and stop")
    parser.add_argument("--add", type=Path, help="with --show: the JSON file of a later run, whose rows are taken over")
    parser.add_argument("--against", type=Path, help="with --show: compare with the JSON file of another commit")
    parser.add_argument("--study", type=Path, help="with --show: folder of a contest; the README's table")
    args = parser.parse_args(argv)

    if args.show:
        if args.add:
            add(args.show, args.add)
        rows = commandline.read(args.show)
        if args.against:
            print(compare(rows, commandline.read(args.against)))
            return
        if args.study:
            print(front(rows, results.read(args.study)))
            return
        for mode in MODES:
            print(f"\n{mode}\n\n{markdown([row for row in rows if row['mode'] == mode])}")
        return
    rows: list[Row] = []
    for row in children.run(measured, commandline.settings(args), args.jobs, args.limit, turns=args.rounds > 1):
        keep_texts(row, args)
        rows = children.replaced(rows, row, ("model", "mode", "method"))
        add_ratios(rows)
        commandline.write(args, rows)
        print(show(row), flush=True)


if __name__ == "__main__":
    main()
