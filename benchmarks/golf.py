"""Online detection on golf swings: full backprop, SBP and a frozen encoder, with paired seeds, all on one GPU at once.

    python benchmarks/golf.py --data carry/online --out runs/golf --seconds 420
    python benchmarks/golf.py --data carry/online --out runs/golf --device cpu --clips 8 --epochs 1 --seeds 0 --size 32
    python benchmarks/golf.py --show runs/golf

588 swings of GolfDB of 72 frames, 96², with the phase of every frame; the official split has 440 to train with and 148
to evaluate with. The data are not part of the project: DATA holds golfdb96_avif.npz, lite2.pt (ImageNet weights of
efficientnet_lite2) and, if the installed Pillow reads no AVIF, a newer one in pillow/. What is trained is the product's
own task, model and loop; clips lie in the GPU's memory. The number of epochs is the same for all arms of a setting: as
many as the time allows when all share the GPU. Start NVIDIA's multi-process service before.
"""

import argparse
import io
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

ARMS = ("full", "sbp", "frozen")
SETTINGS: dict[str, dict[str, Any]] = {
    "pretrained": {
        "encoder": {"name": "efficientnet_lite2", "lr": 2e-4, "chunk": 512},
        "mean": [0.498] * 3,
        "std": [0.502] * 3,
        "size": 96,
    },
    "scratch": {
        "encoder": {
            "name": "convnext_atto",
            "options": {"ls_init_value": 1.0, "patch_size": 4},
            "lr": 5e-4,
            "chunk": 512,
        },
        "mean": [0.485, 0.456, 0.406],
        "std": [0.229, 0.224, 0.225],
        "size": 64,
    },
    "generated": {
        "encoder": {
            "name": "convnext_atto",
            "options": {"depths": [1, 1, 1, 1], "dims": [16, 32, 48, 64], "patch_size": 4, "ls_init_value": 1.0},
            "lr": 2e-3,
            "chunk": 512,
        },
        "mean": [0.485, 0.456, 0.406],
        "std": [0.229, 0.224, 0.225],
        "size": 32,
    },
}
"""by encoder; "generated" is the embedded data instead of golf"""
KEEP_RATIO = 0.2
LR = 5e-4
"""of the temporal model"""
TIMED = 12
"""seconds in which every arm is timed, beside the others"""
PHASES = ("address", "toe-up", "mid-backswing", "top", "mid-downswing", "impact", "mid-follow-through", "finish")


WORK = Path(tempfile.gettempdir()) / "golf"
"""clips, and the runs' folders: of these only metrics go to OUT"""
CLIPS = WORK / "clips.npy"


def decode(data: Path) -> None:
    """All clips as one array of 8 bits."""
    import numpy as np
    from PIL import Image, features

    if not features.check("avif"):
        if str(data / "pillow") in os.environ.get("PYTHONPATH", ""):
            raise SystemExit("neither the installed Pillow nor that in DATA/pillow reads AVIF")
        os.environ["PYTHONPATH"] = os.pathsep.join([str(data / "pillow"), *sys.path])
        os.execv(sys.executable, [sys.executable, *sys.argv])  # from the start, with the other Pillow
    packed = np.load(data / "golfdb96_avif.npz")
    blob, edges, clips = packed["blob"], packed["off"], []
    for begin, end in pairwise(edges):
        image = Image.open(io.BytesIO(blob[begin:end].tobytes()))
        frames = []
        for number in range(image.n_frames):
            image.seek(number)
            frames.append(np.asarray(image.convert("RGB")))
        clips.append(np.stack(frames).transpose(0, 3, 1, 2))
    np.save(CLIPS, np.stack(clips))


