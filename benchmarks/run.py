"""Speed and memory of training steps, methods side by side.

    python benchmarks/run.py --models vit_tiny --methods full "sbp query r=0.25" --batch 8 --device cpu
    python benchmarks/run.py --modes eager compiled --out benchmarks/results/h200.json       # on a GPU, bf16
    python benchmarks/run.py --show benchmarks/results/h200.json                             # the README's table

One row per model, mode and method: step time (median), forward and backward apart, images/s, peak memory, ratios to
full backprop in the same mode, and the ideal speed-up: multiply-adds of full backprop over those of the method.
"""

import argparse
import gc
import json
import platform
import statistics
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import timm
import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

from methods import METHODS, Method
from models import MODELS, Model

MIB = 2**20


class Stopwatch:
    """Marks in time, by device events on CUDA; read when all work is done, so that nothing waits in between."""

    def __init__(self, device: str) -> None:
        self.cuda = device == "cuda"
        self.marks: list[Any] = []

    def mark(self) -> None:
        if self.cuda:
            self.marks.append(torch.cuda.Event(enable_timing=True))
            self.marks[-1].record()
        else:
            self.marks.append(time.perf_counter())

    def between(self, first: int, last: int) -> float:
        """Milliseconds from one mark to another."""
        a, b = self.marks[first], self.marks[last]
        return a.elapsed_time(b) if self.cuda else 1000 * (b - a)


class Case:
    """One model prepared by one method, ready to be stepped."""

    def __init__(self, spec: Model, method: Method, args: argparse.Namespace, compiled: bool) -> None:
        torch.manual_seed(0)
        self.args, self.method, self.batch = args, method, args.batch or spec.batch
        size = args.size or spec.size
        with torch.device(args.device):
            self.model = spec.build(size, **method.build)
            self.images = torch.randn(self.batch, 3, size, size)
            self.labels = torch.randint(1000, (self.batch,))
        if spec.channels_last:
            self.images = self.images.to(memory_format=torch.channels_last)
        method.prepare(self.model)
        fused = args.device == "cuda"
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=fused)
        self.call = torch.compile(self.model, mode=args.compile_mode) if compiled else self.model

    def forward(self) -> torch.Tensor:
        autocast = torch.autocast(self.args.device, torch.bfloat16) if self.args.bf16 else nullcontext()
        with self.method.around(), autocast:
            return F.cross_entropy(self.call(self.images).float(), self.labels)

    def step(self, watch: Stopwatch) -> None:
        """One training step: four marks."""
        watch.mark()
        self.optimizer.zero_grad(set_to_none=True)
        loss = self.forward()
        watch.mark()
        loss.backward()
        watch.mark()
        self.optimizer.step()
        watch.mark()

    def flops(self) -> int:
        """Multiply-adds (times two) of forward and backward, recomputation included."""
        with FlopCounterMode(display=False) as counter:
            self.forward().backward()
        return counter.get_total_flops()


def measure(case: Case, args: argparse.Namespace) -> dict[str, Any]:
    cuda = args.device == "cuda"
    watch = Stopwatch(args.device)
    for _ in range(args.warmup):
        case.step(watch)
    row: dict[str, Any] = {}
    if cuda:
        torch.cuda.synchronize()
        case.optimizer.zero_grad(set_to_none=True)
        static = torch.cuda.memory_allocated()
        loss = case.forward()
        row["activations MiB"] = (torch.cuda.memory_allocated() - static) / MIB
        loss.backward()
        del loss
        torch.cuda.reset_peak_memory_stats()
    watch = Stopwatch(args.device)
    for _ in range(args.steps):
        case.step(watch)
    if cuda:
        torch.cuda.synchronize()
        row["peak MiB"] = torch.cuda.max_memory_allocated() / MIB
        row["reserved MiB"] = torch.cuda.max_memory_reserved() / MIB
    starts = range(0, 4 * args.steps, 4)
    for i, name in enumerate(("forward", "backward", "update")):
        row[f"{name} ms"] = statistics.median(watch.between(start + i, start + i + 1) for start in starts)
    row["step ms"] = statistics.median(watch.between(start, start + 4) for start in starts[:-1])
    row["images/s"] = 1000 * case.batch / row["step ms"]
    return row


def profile(case: Case, args: argparse.Namespace) -> str:
    """The kernels or operators that take the time of one step."""
    activity = getattr(torch.profiler.ProfilerActivity, args.device.upper())
    with torch.profiler.profile(activities=[activity]) as prof:
        case.step(Stopwatch(args.device))
    return prof.key_averages().table(sort_by=f"self_{args.device}_time_total", row_limit=28, max_name_column_width=90)


