"""What a run records: one JSON line per event in metrics.jsonl, and the same to TensorBoard and W&B if asked."""

import json
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from hashlib import blake2b
from importlib import import_module
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from ...errors import UsageError
from ..distributed import Processes, all_sum
from ..record import FILE, SECTIONS, read_lines
from .checkpoint import replace_file, writing
from .state import Progress


class Metrics:
    """Appends lines to a run's record. A line has a kind (run, train, valid, end), a step, and values."""

    def __init__(
        self, out: Path, progress: Progress, config: dict[str, Any], tensorboard: bool, wandb: str | None
    ) -> None:
        step = progress.step
        module = weights_and_biases() if wandb else None
        self.path = out / FILE
        self.about: dict[str, Any] | None = None
        """the line that says how the run was configured last"""
        if self.path.exists():  # resumed: lines after the checkpoint are dropped, as their steps are run again
            until = {"end": -1, "valid": progress.evaluated}
            kept = [line for line in read_lines(self.path) if line["step"] <= until.get(line["kind"], step)]
            self.about = next((line for line in reversed(kept) if line["kind"] == "run"), None)
            text = "".join(json.dumps(line) + "\n" for line in kept)
            with writing(self.path):
                replace_file(self.path, lambda file: file.write(text.encode()))
        self.file = self.path.open("a")
        self.writer = None
        if tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            self.writer = SummaryWriter(str(out / "tensorboard"), purge_step=step + 1 if step else None)
        self.run: Any = None
        if module is not None:
            self.run = module.init(project=wandb, name=out.name, id=identity(out), config=config, resume="allow")

    def write(self, kind: str, step: int, **values: Any) -> None:
        with writing(self.path):
            self.file.write(json.dumps({"kind": kind, "step": step, **values}) + "\n")
            self.file.flush()
        numbers = {f"{kind}/{k}": v for k, v in values.items() if isinstance(v, int | float)}
        if self.writer is not None:
            for name, value in numbers.items():
                self.writer.add_scalar(name, value, step)
            self.writer.flush()
        if self.run is not None:
            self.run.log(numbers, step=step)

    def close(self) -> None:
        with suppress(OSError):  # ``write`` has raised for what could not be written
            self.file.close()
        if self.writer is not None:
            self.writer.close()
        if self.run is not None:
            self.run.finish()


def weights_and_biases() -> Any:
    try:
        return import_module("wandb")
    except ModuleNotFoundError as error:
        if error.name != "wandb":
            raise
        raise UsageError("log.wandb needs wandb: pip install 'torchsbp[wandb]', or leave log.wandb out") from error


def identity(out: Path) -> str:
    """The id that W&B knows the run by: the same when it is resumed, and different for folders of the same name."""
    return f"{out.name}-{blake2b(str(out.resolve()).encode(), digest_size=4).hexdigest()}"


class Clock:
    """Counts the seconds of training, without evaluation and checkpoints. A resumed run counts on."""

    def __init__(self, seconds: float = 0.0) -> None:
        self.seconds = seconds
        self.since: float | None = None

    def start(self) -> None:
        if self.since is None:
            self.since = time.perf_counter()

    def stop(self) -> float:
        if self.since is not None:
            self.seconds += time.perf_counter() - self.since
            self.since = None
        return self.seconds


class Losses:
    """Sums of a process's losses over the steps since the last line of metrics, by name."""

    def __init__(self, processes: Processes, sums: Mapping[str, float], steps: int) -> None:
        self.processes, self.steps = processes, steps
        self.own = {name: self.tensor(value) for name, value in sums.items()}

    def tensor(self, value: float) -> Tensor:
        return torch.tensor(value, dtype=torch.float64, device=self.processes.device)

    def add(self, losses: Mapping[str, Tensor]) -> None:
        for name, loss in losses.items():
            self.own[name] = self.own.get(name, self.tensor(0.0)) + loss
        self.steps += 1

    def sums(self) -> dict[str, float]:
        """The sums, as means over processes. All processes call this together."""
        values = all_sum(torch.stack(list(self.own.values()))).tolist()
        return {name: value / self.processes.world for name, value in zip(self.own, values, strict=True)}

    def means(self) -> dict[str, float]:
        return {name: value / max(self.steps, 1) for name, value in self.sums().items()}

    def clear(self) -> None:
        self.own = {name: self.tensor(0.0) for name in self.own}
        self.steps = 0


def write_sections(out: Path, sections: Mapping[str, str | bytes]) -> None:
    """Write what a task adds to the report of a run. A section replaces the earlier one of its title."""
    for title, content in sections.items():
        data, kind = (content, "png") if isinstance(content, bytes) else (content.encode(), "html")
        path = out / SECTIONS / f"{title.replace('/', '-')}.{kind}"
        with writing(path):
            replace_file(path, writer(data))


def writer(data: bytes) -> Callable[[IO[bytes]], int]:
    return lambda file: file.write(data)