def configuration(args: argparse.Namespace, which: str, arm: str, seed: int, epochs: int) -> Any:
    """Of a run, as a recipe would say it."""
    from torchsbp.train.config import SBP, Checkpoints, Config, Log, Optimizer, Schedule
    from torchsbp.train.data.window import Window
    from torchsbp.train.online.encoder import Encoder
    from torchsbp.train.online.lstr import Temporal
    from torchsbp.train.tasks.online_action import Augment, Data, OnlineActionOptions

    its = SETTINGS[which]
    golf = which != "generated"
    weights = args.data / "lite2.pt" if which == "pretrained" else None
    return Config(
        task=OnlineActionOptions(
            name="golf",
            encoder=Encoder(**its["encoder"], frozen=arm == "frozen", weights=weights),
            temporal=Temporal(width=256, heads=8, feedforward=512, dropout=0.1, queries=(16, 16), units=(1, 1, 2)),
            window=Window(long=40, long_rate=1, work=32) if golf else Window(long=32, long_rate=1, work=16),
            data=Data(
                source="generated",
                root=args.data,
                size=args.size or its["size"],
                mean=its["mean"],
                std=its["std"],
                crop_pct=1.0,
                workers=0,
                fps=30.0,
                videos=(args.clips or 128, args.clips or 64),
            ),
            augment=Augment(scale=(0.6, 1.0), hflip=0.0 if golf else 0.5),  # left-handed swings are other swings
        ),
        out=WORK / f"{which}_{arm}_{seed}",
        sbp=SBP(preset="default", keep_ratio=KEEP_RATIO, per_sample=True) if arm == "sbp" else SBP(),
        epochs=epochs,
        batch=16,
        optimizer=Optimizer(lr=LR, weight_decay=0.05, clip_norm=5.0),
        schedule=Schedule(warmup_epochs=min(1, epochs - 1), warmup_lr=0.0, min_lr=0.0),
        precision="bfloat16" if args.device == "cuda" else "float32",
        channels_last=True,
        seed=seed,
        device=args.device,
        eval_every=max(1, epochs // 2),
        checkpoint=Checkpoints(keep=1),
        log=Log(every_steps=50, progress=False),
    )


def register(args: argparse.Namespace, which: str) -> None:
    """The task "golf": online detection, with its data in memory."""
    import numpy as np
    import torch
    from torch.utils.data import default_collate

    from torchsbp.train import tasks
    from torchsbp.train.data.actions import AMBIGUOUS, BACKGROUND, Segment
    from torchsbp.train.tasks.online_action import OnlineAction

    class Clips:
        """Golf swings: the part before address is background, the others are named by the event that they follow."""

        names = (BACKGROUND, *PHASES, AMBIGUOUS)
        fps = 30.0

        def __init__(self, training: bool) -> None:
            packed = np.load(args.data / "golfdb96_avif.npz")
            numbers = np.flatnonzero((packed["split"] != 1) == training)[: args.clips]
            frames = np.load(CLIPS, mmap_mode="r")
            self.frames = torch.from_numpy(frames[numbers]).to(args.device)
            self.phases = torch.from_numpy(packed["phase"][numbers].astype(np.int64))
            self.counts = [self.frames.shape[1]] * len(numbers)

        def title(self, video: int) -> str:
            return f"swing {video}"

        def read(self, video: int, frames: Sequence[int]) -> torch.Tensor:
            return self.frames[video][torch.as_tensor(frames, device=self.frames.device)]

        def targets(self, video: int) -> torch.Tensor:
            return torch.nn.functional.one_hot(self.phases[video], len(self.names)).float()

        def segments(self, video: int) -> list[Segment]:
            numbers, counts = torch.unique_consecutive(self.phases[video], return_counts=True)
            ends = (counts.cumsum(0) / self.fps).tolist()
            starts = [0.0, *ends[:-1]]
            return [Segment(int(n), a, b) for n, a, b in zip(numbers, starts, ends, strict=True) if n > 0]

    class Held:
        """A batch that is on the device already: nothing for the loader to pin."""

        def __init__(self, batch: list[Any]) -> None:
            self.batch = default_collate(batch)

    @tasks.register("golf")
    class Golf(OnlineAction):
        collate = staticmethod(Held)

        def open(self, training: bool) -> Any:
            if which != "generated":
                return Clips(training)
            videos = super().open(training)
            videos.pixels = [pixels.to(args.device) for pixels in videos.pixels]
            return videos

        def prepare(self, batch: Held, training: bool) -> Any:
            return super().prepare(batch.batch, training)


def train(args: argparse.Namespace, which: str, arm: str, seed: int, epochs: int) -> None:
    """One run; only timed, and nothing written, if there are no epochs: seconds for an epoch."""
    import torch

    from torchsbp.train.distributed import Processes
    from torchsbp.train.loop import Trainer

    register(args, which)
    torch.backends.cudnn.benchmark = True
    trainer = Trainer(configuration(args, which, arm, seed, max(epochs, 1)), Processes(torch.device(args.device)))
    if epochs:
        trainer.fit()
        return
    trainer.model.train()
    trainer.order.epochs = 10
    batches, updates, start = trainer.batches(), -3, 0.0
    while updates <= 0 or time.perf_counter() < start + TIMED:
        float(trainer.update(batches)["loss"])  # waits
        updates += 1
        start = time.perf_counter() if updates == 0 else start
    print(json.dumps((time.perf_counter() - start) / updates * trainer.steps_per_epoch), flush=True)


def child(args: argparse.Namespace, which: str, arm: str, seed: int, epochs: int, **options: Any) -> Any:
    own = [f"--{name}={getattr(args, name)}" for name in ("data", "device", "clips", "size") if getattr(args, name)]
    command = [sys.executable, __file__, *own, "--one", which, arm, str(seed), str(epochs)]
    return subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, **options)


