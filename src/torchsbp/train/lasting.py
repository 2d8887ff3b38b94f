"""What a run has on disk: the lock of its folder, its checkpoints, and its record."""

import os
import sys
from dataclasses import asdict
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from tqdm import tqdm

from ..errors import RunError
from .config import Config, differences, plain
from .data.broken import Broken
from .distributed import Processes, any_of, barrier, environment, gather
from .learner import Learner
from .record import FILE, WEIGHTS, read_lines
from .runs import checkpoint
from .runs.lock import Lock
from .runs.metrics import Clock, Losses, Metrics
from .runs.state import Progress, random_state, set_random_state
from .task import Task


class Lasting:
    """The part of ``Trainer`` that writes to the folder ``config.out`` and continues from what is there."""

    config: Config
    processes: Processes
    task: Task
    learner: Learner
    progress: Progress
    broken: Broken
    folder: checkpoint.Folder
    clock: Clock
    losses: Losses
    accumulate: int
    steps: int

    def say(self, message: str) -> None:
        if self.processes.main:
            tqdm.write(message, file=sys.stderr)

    def mean_losses(self) -> dict[str, float]:
        """The losses since the last line of metrics; raise ``RunError`` if their sum is not finite."""
        raise NotImplementedError

    def lock(self) -> Lock | None:
        """Lock the folder. The first process does that for all, and all raise ``RunError`` if it is refused."""
        held, refusal = None, ""
        if self.processes.main:
            try:
                held = Lock(self.config.out, self.say)
            except (RunError, OSError) as error:
                refusal = str(error)
        if told := "".join(gather(refusal)):
            raise RunError(told)
        return held

    def save(self, best: bool = False) -> None:
        """Save a checkpoint. All processes call this together; the first one writes."""
        self.mean_losses()  # raises after NaN, so that nothing is saved
        progress = self.progress
        progress.seconds, progress.loss_steps = self.clock.stop(), self.losses.steps
        progress.losses = self.losses.sums()
        progress.loss_sum = progress.losses.pop("loss")
        self.gather_broken()
        content = {
            "config": self.described(),
            "about": self.task.weights_about(),
            "task": self.task.state(),
            "progress": progress.state(),
            **self.learner.state(),
            "sampler": {"start": progress.step * self.accumulate},
            "random": gather(random_state(self.processes.device)),
        }
        if self.processes.main:
            self.folder.save(content, progress.step, best)
        barrier()

    def gather_broken(self) -> None:
        """Put what any process could not read into ``progress.broken``, for the checkpoint."""
        self.broken.gather()
        self.progress.broken = self.broken.listed()

    def described(self) -> dict[str, Any]:
        return plain(asdict(self.config))

    def resume(self) -> None:
        """Continue from the checkpoint that ``config.resume`` names; without one, refuse a folder that has a run."""
        config = self.config
        if config.resume is None:
            if any_of(self.processes.main and self.taken()):  # the first process looks, and all raise
                raise RunError(f"{config.out} has a run already: continue with --resume auto, or choose another --out")
            return
        if self.processes.main:
            self.folder.clean()
        barrier()
        if config.resume == "auto":
            found = self.folder.newest(self.say)
            if found is None:
                return
            path, content = found
        elif Path(config.resume).is_dir():
            found = checkpoint.Folder(Path(config.resume) / "checkpoints", 1).newest(self.say)
            if found is None:
                raise RunError(
                    f"no checkpoints in {config.resume}: --resume takes a run's folder, a checkpoint, or auto"
                )
            path, content = found
        else:
            path = Path(config.resume)
            content = checkpoint.read_run(path)
        self.restore(path, content)
        self.say(f"resumed from {path} at step {self.progress.step} of {self.steps}")

    def taken(self) -> bool:
        """Whether the folder has a run that could be continued. If it has nothing but a record, put that aside."""
        out = self.config.out
        record = out / FILE
        done = (line.get("kind") in ("valid", "end") for line in read_lines(record)) if record.exists() else ()
        if any(self.folder.folder.glob("*.pt")) or any(done) or (out / WEIGHTS).exists():
            return True
        if record.exists():
            aside = record.with_name(f"failed-{FILE}")
            os.replace(record, aside)
            self.say(f"{out} has a run that ended before its first checkpoint; its record is now {aside}")
        return False

    def restore(self, path: Path, content: dict[str, Any]) -> None:
        progress, processes, config = Progress.of(content["progress"]), self.processes, self.config
        differing = differences(content["config"], config)
        if differing:
            self.say(f"{path} was made with other settings; now {', '.join(differing)}")
        if progress.step * self.accumulate != content["sampler"]["start"] or progress.step > self.steps:
            self.say(f"{path}: the data order differs, since batch, micro_batch, processes or epochs were changed")
        self.learner.restore(content, path, unchanged=not differing)
        states = content["random"]
        if len(states) == processes.world:
            set_random_state(states[processes.rank], processes.device)
        else:
            self.say(f"{path} is of {len(states)} processes, now {processes.world}: random numbers differ")
        self.progress = progress
        self.broken.found.update(progress.broken)
        self.task.restore(content.get("task", {}))
        barrier()  # all have read
        if processes.main:
            self.folder.put_aside(path, progress.step, self.say)
            if progress.best_step == progress.step > 0 and path in self.folder.steps():
                self.folder.mark_best(progress.step)  # in case the run was killed before it marked this checkpoint
        barrier()

    def open_metrics(self) -> Metrics | None:
        if not self.processes.main:
            return None
        config = self.config
        config.out.mkdir(parents=True, exist_ok=True)
        described = self.described()
        metrics = Metrics(config.out, self.progress, described, config.log.tensorboard, config.log.wandb)
        about = {"config": described, "task": self.task.described(), "environment": environment(self.processes)}
        if metrics.about is None:
            metrics.write("run", 0, **about, steps=self.steps)
        elif changed := differences(metrics.about.get("config", {}), config):
            when = datetime.now(timezone.utc).isoformat(sep=" ", timespec="seconds")
            metrics.write("run", self.progress.step, **about, steps=self.steps, changed=changed, when=when)
        return metrics
