"""Memory predicted and measured: peaks of models and methods, and plans run in the memory they were made for.

    python benchmarks/memory.py --out benchmarks/results/memory.json               # on a GPU, bf16, eager
    python benchmarks/memory.py --parts plan --memory 8GiB 16GiB --batches 64 256
    python benchmarks/memory.py --show benchmarks/results/memory.json

One row per case, written when it comes. A row of part "peak" has the predicted and the measured peak. A row of part
"plan" is the configuration that ``plan`` chooses for ViT-B, run with the allocator capped to the budget: it must not
run out. "before" is the candidate before it, run the same way: it should run out, or was left out for headroom.
"""

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

import children
import commandline
from case import Row
from torchsbp import SBPConfig, estimate, plan
from torchsbp.memory import DoesNotFitError
from torchsbp.memory.estimating import Config, describe
from torchsbp.memory.measuring import measure_config
from torchsbp.memory.names import find_model
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


@dataclass(frozen=True)
class Job:
    """One configuration of one model; ``memory`` caps the allocator (0: no cap)."""

    part: str
    model: str
    batch: int
    config: Config
    device: str
    memory: int = 0

    @property
    def names(self) -> Row:
        return {"part": self.part, "model": self.model, "method": describe(self.config), "batch": self.batch}

    @property
    def channels_last(self) -> bool:
        return "convnext" in self.model


def run_job(job: Job) -> Iterator[Row]:
    """Work for a child process: the prediction, nothing when the model is built, then its peaks."""
    named = find_model(job.model, channels_last=job.channels_last)
    shape = (job.batch, named.channels, named.size, named.size)
    precision = "bf16" if job.device == "cuda" else "float32"
    predicted = estimate(named.build, shape, job.config, precision, device=job.device)
    row: Row = {"predicted MiB": predicted.peak / MIB, "predicted saved MiB": predicted.saved_bytes / MIB}
    yield {}
    try:
        if job.memory and job.device == "cuda":
            cap(job.memory)
        found = measure_config(named.build, shape, job.config, precision, device=job.device)
        row["saved MiB"] = found.saved_bytes / MIB
        if found.peak is not None and found.reserved is not None:
            row |= {"peak MiB": found.peak / MIB, "reserved MiB": found.reserved / MIB}
            row["error of prediction"] = predicted.peak / found.peak - 1
    except torch.OutOfMemoryError:
        row["error"] = children.OUT_OF_MEMORY
    yield row


def cap(memory: int) -> None:
    """The allocator's limit for this process."""
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, memory / total))


def peak_jobs(args: argparse.Namespace) -> Iterator[Job]:
    """Full and, where the family is supported, SBP at three ratios."""
    for model in args.models:
        batch = args.batch or BATCHES[model]
        configs: list[Config] = ["full"]
        if "swin" not in model:
            configs += [SBPConfig(keep_ratio=ratio) for ratio in RATIOS]
            configs.append(SBPConfig(keep_ratio=RATIOS[-1], recompute=False))
        for config in configs:
            yield Job("peak", model, batch, config, args.device)


def plan_jobs(args: argparse.Namespace) -> Iterator[tuple[Row, Job | None]]:
    """(what was planned, the job that checks it); no job where nothing fits."""
    named = find_model(PLANNED)
    for memory in args.memory:
        for batch in args.batches:
            names: Row = {"part": "plan", "model": PLANNED, "batch": batch, "memory": memory}
            try:
                found = plan(named.build, (batch, named.channels, named.size, named.size), memory)
            except DoesNotFitError as error:
                yield names | {"method": "none", "refusal": str(error)}, None
                continue
            configs = [candidate.config for candidate in found.tried]
            place = configs.index(found.config)
            for role, i in (("chosen", place), ("before", place - 1)):
                if i >= 0:
                    job = Job("plan", PLANNED, batch, configs[i], args.device, parse_size(memory))
                    yield names | {"role": role, "largest batch": found.largest_batch}, job


def in_child(job: Job, limit: float) -> Iterator[Row]:
    """The row of a job, from a process of its own."""
    return (row for _, row in children.run_group(run_job, [job], limit))  # type: ignore[arg-type, list-item]


def rows(args: argparse.Namespace) -> Iterator[Row]:
    if "peak" in args.parts:
        for job in peak_jobs(args):
            yield from in_child(job, args.limit)
    if "plan" in args.parts:
        for names, job in plan_jobs(args):
            for row in [{}] if job is None else in_child(job, args.limit):
                yield names | row


def show(row: Row) -> str:
    where = f"{row.get('memory', ''):>6} {row.get('role', ''):<7}" if row["part"] == "plan" else ""
    line = f"{where}{row['model']:<30}{row['batch']:>5}  {row['method']:<40}"
    if "predicted MiB" in row:
        line += f"predicted {row['predicted MiB']:8.0f} MiB"
    if "peak MiB" in row:
        line += f"  measured {row['peak MiB']:8.0f} MiB  {row['error of prediction']:+7.1%}"
    return line + "".join(f"  {row[key]}" for key in ("error", "refusal") if key in row)


def markdown(found: Sequence[Row]) -> str:
    """The table of predicted and measured peaks."""
    lines = ["| model, batch | method | predicted | measured | difference |", "|---|---|---|---|---|"]
    for row in found:
        if row["part"] == "peak" and "peak MiB" in row:
            sizes = f"{row['predicted MiB']:.0f} MiB | {row['peak MiB']:.0f} MiB | {row['error of prediction']:+.1%}"
            lines.append(f"| {row['model']}, {row['batch']} | {row['method']} | {sizes} |")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(BATCHES), choices=[*BATCHES, "test_vit", "test_convnext"])
    parser.add_argument("--batch", type=int, help="instead of each model's own")
    parser.add_argument("--parts", nargs="+", default=["peak", "plan"], choices=["peak", "plan"])
    parser.add_argument("--memory", nargs="+", default=BUDGETS, help="budgets of the plans")
    parser.add_argument("--batches", nargs="+", type=int, default=[64, 256, 1024], help="batches of the plans")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=["cuda", "cpu"])
    parser.add_argument("--limit", type=float, default=300, help="seconds for a case")
    parser.add_argument("--out", type=Path, help="JSON file for the rows")
    parser.add_argument("--commit", default="", help="commit to record where git is not at hand")
    parser.add_argument("--show", type=Path, help="print the table of a JSON file and stop")
    args = parser.parse_args(argv)
    args.bf16 = args.device == "cuda"
    if args.show:
        print(markdown(json.loads(args.show.read_text())["rows"]))
        return
    found: list[Row] = []
    for row in rows(args):
        found.append(row)
        commandline.write(args, found)
        print(show(row), flush=True)
    print(markdown(found))


if __name__ == "__main__":
    main()
