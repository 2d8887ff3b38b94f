"""Recognition of golf swings' phases and of generated motions: full backprop and SBP, paired seeds, on one GPU at once.

    python benchmarks/recognition.py --data carry/online --out runs/recognition --seconds 360
    python benchmarks/recognition.py --data carry/online --device cpu --clips 8 --epochs 1 --seeds 0 --arms full r=0.5
    python benchmarks/recognition.py --show runs/recognition

Golf: 588 swings of GolfDB (see golf.py, which also says what DATA holds), cut into the 7 phases between their 8
events, 16 frames evenly over each: 3080 clips to train with, 1036 to evaluate with. Backswing and downswing show the
same poses in the other order. Generated: the product's own clips. What is trained is the product's own task, model and
loop; clips lie in the GPU's memory. A seed has the same initial weights and data order in every arm. All arms of a
setting have the same number of epochs: as many as the time allows when all share the GPU. Start NVIDIA's multi-process
service before.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

from golf import CLIPS, PHASES, decode

ARMS = {"full": None, "r=0.5": 0.5, "r=0.25": 0.25}
SETTINGS: dict[str, dict[str, Any]] = {
    "golf": {
        "size": 96,
        "width": 48,
        "depths": [2, 2, 6, 2],
        "window": [4, 6, 6],
        "scale": (0.6, 1.0),
        "drop_path": 0.1,
    },
    "generated": {
        "size": 64,
        "width": 24,
        "depths": [1, 1, 3, 1],
        "window": [4, 4, 4],
        "scale": (0.7, 1.0),
        "drop_path": 0.0,
    },
}
WORK = Path(tempfile.gettempdir()) / "recognition"
"""the runs' folders: of these only metrics go to OUT"""
FRAMES, TIMED = 16, 10
"""of a clip; seconds in which every arm is timed, beside the others"""
STUDENT = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262}
"""97.5 % quantiles of the t distribution, by degrees of freedom"""


