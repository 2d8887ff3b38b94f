"""Tiny runs for the tests: a ViT of width 16 on 8 × 8 pictures, trained in a second."""

import json
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from tqdm import tqdm

from torchsbp.cli.main import main
from torchsbp.train.data.images import digits

ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}

SERVER = multiprocessing.get_context("forkserver")
"""forks processes that have imported everything (tests/conftest.py): a run begins within milliseconds"""

TINY: dict[str, Any] = {
    "task": {
        "model": {
            "name": "vit_tiny_patch16_224",
            "options": {"img_size": 8, "patch_size": 2, "embed_dim": 16, "depth": 3, "num_heads": 2},
            "drop_path": 0.2,
        },
        "data": {"source": "folder", "size": 8, "channels": 1, "mean": [0.3], "std": [0.35], "workers": 0},
        "augment": {"auto_augment": "rand-m5-inc1", "erase": 0.25, "mixup": 0.8, "cutmix": 1.0, "smoothing": 0.1},
    },
    "sbp": {"preset": "fast"},
    "epochs": 2,
    "batch": 16,
    "micro_batch": 8,
    "optimizer": {"lr": 1e-3, "layer_decay": 0.9, "clip_norm": 1.0},
    "schedule": {"warmup_epochs": 1},
    "ema": {"decay": 0.9},
    "precision": "float32",
    "device": "cpu",
    "checkpoint": {"every_steps": 3},
    "log": {"every_steps": 4, "progress": False},
}


@cache
def pictures() -> "tempfile.TemporaryDirectory[str]":
    """Sixteen digits of each class to train with, four to validate with: of more, runs would mostly read pictures."""
    folder = tempfile.TemporaryDirectory(prefix="digits-")
    for part, train, each in (("train", True, 16), ("val", False, 4)):
        source = digits(train, "L")
        for label, name in enumerate(source.names):
            (Path(folder.name) / part / name).mkdir(parents=True)
            for index in [i for i, its in enumerate(source.labels) if its == label][:each]:
                image = Image.fromarray(source.images[index]).resize((8, 8))
                image.save(Path(folder.name) / part / name / f"{index}.png")
    return folder


def merged(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    both = {k: merged(base.get(k) or {}, v) if isinstance(v, dict) else v for k, v in changes.items()}
    return {**base, **both}


def recipe(folder: Path, **changes: Any) -> Path:
    """A recipe file of the tiny run, changed; its ``out`` is beside it."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "recipe.yaml"
    tiny = merged(TINY, {"task": {"data": {"root": pictures().name}}, "out": str(folder / "run")})
    path.write_text(json.dumps(merged(tiny, changes)))  # JSON is YAML
    return path


def train(arguments: list[str]) -> int:
    """``torchsbp train`` in this process: its exit code."""
    return main(["train", *arguments])


def evaluate(arguments: list[str]) -> int:
    return main(["eval", *arguments])


def run(folder: Path, *arguments: str, **changes: Any) -> tuple[int, Path]:
    """Train in this process: the exit code and the run's folder."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return train([str(recipe(folder, **changes)), *arguments]), folder / "run"
    finally:
        torch.set_num_threads(threads)


def command(path: Path, *arguments: str, processes: int = 1) -> list[str]:
    start = [sys.executable]
    if processes > 1:
        start += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    return [*start, "-m", "torchsbp.train", str(path), *arguments]


def spawn(path: Path, *arguments: str, processes: int = 1) -> "subprocess.CompletedProcess[str]":
    """Train in new processes, to the end."""
    return subprocess.run(
        command(path, *arguments, processes=processes), env=ENVIRONMENT, capture_output=True, text=True, timeout=120
    )


def ranks(world: int) -> list[dict[str, str]]:
    """What torchrun sets for each of several processes."""
    if world == 1:
        return [{}]
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = one.getsockname()[1]
    group = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": f"{port}", "WORLD_SIZE": f"{world}"}
    return [{**group, "RANK": f"{rank}", "LOCAL_RANK": f"{rank}"} for rank in range(world)]


def fork(
    path: Path,
    *arguments: str,
    told: Path,
    environment: dict[str, str] | None = None,
    before: Callable[[], Any] | None = None,
) -> BaseProcess:
    """Train in a forked process, which calls ``before`` first; what it says is written to ``told``."""
    process = SERVER.Process(target=_train, args=([str(path), *arguments], told, environment or {}, before))
    process.start()
    return process


def _train(arguments: list[str], told: Path, environment: dict[str, str], before: Callable[[], Any] | None) -> None:
    with told.open("w") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # what is begun in the background would not hear it
    torch.set_num_threads(1)
    tqdm.set_lock(threading.RLock())  # one for processes would be missed by the resource tracker after a kill
    os.environ.update(environment)
    if before is not None:
        before()
    sys.exit(train(arguments))


@contextmanager
def stopped_at(step: int) -> Iterator[None]:
    """Inside, a run ends before the update after so many, as if it was killed, and it must."""
    from torchsbp.train.loop import Trainer

    update = Trainer.update

    def dies(self: Any, batches: Any) -> Any:
        if self.progress.step == step:
            raise KeyboardInterrupt
        return update(self, batches)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "update", dies)
        with pytest.raises(KeyboardInterrupt):
            yield


def final(out: Path) -> dict[str, Any]:
    """The last checkpoint, but for where it was made and how long it took."""
    content = torch.load(sorted((out / "checkpoints").glob("step-*.pt"))[-1], weights_only=True)
    del content["config"], content["progress"]["seconds"]
    return content


def lines(out: Path) -> list[dict[str, Any]]:
    """The metrics, but for what depends on the clock."""
    found = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if k not in ("seconds", "images_per_s", "config")} for line in found]


def same(a: Any, b: Any) -> bool:
    """Equal bit for bit, down to the last tensor."""
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return bool(a == b)