def epochs_for(args: argparse.Namespace) -> dict[str, int]:
    """As many as fit: an epoch of every arm is timed beside all others; there will be ``seeds`` times as many runs."""
    if args.epochs:
        return dict.fromkeys(args.settings, args.epochs)
    timed = {
        which: [child(args, which, arm, 0, 0, stdout=subprocess.PIPE, text=True) for arm in ARMS]
        for which in args.settings
    }
    found = {}
    for which, processes in timed.items():
        seconds = [json.loads(its.communicate()[0].splitlines()[-1]) for its in processes]
        found[which] = max(2, int(args.seconds / (len(args.seeds) * max(seconds))))
        each = ", ".join(f"{arm} {its:.1f} s" for arm, its in zip(ARMS, seconds, strict=True))
        print(f"{which}: an epoch beside the others takes {each}; {found[which]} epochs", flush=True)
    return found


def collect(out: Path) -> None:
    """The metrics of all runs, as far as they are."""
    for path in WORK.glob("*_*_*/metrics.jsonl"):
        (out / path.parent.name).mkdir(exist_ok=True)
        shutil.copy(path, out / path.parent.name)


def result(out: Path) -> dict[str, float]:
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    valid = [line for line in lines if line["kind"] == "valid"]
    return {**valid[-1], "peak": max(line.get("memory_mib") or 0 for line in lines if line["kind"] == "train")}


def table(out: Path) -> str:
    """Per-frame mAP of every seed, its mean, the paired difference to full backprop, detection mAP and memory."""
    lines = ["| encoder | arm | per-frame mAP, seeds | mean | against full | mAP at tIoU 0.3–0.7 | peak MiB | epochs |"]
    lines.append("|---" * 8 + "|")
    for which in SETTINGS:
        runs = {arm: [result(path) for path in sorted(out.glob(f"{which}_{arm}_*"))] for arm in ARMS}
        for arm, its in runs.items():
            if its:
                values = [run["map"] for run in its]
                pairs = [run["map"] - full["map"] for run, full in zip(its, runs["full"], strict=False)]
                cells = [which, arm, ", ".join(f"{value:.1f}" for value in values), f"{statistics.mean(values):.2f}"]
                cells += [f"{statistics.mean(pairs):+.2f}" if pairs else "–"]
                cells += [f"{statistics.mean(run['tad'] for run in its):.1f}", f"{its[0]['peak']:.0f}"]
                lines.append(f"| {' | '.join([*cells, str(round(its[0]['epoch']))])} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path("carry/online"))
    parser.add_argument("--out", type=Path, default=Path("runs/golf"))
    parser.add_argument("--settings", nargs="+", default=list(SETTINGS), choices=list(SETTINGS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--seconds", type=float, default=420, help="for all runs, after decoding")
    parser.add_argument("--epochs", type=int, help="instead of --seconds")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--clips", type=int, help="use so many only")
    parser.add_argument("--size", type=int, help="of frames, instead of the settings'")
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
    for folder in (WORK, args.out):
        folder.mkdir(parents=True, exist_ok=True)
    start = time.perf_counter()
    decode(args.data)
    print(f"decoded after {time.perf_counter() - start:.0f} s", flush=True)
    epochs = epochs_for(args)
    print(f"timed after {time.perf_counter() - start:.0f} s", flush=True)
    runs = {
        (which, arm, seed): child(args, which, arm, seed, epochs[which])
        for which in args.settings
        for seed in args.seeds
        for arm in ARMS
    }
    while runs:
        time.sleep(2)
        collect(args.out)
        for names in [names for names, process in runs.items() if process.poll() is not None]:
            print(f"{time.perf_counter() - start:.0f} s: {names} ended with {runs.pop(names).returncode}", flush=True)
    shutil.rmtree(WORK)
    print(table(args.out), flush=True)


if __name__ == "__main__":
    main()
