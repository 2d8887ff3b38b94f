"""The training loop: one for every task, one process or many.

Everything random is a function of (seed, step) or restored from the checkpoint, so a run that was killed and resumed
ends where one that was never killed does.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from ..errors import RunError, SignalError
from ..memory.peak import peak_bytes
from ..memory.saved import Saved
from ..memory.sizes import MIB
from . import tasks
from .config import Config
from .data.broken import Broken
from .data.loader import loader
from .data.seeds import mixed, seed_everything
from .distributed import Processes, any_of, synchronised
from .evaluation import autocast, evaluated
from .lasting import Lasting
from .learner import Learner
from .progress import progress
from .record import WEIGHTS
from .runs import checkpoint
from .runs.metrics import Clock, Losses, write_sections
from .runs.state import Progress
from .runs.stored import Stored
from .runs.weights import export
from .signals import Signals
from .task import Evaluator


class Trainer(Lasting):
    """A run: built from a configuration, continued from a checkpoint, trained to its end."""

    def __init__(self, config: Config, processes: Processes) -> None:
        self.config, self.processes = config, processes
        torch.use_deterministic_algorithms(config.deterministic)
        seed_everything(config.seed)  # the same initial weights in all processes
        self.accumulate = config.accumulate(processes.world)
        micro_batch = config.per_forward(processes.world)
        self.task = tasks.start(config.task, config.seed)
        self.task.check(micro_batch)
        self.order = self.task.train_order(micro_batch, processes.rank, processes.world, self.accumulate)
        self.order.epochs = config.epochs
        batches = self.order.batches_per_epoch
        self.steps_per_epoch = batches // self.accumulate
        self.steps = config.epochs * self.steps_per_epoch
        self.learner = Learner(self.task, config, processes, batches, self.steps_per_epoch)
        self.model = self.learner.model
        seed_everything(mixed(config.seed, processes.rank))  # augmentation and stochastic depth differ by process
        self.progress = Progress()
        self.broken = Broken(self.task.broken, self.say)
        self.signals: Signals | None = None
        self.saved: Saved | None = None
        sharded = isinstance(self.model, FSDPModule)  # its gathered parameters would be counted as saved
        self.counts_saved = processes.device.type == "cpu" and not config.compile and not sharded

    # One update

    def forward(self, number: int, batch: Any) -> dict[str, Tensor]:
        """Forward and backward of the run's ``number``-th micro-batch. Return losses by name, their sum as "loss"."""
        learner = self.learner
        if learner.sbp:
            self.task.set_step(self.model, number)
        counting: AbstractContextManager[Any] = nullcontext()
        if self.counts_saved and self.saved is None:
            counting = self.saved = Saved(self.model)
        with synchronised(learner.parallel, last=(number + 1) % self.accumulate == 0):
            with autocast(self.config, self.processes.device), counting:
                losses = named(self.task.loss(learner.parallel, batch))
            learner.scaler.scale(losses["loss"] / self.accumulate).backward()
        return {name: loss.detach() for name, loss in losses.items()}

    def update(self, batches: Iterator[Any]) -> dict[str, Tensor]:
        """Take one step of the optimizer. Return this process's losses, their means over micro-batches."""
        learner, step, clip = self.learner, self.progress.step, self.config.optimizer.clip_norm
        learner.schedule.step_update(step)
        losses = []
        for micro in range(self.accumulate):
            batch = self.task.prepare(next(batches), training=True)
            losses.append(self.forward(step * self.accumulate + micro, batch))
        if clip is not None:
            learner.scaler.unscale_(learner.optimizer)
            nn.utils.clip_grad_norm_(self.model.parameters(), clip)
        learner.scaler.step(learner.optimizer)
        learner.scaler.update()
        learner.optimizer.zero_grad()
        self.progress.step += 1
        if learner.ema is not None:
            learner.ema.update(self.model, self.progress.step)
        return {name: torch.stack([each[name] for each in losses]).mean() for name in losses[0]}

    # The run

    def batches(self) -> Iterator[Any]:
        """The batches from where the run is to its end."""
        self.order.start = self.progress.step * self.accumulate
        task, pin = self.task, self.processes.device.type == "cuda"
        return self.readable(iter(loader(task.train_data, self.order, task.collate, task.workers, pin)))

    def readable(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Yield the batches alone, and note the samples that could not be read."""
        for batch, unread in batches:
            self.broken.add(message for _, message in unread)
            yield batch

    def fit(self) -> None:
        """Train to the end. After a signal, save everything and raise ``SignalError``."""
        self.folder = checkpoint.Folder(self.config.out / "checkpoints", self.config.checkpoint.keep)
        self.signals = Signals()
        with self.signals, self.lock() or nullcontext():
            self.resume()
            self.metrics = self.open_metrics()
            for note in self.task.notes:
                self.say(note)
            log, main = self.config.log, self.processes.main
            self.bar = progress(self.steps, self.progress.step, log.every_seconds, shown=log.progress and main)
            try:
                self.run()
            finally:
                self.bar.close()
                if self.metrics is not None:
                    self.metrics.close()

    def run(self) -> None:
        progress, config, device = self.progress, self.config, self.processes.device
        self.clock = Clock(progress.seconds)
        self.losses = Losses(self.processes, {"loss": progress.loss_sum, **progress.losses}, progress.loss_steps)
        batches = self.batches()
        self.learner.train()
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        before = self.clock.seconds, progress.step
        while True:
            if self.due_for_evaluation():
                self.evaluate()
            if progress.step >= self.steps or self.out_of_patience():
                break
            self.clock.start()
            self.losses.add(self.update(batches))
            stopping = self.stopping()
            if progress.step % config.log.every_steps == 0 or progress.step == self.steps:
                before = self.record(*before)
            self.bar.update()
            epoch_ends = progress.step % self.steps_per_epoch == 0
            every = config.checkpoint.every_steps
            if stopping or epoch_ends or (every is not None and progress.step % every == 0):
                self.save()
            if stopping:
                raise SignalError
        self.finish()

    def stopping(self) -> bool:
        return self.signals is not None and any_of(self.signals.came)

    def record(self, seconds: float, step: int) -> tuple[float, int]:
        """Write a line of metrics for the time since the last one, which was written after ``seconds`` of training at
        ``step``. Return both for this line. Raise ``RunError`` if the loss is not finite."""
        losses = self.mean_losses()
        now = self.clock.stop()
        self.losses.clear()
        rate = (self.progress.step - step) * self.config.batch / max(now - seconds, 1e-9)
        memory = self.memory()
        shown = "" if memory is None else f", {memory:.0f} MiB"
        self.bar.set_postfix_str(
            f"epoch {self.epoch():.2f}, loss {losses['loss']:.3f}, {rate:.0f} {self.task.unit}/s{shown}"
        )
        values = {
            "epoch": self.epoch(),
            **losses,
            "lr": max(group["lr"] for group in self.learner.optimizer.param_groups),
            f"{self.task.unit}_per_s": rate,
            "memory_mib": memory,
            "seconds": now,
        }
        self.write("train", **values)
        self.clock.start()
        return now, self.progress.step

    def epoch(self) -> float:
        return self.progress.step / self.steps_per_epoch

    def mean_losses(self) -> dict[str, float]:
        """Means over processes and the steps since the last line. Raise ``RunError`` if their sum is not finite."""
        means = self.losses.means()
        loss = means["loss"]
        if loss != loss or abs(loss) == float("inf"):
            newest = next(iter(reversed(self.folder.steps())), None)
            raise RunError(
                f"the loss is {loss} at step {self.progress.step}. Nothing was saved since; the last good checkpoint: "
                f"{newest or 'none'}. A lower optimizer.lr, optimizer.clip_norm or another precision may help."
            )
        return means

    def memory(self) -> float | None:
        """In MiB: on a GPU the peak; on a CPU, in eager mode, what the first forward saved for backward."""
        device = self.processes.device
        if device.type == "cuda":
            return peak_bytes(device) / MIB
        return None if self.saved is None else self.saved.total / MIB

    def write(self, kind: str, **values: Any) -> None:
        if self.metrics is not None:
            self.metrics.write(kind, self.progress.step, **values)

    def finish(self) -> None:
        """Write the final weights as safetensors."""
        weights, progress = self.learner.best_weights(), self.progress
        if self.processes.main:
            path = self.config.out / WEIGHTS
            name = "model" if self.learner.ema is None else "ema"
            stored = Stored(path, name, progress.step, self.described(), self.task.weights_about(), weights)
            with checkpoint.writing(path):
                export(weights, path, stored.metadata())
            self.write("end", best=progress.best, best_step=progress.best_step)
            metric = self.task.metric(self.task.best_by)
            early = f" at step {progress.step} of {self.steps}, out of patience" if progress.step < self.steps else ""
            self.say(f"finished{early}: best {metric.name} {progress.best:{metric.format}}, weights in {path}")

    # Evaluation

    def due_for_evaluation(self) -> bool:
        step = self.progress.step
        every = self.config.eval_every * self.steps_per_epoch
        return step > 0 and step != self.progress.evaluated and (step % every == 0 or step == self.steps)

    def out_of_patience(self) -> bool:
        """Whether ``config.patience`` evaluations brought nothing better. This depends on ``progress`` alone, so a
        resumed run stops at the same step."""
        config, since = self.config, self.progress.evaluated - self.progress.best_step
        return config.patience is not None and since >= config.patience * config.eval_every * self.steps_per_epoch

    def evaluate(self) -> None:
        """Evaluate the model and its average, then save a checkpoint, which may be the best one."""
        progress, ema = self.progress, self.learner.ema
        evaluator, values = self.test(self.model)
        if ema is not None:
            evaluator, averaged = self.test(ema.module)
            values |= {f"ema_{name}": value for name, value in averaged.items()}
        self.learner.train()
        progress.evaluated = progress.step
        metric = self.task.metric(self.task.best_by)
        value = values[metric.name if ema is None else f"ema_{metric.name}"]
        best = progress.best is None or metric.sign * value > metric.sign * progress.best
        if best:
            progress.best, progress.best_step = value, progress.step
        self.gather_broken()
        listed = {"broken": progress.broken} if progress.broken else {}
        self.write("valid", epoch=self.epoch(), seconds=progress.seconds, best=progress.best, **values, **listed)
        if self.processes.main:
            write_sections(self.config.out, {**evaluator.sections(), **self.broken.section()})
            if self.config.log.progress:
                text = ", ".join(f"{name} {value:{self.task.metric(name).format}}" for name, value in values.items())
                self.say(f"epoch {self.epoch():.0f}: {text}")
        self.save(best)

    def test(self, model: nn.Module) -> tuple[Evaluator, dict[str, float]]:
        """Evaluate one model. A signal ends that at once: everything is saved already, and a resumed run evaluates
        again."""
        return evaluated(self.task, model, self.config, self.processes, self.broken, self.stopping)


def named(loss: Tensor | dict[str, Tensor]) -> dict[str, Tensor]:
    """Name the losses: the total is "loss", each of several parts "loss_NAME"."""
    if isinstance(loss, Tensor):
        return {"loss": loss}
    return {"loss": torch.stack(list(loss.values())).sum(), **{f"loss_{name}": part for name, part in loss.items()}}
