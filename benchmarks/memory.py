"""Predicted and measured memory: peaks of models and methods, and plans run in the memory that they were made for.

    python benchmarks/memory.py --jobs 16 --out benchmarks/results/memory.json     # on a GPU, bf16, eager
    python benchmarks/memory.py --parts plan --memory 8GiB 16GiB --batches 64 256
    python benchmarks/memory.py --show benchmarks/results/memory.json

One row per case, written when it comes. A row of part "peak" has the predicted and the measured peak. A row of part
"plan" is the configuration that ``plan`` chooses for ViT-B, run with the allocator capped to what CUDA itself leaves of
the budget: it must not run out of memory. "before" is the candidate before it, run the same way: it should run out, or
was rejected to leave headroom.
"""

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

import children
import commandline
from case import Row, release
from limits import CONTEXT, cap
from torchsbp import SBPConfig, estimate, plan
from torchsbp.cli.named import Named, find_model
from torchsbp.memory.estimate import Config, Estimate, describe
from torchsbp.memory.measure import measure_config
from torchsbp.memory.plan import DoesNotFitError
from torchsbp.memory.sizes import MIB, parse_size

BATCHES = {
    "vit_tiny_patch16_224": 256,
    "vit_base_patch16_224": 256,
    "convnext_tiny": 128,
    "convnext_base": 64,
    "swin_tiny_patch4_window7_224": 128,
}
RATIOS = (0.75, 0.5, 0.25)
BUDGETS = ("8GiB", "12GiB", "16GiB", "24GiB", "80GiB")
PLANNED = "vit_base_patch16_224"
MEASURED = ("peak MiB", "reserved MiB")


@dataclass(frozen=True)
class Job:
    """One configuration of one model, or a plan: the configuration that ``plan`` chooses for it in that memory."""

    part: str
    model: str
    batch: int
    device: str
    config: Config = None
    memory: str = ""
    mode: str = "eager"

    @property
    def names(self) -> Row:
        return {"part": self.part, "model": self.model, "batch": self.batch}

    @property
    def precision(self) -> str:
        return "bf16" if self.device == "cuda" else "float32"

    def run(self) -> Iterator[Row]:
        """Work for a child process: yield an empty row when all is predicted, then a row per measured configuration."""
        named = find_model(self.model, channels_last="convnext" in self.model)
        shape = (self.batch, *named.shape)
        rows = list(self.planned(named, shape) if self.part == "plan" else [(self.config, {})])
        predicted = [estimate(named.build, shape, config, self.precision, device=self.device) for config, _ in rows]
        yield {}
        if self.memory and self.device == "cuda":
            cap(parse_size(self.memory) - CONTEXT)
        for (config, row), expected in zip(rows, predicted, strict=True):
            yield row | self.measured(named, shape, config, expected)

    def planned(self, named: Named, shape: tuple[int, ...]) -> Iterator[tuple[Config, Row]]:
        """Yield the chosen configuration and the one before it; if none fits, the one with the least memory."""
        try:
            found = plan(named.build, shape, self.memory, precision=self.precision)
        except DoesNotFitError as error:
            least = min(error.tried, key=lambda candidate: candidate.peak)
            yield least.config, {"memory": self.memory, "role": "least", "refusal": str(error)}
            return
        configs = [candidate.config for candidate in found.tried]
        place = configs.index(found.config)
        for role, i in (("chosen", place), ("before", place - 1)):
            if i >= 0:
                yield configs[i], {"memory": self.memory, "role": role, "largest batch": found.largest_batch}

    def measured(self, named: Named, shape: tuple[int, ...], config: Config, predicted: Estimate) -> Row:
        row: Row = {"method": describe(config), "predicted MiB": predicted.peak / MIB}
        row["predicted saved MiB"] = predicted.saved_bytes / MIB
        release()
        try:
            found = measure_config(named.build, shape, config, self.precision, device=self.device)
        except torch.OutOfMemoryError:
            return row | {"outcome": children.OUT_OF_MEMORY}
        row["saved MiB"] = found.saved_bytes / MIB
        if found.peak is not None and found.reserved is not None:
            row |= {"peak MiB": found.peak / MIB, "reserved MiB": found.reserved / MIB}
            row["error of prediction"] = predicted.peak / found.peak - 1
        return row


