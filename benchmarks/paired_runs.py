"""Train a recipe in several arms with several seeds, some runs at the same time; then print paired differences.

    python benchmarks/paired_runs.py penn_fudan --out runs/penn --seeds 5 \\
      --arm full --arm "sbp --sbp.preset=fast" -- --task.data.root=data/pennfudan
    python benchmarks/paired_runs.py --show runs/penn --metrics box_ap mask_ap

An arm is a name and the options that it adds; options after -- are for all arms. The others are compared with the arm
"full": in every arm the same seed has the same initial weights and the same order of samples. Every arm runs its first
seed before one runs its second. Runs that have not ended in time are stopped and not in the table. NVIDIA's
multi-process service, if it is installed, lets the processes share the GPU.
"""

import argparse
import json
import os
import shlex
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path

from torchsbp.study.results import interval


def shared_gpu() -> None:
    """Start the multi-process service and use it for the processes that follow, if it works here."""
    control = shutil.which("nvidia-cuda-mps-control")
    if control is not None:
        folder = Path(tempfile.gettempdir()) / "mps"
        folder.mkdir(exist_ok=True)
        service = {"CUDA_MPS_PIPE_DIRECTORY": str(folder), "CUDA_MPS_LOG_DIRECTORY": str(folder)}
        subprocess.run([control, "-d"], env=os.environ | service, check=False)
        tried = [sys.executable, "-c", "import torch; torch.ones(1, device='cuda')"]
        works = subprocess.run(tried, env=os.environ | service, check=False).returncode == 0
        os.environ |= service if works else {}
        print(f"multi-process service: {'used' if works else 'does not work here'}", flush=True)


def started(recipe: str, arm: str, seed: int, out: Path, common: Sequence[str]) -> "subprocess.Popen[bytes]":
    name, *options = shlex.split(arm)
    folder = out / f"{name}_{seed}"
    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "torchsbp", "train", recipe, f"--seed={seed}", f"--out={folder}"]
    command += ["--log.progress=false", *common, *options]
    with (folder / "log.txt").open("wb") as log:
        return subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)


def run(args: argparse.Namespace, common: Sequence[str]) -> None:
    """Run all arms and seeds, ``jobs`` at a time. Those that are not done in time are stopped by a signal."""
    shared_gpu()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    begin, ended = time.monotonic(), 0
    left = deque((arm, seed) for seed in range(args.seeds) for arm in args.arm)
    alive: dict[str, subprocess.Popen[bytes]] = {}
    while (left or alive) and time.monotonic() < begin + args.limit:
        while left and len(alive) < args.jobs:
            arm, seed = left.popleft()
            alive[f"{arm.split()[0]}_{seed}"] = started(args.recipe, arm, seed, args.out, common)
        time.sleep(1)
        for name in [name for name, process in alive.items() if process.poll() is not None]:
            code = alive.pop(name).returncode
            ended += code == 0
            print(f"{time.monotonic() - begin:.0f} s: {name} ended with {code}", flush=True)
    for process in alive.values():
        process.terminate()
    for process in alive.values():
        process.wait()
    print(f"{ended} of {args.seeds * len(args.arm)} runs ended well in {time.monotonic() - begin:.0f} s", flush=True)


def last_values(folder: Path) -> dict[str, float]:
    """The metrics of the last evaluation, and memory and epoch of training; empty if the run has not ended."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    if lines[-1]["kind"] != "end":
        return {}
    values = next(line for line in reversed(lines) if line["kind"] == "valid")
    trained = next(line for line in reversed(lines) if line["kind"] == "train")
    return {**{name: value for name, value in trained.items() if name in ("memory_mib", "epoch")}, **values}


def table(out: Path, metrics: Sequence[str]) -> str:
    """Every arm's mean and its paired difference to the arm "full", with 95 % intervals."""
    runs: dict[str, dict[int, dict[str, float]]] = {}
    for path in sorted(out.glob("*_*/metrics.jsonl")):
        arm, _, seed = path.parent.name.rpartition("_")
        values = last_values(path.parent)
        if values:
            runs.setdefault(arm, {})[int(seed)] = values
    if not runs:
        return f"no run in {out} has ended: see its log.txt"
    full = runs.get("full", {})
    lines = [f"| arm | seeds | epochs | {' | '.join(metrics)} | MiB |", "|---" * (4 + len(metrics)) + "|"]
    for arm in sorted(runs, key=lambda name: name != "full"):
        cells = []
        for metric in metrics:
            pairs = [its[metric] - full[seed][metric] for seed, its in runs[arm].items() if seed in full]
            difference = f", Δ {mean_of(pairs)}" if arm != "full" and pairs else ""
            cells.append(f"{mean_of([its[metric] for its in runs[arm].values()])}{difference}")
        memory = statistics.mean(its["memory_mib"] for its in runs[arm].values())
        epochs = min(its["epoch"] for its in runs[arm].values())
        lines.append(f"| {arm} | {len(runs[arm])} | {epochs:.0f} | {' | '.join(cells)} | {memory:.0f} |")
    return "\n".join(lines)


def mean_of(values: Sequence[float]) -> str:
    """The mean, with half of its 95 % interval."""
    half = interval(values)
    return f"{statistics.mean(values):.2f}" + ("" if half is None else f" ± {half:.2f}")


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", nargs="?")
    parser.add_argument("--out", type=Path, help="a folder for the runs")
    parser.add_argument("--arm", action="append", default=[], help="its name, and its options")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--jobs", type=int, default=12, help="runs at the same time")
    parser.add_argument("--limit", type=float, default=3600, help="seconds")
    parser.add_argument("--metrics", nargs="+", default=["box_ap", "mask_ap"])
    parser.add_argument("--show", type=Path, help="print the table of a folder instead of running")
    given = list(sys.argv[1:] if argv is None else argv)
    place = given.index("--") if "--" in given else len(given)
    args, common = parser.parse_args(given[:place]), given[place + 1 :]
    if args.show is None:
        if not (args.recipe and args.out and args.arm):
            parser.error("a recipe, --out and at least one --arm are needed")
        run(args, common)
    print(table(args.show or args.out, args.metrics), flush=True)


if __name__ == "__main__":
    main()