def run_case(name: str, title: str, mode: str, args: argparse.Namespace) -> dict[str, Any]:
    spec, method = MODELS[name], METHODS[title]
    row: dict[str, Any] = {"model": name, "mode": mode, "method": title}
    torch._dynamo.reset()
    try:
        case = Case(spec, method, args, mode == "compiled")
        row["batch"] = case.batch
        if mode == "eager":
            row["flops"] = case.flops()
        row |= measure(case, args)
        if args.profile:
            print(profile(case, args), flush=True)
    except torch.OutOfMemoryError:
        row["error"] = "out of memory"
    case = None
    gc.collect()
    if args.device == "cuda":
        torch.cuda.empty_cache()
    return row


def add_ratios(rows: list[dict[str, Any]]) -> None:
    flops = {(r["model"], r["method"]): r["flops"] for r in rows if "flops" in r}
    for row in rows:
        full = next((r for r in rows if r["method"] == "full" and all(r[k] == row[k] for k in ("model", "mode"))), None)
        if full is None or "step ms" not in row or "step ms" not in full:
            continue
        row["speed"] = full["step ms"] / row["step ms"]
        if "peak MiB" in row:
            row["memory"] = row["peak MiB"] / full["peak MiB"]
        if (row["model"], row["method"]) in flops and (row["model"], "full") in flops:
            row["ideal speed"] = flops[row["model"], "full"] / flops[row["model"], row["method"]]


def environment(args: argparse.Namespace) -> dict[str, str]:
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    device = torch.cuda.get_device_name() if args.device == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    versions = {"torch": torch.__version__, "timm": timm.__version__, "python": platform.python_version()}
    return {
        "device": device,
        **versions,
        "commit": commit or args.commit,
        "precision": "bf16" if args.bf16 else "float32",
        "compile mode": args.compile_mode,
    }


def show(row: dict[str, Any]) -> str:
    cells = [f"{row['model']:<14} {row['mode']:<9} {row['method']:<36}"]
    if "error" in row:
        return cells[0] + row["error"]
    cells.append(f"{row['step ms']:9.2f} ms {row['images/s']:8.0f} img/s")
    if "peak MiB" in row:
        cells.append(f"{row['peak MiB']:8.0f} MiB peak {row['activations MiB']:8.0f} act")
    for key in ("memory", "speed", "ideal speed"):
        if key in row:
            cells.append(f"{key} {row[key]:.3f}×")
    return "  ".join(cells)


def markdown(rows: list[dict[str, Any]], mode: str) -> str:
    """The README's table: peak memory where it was measured, time and both ratios."""
    lines = ["| model, batch | method | peak memory | step time |", "|---|---|---|---|"]
    for row in rows:
        if row["mode"] == mode and "speed" in row:
            memory = f"{row['peak MiB']:.0f} MiB, {row['memory']:.2f}×" if "memory" in row else "–"
            time_ = f"{row['step ms']:.1f} ms, {row['speed']:.2f}× speed"
            lines.append(f"| {row['model']}, {row['batch']} | {row['method']} | {memory} | {time_} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cuda = torch.cuda.is_available()
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=list(METHODS), metavar="METHOD")
    parser.add_argument("--modes", nargs="+", default=["eager"], choices=["eager", "compiled"])
    parser.add_argument("--compile-mode", default="default", help="mode of torch.compile, for example reduce-overhead")
    parser.add_argument("--device", default="cuda" if cuda else "cpu", choices=["cuda", "cpu"])
    parser.add_argument("--batch", type=int, help="instead of each model's own")
    parser.add_argument("--size", type=int, help="image size, instead of each model's own")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--warmup", type=int, default=5)
    parser.add_argument("--float32", dest="bf16", action="store_false", help="no autocast")
    parser.add_argument("--profile", action="store_true", help="print where the time of a step goes")
    parser.add_argument("--out", type=Path, help="JSON file for the rows")
    parser.add_argument("--show", type=Path, help="print the tables of a JSON file and stop")
    parser.add_argument("--commit", default="", help="commit to record where git is not at hand")
    args = parser.parse_args()

    if args.show:
        found = json.loads(args.show.read_text())
        for mode in ("eager", "compiled"):
            print(markdown(found["rows"], mode) + "\n")
        return
    rows: list[dict[str, Any]] = []
    for name in args.models:
        for mode in args.modes:
            for title in args.methods:
                method = METHODS[title]
                if method.only not in name or (mode == "compiled" and not method.compiles):
                    continue
                rows.append(run_case(name, title, mode, args))
                add_ratios(rows)
                print(show(rows[-1]), flush=True)
                if args.out:
                    args.out.parent.mkdir(parents=True, exist_ok=True)
                    args.out.write_text(json.dumps({**environment(args), "rows": rows}, indent=1))


if __name__ == "__main__":
    sys.exit(main())