def jobs(args: argparse.Namespace) -> Iterator[Job]:
    """Full backprop and SBP at three ratios, for every model; then the plans."""
    for model in args.models if "peak" in args.parts else ():
        configs: list[Config] = ["full", *(SBPConfig(keep_ratio=ratio) for ratio in RATIOS)]
        configs.append(SBPConfig(keep_ratio=RATIOS[-1], recompute=False))
        for config in configs:
            yield Job("peak", model, args.batch or BATCHES[model], args.device, config)
    for memory in args.memory if "plan" in args.parts else ():
        for batch in args.batches:
            yield Job("plan", PLANNED, batch, args.device, memory=memory)


def show(row: Row) -> str:
    where = f"{row.get('memory', ''):>6} {row.get('role', ''):<7}" if row["part"] == "plan" else ""
    line = f"{where}{row['model']:<30}{row['batch']:>5}  {row.get('method', ''):<40}"
    if "predicted MiB" in row:
        line += f"predicted {row['predicted MiB']:8.0f} MiB"
    if "peak MiB" in row:
        line += f"  measured {row['peak MiB']:8.0f} MiB  {row['error of prediction']:+7.1%}"
    return line + "".join(f"  {row[key]}" for key in ("outcome", "error", "refusal") if key in row)


def markdown(found: Sequence[Row]) -> str:
    """The table of predicted and measured peaks."""
    lines = ["| model, batch | method | predicted | measured | difference |", "|---|---|---|---|---|"]
    for row in found:
        if row["part"] == "peak" and "peak MiB" in row:
            sizes = f"{row['predicted MiB']:.0f} MiB | {row['peak MiB']:.0f} MiB | {row['error of prediction']:+.1%}"
            lines.append(f"| {row['model']}, {row['batch']} | {row['method']} | {sizes} |")
    return "\n".join(lines)


def plans_markdown(found: Sequence[Row]) -> str:
    """The table of plans: what was chosen, and whether it ran in the memory that it was chosen for."""
    lines = ["| memory | batch | role | method | predicted | measured | reserved |", "|---|---|---|---|---|---|---|"]
    for row in found:
        if row["part"] == "plan" and "method" in row:
            sizes = ["out of memory", "–"] if "outcome" in row else [f"{row[k]:.0f} MiB" for k in MEASURED if k in row]
            cells = [row["memory"], row["batch"], row["role"], row["method"], f"{row['predicted MiB']:.0f} MiB", *sizes]
            lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(BATCHES), choices=[*BATCHES, "test_vit", "test_convnext"])
    parser.add_argument("--batch", type=int, help="instead of each model's own")
    parser.add_argument("--parts", nargs="+", default=["peak", "plan"], choices=["peak", "plan"])
    parser.add_argument("--memory", nargs="+", default=BUDGETS, help="budgets of the plans")
    parser.add_argument("--batches", nargs="+", type=int, default=[64, 256, 1024], help="batches of the plans")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=["cuda", "cpu"])
    parser.add_argument("--jobs", type=int, default=1, help="cases prepared at the same time; one at a time is run")
    parser.add_argument("--limit", type=float, default=300, help="seconds for a case")
    parser.add_argument("--out", type=Path, help="JSON file for the rows")
    parser.add_argument("--commit", default="", help="commit to record, instead of what git says")
    parser.add_argument("--show", type=Path, help="print the table of a JSON file and stop")
    args = parser.parse_args(argv)
    args.bf16 = args.device == "cuda"
    if args.show:
        found = commandline.read(args.show)
        print(f"{markdown(found)}\n\n{plans_markdown(found)}")
        return
    found: list[Row] = []
    for row in children.run(Job.run, list(jobs(args)), args.jobs, args.limit):
        found.append(row)
        commandline.write(args, found)
        print(show(row), flush=True)
    print(f"{markdown(found)}\n\n{plans_markdown(found)}")


if __name__ == "__main__":
    main()