def configuration(args: argparse.Namespace, which: str, arm: str, seed: int, epochs: int) -> Any:
    """Of a run, as a recipe would say it."""
    from torchsbp.train.config import SBP, Checkpoints, Config, Log, Optimizer, Schedule
    from torchsbp.train.tasks.video import Augment, Data, Model, VideoOptions

    its, ratio = SETTINGS[which], ARMS[arm]
    videos = (8 * args.clips, 8 * args.clips) if args.clips else (1024, 512)
    heads = [its["width"] // 24 * 2**stage for stage in range(4)]
    options = {"embed_dim": its["width"], "depths": its["depths"], "num_heads": heads, "window_size": its["window"]}
    return Config(
        task=VideoOptions(
            name="recognition",
            model=Model(options=options, drop_path=its["drop_path"]),
            data=Data(source="generated", videos=videos, frames=FRAMES, stride=1, size=its["size"], workers=0),
            augment=Augment(scale=its["scale"], hflip=0.0, smoothing=0.1),
        ),
        out=WORK / f"{which}_{arm}_{seed}",
        sbp=SBP(preset="default", keep_ratio=ratio, sampler="frames", per_sample=True) if ratio else SBP(),
        epochs=epochs,
        batch=32,
        optimizer=Optimizer(lr=1e-3, weight_decay=0.05, clip_norm=1.0),
        schedule=Schedule(warmup_epochs=min(2.5, epochs / 5), warmup_lr=0.0, min_lr=0.0),
        precision="bfloat16" if args.device == "cuda" else "float32",
        seed=seed,
        device=args.device,
        eval_every=max(1, epochs // 2),
        checkpoint=Checkpoints(keep=1),
        log=Log(every_steps=50, progress=False),
    )


def register(args: argparse.Namespace, which: str) -> None:
    """The task "recognition": the video task, with its data in memory."""
    import numpy as np
    import torch

    from torchsbp.train import tasks
    from torchsbp.train.data.clips import Clips
    from torchsbp.train.data.moving import Held
    from torchsbp.train.tasks.video import Video

    class Phases(Clips):
        """What is between two events of a swing."""

        heads = ("class",)
        names = (tuple(f"{a} to {b}" for a, b in pairwise(PHASES)),)

        def __init__(self, training: bool) -> None:
            packed = np.load(args.data / "golfdb96_avif.npz")
            numbers = np.flatnonzero((packed["split"] != 1) == training)[: args.clips]
            swings, events = np.load(CLIPS, mmap_mode="r"), packed["events"].astype(int)
            self.videos, self.labels = [], []
            for number in numbers:
                swing = torch.from_numpy(swings[number]).to(args.device).permute(0, 2, 3, 1)
                for phase, (begin, end) in enumerate(pairwise(events[number])):
                    evenly = torch.linspace(int(begin), int(end), FRAMES).round().long()
                    self.videos.append(swing[evenly.to(args.device)])
                    self.labels.append((phase,))

        def title(self, index: int) -> str:
            return f"phase {index}"

        def open(self, index: int) -> Held:
            return Held(self.videos[index])

    class OnDevice(Clips):
        """The same clips, all of them in memory."""

        def __init__(self, clips: Clips) -> None:
            self.heads, self.names, self.labels, self.title = clips.heads, clips.names, clips.labels, clips.title
            videos = [clips.open(index) for index in range(len(clips.labels))]
            self.videos = [video.read(range(len(video))).to(args.device) for video in videos]

        def open(self, index: int) -> Held:
            return Held(self.videos[index])

    class Batch:
        """One that is on the device already: nothing for the loader to pin."""

        def __init__(self, samples: list[Any]) -> None:
            self.parts = Video.collate(samples)

    @tasks.register("recognition")
    class Recognition(Video):
        collate = staticmethod(Batch)

        def open(self, training: bool) -> Clips:
            return Phases(training) if which == "golf" else OnDevice(super().open(training))

        def prepare(self, batch: Batch, training: bool) -> Any:
            return super().prepare(batch.parts, training)


def train(args: argparse.Namespace, which: str, arm: str, seed: int, epochs: int) -> None:
    """One run; only timed, and nothing written, if there are no epochs: seconds for an epoch."""
    import torch

    from torchsbp.train.distributed import Processes
    from torchsbp.train.loop import Trainer

    register(args, which)
    trainer = Trainer(configuration(args, which, arm, seed, max(epochs, 1)), Processes(torch.device(args.device)))
    if epochs:
        trainer.fit()
        return
    trainer.model.train()
    trainer.order.epochs = 100
    batches, updates, start = trainer.batches(), -5, 0.0
    while updates <= 0 or time.perf_counter() < start + TIMED:
        float(trainer.update(batches)["loss"])  # waits
        updates += 1
        start = time.perf_counter() if updates == 0 else start
    print(json.dumps((time.perf_counter() - start) / updates * trainer.steps_per_epoch), flush=True)


def child(args: argparse.Namespace, which: str, arm: str, seed: int, epochs: int, **options: Any) -> Any:
    own = [f"--{name}={getattr(args, name)}" for name in ("data", "device", "clips") if getattr(args, name)]
    command = [sys.executable, __file__, *own, "--one", which, arm, str(seed), str(epochs)]
    return subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, **options)


def epochs_for(args: argparse.Namespace) -> dict[str, int]:
    """As many as fit: an epoch of every arm is timed beside all others; there will be ``seeds`` times as many runs."""
    if args.epochs:
        return dict.fromkeys(args.settings, args.epochs)
    piped: dict[str, Any] = {"stdout": subprocess.PIPE, "text": True}
    timed = {which: [child(args, which, arm, 0, 0, **piped) for arm in args.arms] for which in args.settings}
    found = {}
    for which, processes in timed.items():
        seconds = [json.loads(its.communicate()[0].splitlines()[-1]) for its in processes]
        found[which] = max(4, min(args.most, int(args.seconds / (len(args.seeds) * max(seconds)))))
        each = ", ".join(f"{arm} {its:.1f} s" for arm, its in zip(args.arms, seconds, strict=True))
        print(f"{which}: an epoch beside the others takes {each}; {found[which]} epochs", flush=True)
    return found


def collect(out: Path) -> None:
    """The metrics of all runs, as far as they are."""
    for path in WORK.glob("*_*_*/metrics.jsonl"):
        (out / path.parent.name).mkdir(exist_ok=True)
        shutil.copy(path, out / path.parent.name)


def last(out: Path) -> dict[str, float] | None:
    """The final evaluation of a run that has ended."""
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    if lines[-1]["kind"] != "end":
        return None
    valid = [line for line in lines if line["kind"] == "valid"]
    return {**valid[-1], "peak": max(line.get("memory_mib") or 0 for line in lines if line["kind"] == "train")}


def table(out: Path) -> str:
    """Top-1 of every seed, its mean, the paired difference to full backprop with its 95 % interval, and memory."""
    lines = ["| clips | arm | top-1, seeds | mean | against full, 95 % | peak MiB | epochs |", "|---" * 7 + "|"]
    for which in SETTINGS:
        runs = {arm: {path.name[-1]: last(path) for path in sorted(out.glob(f"{which}_{arm}_?"))} for arm in ARMS}
        for arm, found in runs.items():
            its = {seed: run for seed, run in found.items() if run}
            if its:
                top1 = [run["top1"] for run in its.values()]
                pairs = [run["top1"] - full["top1"] for seed, run in its.items() if (full := runs["full"].get(seed))]
                one = next(iter(its.values()))
                cells = [which, arm, ", ".join(f"{value:.1f}" for value in top1), f"{statistics.mean(top1):.2f}"]
                cells += [interval(pairs) if arm != "full" else "–", f"{one['peak']:.0f}", str(round(one["epoch"]))]
                lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def interval(pairs: list[float]) -> str:
    if len(pairs) < 2:
        return "–"
    half = STUDENT[len(pairs) - 1] * statistics.stdev(pairs) / len(pairs) ** 0.5
    return f"{statistics.mean(pairs):+.2f} ± {half:.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path("carry/online"))
    parser.add_argument("--out", type=Path, default=Path("runs/recognition"))
    parser.add_argument("--settings", nargs="+", default=list(SETTINGS), choices=list(SETTINGS))
    parser.add_argument("--arms", nargs="+", default=list(ARMS), choices=list(ARMS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2, 3, 4])
    parser.add_argument("--seconds", type=float, default=360, help="for all runs, after decoding and timing")
    parser.add_argument("--epochs", type=int, help="instead of --seconds")
    parser.add_argument("--most", type=int, default=60, help="epochs")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--clips", type=int, help="use so many swings only, and eight times as many generated clips")
    parser.add_argument("--one", nargs=4, help=argparse.SUPPRESS)
    parser.add_argument("--show", type=Path, help="print the table of results and stop")
    args = parser.parse_args()
    if args.show:
        print(table(args.show))
        return
    if args.one:
        which, arm, seed, epochs = args.one
        train(args, which, arm, int(seed), int(epochs))
        return
    shutil.rmtree(WORK, ignore_errors=True)
    for folder in (WORK, CLIPS.parent, args.out):
        folder.mkdir(parents=True, exist_ok=True)
    start = time.perf_counter()
    if "golf" in args.settings:
        decode(args.data)
        print(f"decoded after {time.perf_counter() - start:.0f} s", flush=True)
    epochs = epochs_for(args)
    print(f"timed after {time.perf_counter() - start:.0f} s", flush=True)
    names = [(which, arm, seed) for which in args.settings for seed in args.seeds for arm in args.arms]
    runs = {name: child(args, *name, epochs[name[0]]) for name in names}
    while runs:
        time.sleep(2)
        collect(args.out)
        for name in [name for name, process in runs.items() if process.poll() is not None]:
            print(f"{time.perf_counter() - start:.0f} s: {name} ended with {runs.pop(name).returncode}", flush=True)
    shutil.rmtree(WORK)
    print(table(args.out), flush=True)


if __name__ == "__main__":
    main()
