"""The training loop: one for every task, one process or many.

Everything random is a function of (seed, step) or restored from the checkpoint, so that a run that was killed and
resumed ends where one that was never killed does.
"""

import signal
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from timm.optim import create_optimizer_v2
from timm.scheduler import create_scheduler_v2
from timm.utils import ModelEmaV3
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from tqdm import tqdm

import torchsbp

from ..memory.blocks import Saved
from ..memory.sizes import MIB
from . import checkpoint
from .config import Config
from .data import EvalOrder, TrainOrder, loader, mixed
from .distributed import Processes, all_sum, any_of, barrier, gather, shard, synchronised
from .errors import CheckpointError, RunError, SignalError
from .metrics import FILE, Clock, Metrics
from .state import (
    Progress,
    load_model,
    load_optimizer,
    model_state,
    optimizer_state,
    random_state,
    seed_everything,
    set_random_state,
)
from .task import Task
from .weights import check_fit, export, head_names


class Signals:
    """SIGTERM and SIGINT ask the loop to stop; a second one ends the process at once."""

    def __init__(self) -> None:
        self.came = False
        self.before: dict[int, Any] = {}

    def __enter__(self) -> "Signals":
        self.before = {number: signal.signal(number, self.note) for number in (signal.SIGTERM, signal.SIGINT)}
        return self

    def note(self, number: int, frame: FrameType | None) -> None:
        self.came = True
        self.__exit__()

    def __exit__(self, *_: Any) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)


class Trainer:
    """A run: built from a configuration, continued from a checkpoint, trained to its end."""

    def __init__(self, config: Config, processes: Processes) -> None:
        self.config, self.processes, device = config, processes, processes.device
        torch.use_deterministic_algorithms(config.deterministic)
        seed_everything(config.seed)  # the same weights everywhere
        self.accumulate = config.accumulate(processes.world)
        self.micro_batch = config.batch // (processes.world * self.accumulate)
        self.task: Task = config.task.start(config.seed)
        self.task.check(self.micro_batch)
        self.order = TrainOrder(
            len(self.task.train_data),
            self.micro_batch,
            config.seed,
            processes.rank,
            processes.world,
            multiple=self.accumulate,
        )
        self.order.epochs = config.epochs
        self.steps_per_epoch = self.order.batches_per_epoch // self.accumulate
        self.steps = config.epochs * self.steps_per_epoch
        layout = torch.channels_last if config.channels_last else torch.contiguous_format
        self.task.to(device, layout)
        self.model = self.task.model()
        sbp = config.sbp.build(config.seed, self.order.batches_per_epoch)
        self.sbp = sbp is not None
        if sbp is not None:
            torchsbp.apply(self.model, config=sbp)
        self.model.to(device).to(memory_format=layout)
        self.ema = None
        if config.ema.decay is not None:
            self.ema = ModelEmaV3(self.model, decay=config.ema.decay, use_warmup=config.ema.warmup)
        self.parallel = self.wrap()
        self.make_optimizer()
        seed_everything(mixed(config.seed, processes.rank))  # augmentation and stochastic depth differ by process
        self.progress = Progress()
        self.signals: Signals | None = None
        self.saved: Saved | None = None
        sharded = isinstance(self.model, FSDPModule)  # whose parameters come and go among what is saved
        self.counts_saved = device.type == "cpu" and not config.compile and not sharded

    def wrap(self) -> nn.Module:
        """Compiled and made parallel, around the same parameters."""
        config, world = self.config, self.processes.world
        if world > 1 and config.parallel == "fsdp":
            shard(self.model, self.processes.device)
            if self.ema is not None:
                shard(self.ema.module, self.processes.device)
        if config.compile:
            self.model.compile()
        if world > 1 and config.parallel == "ddp":
            return nn.parallel.DistributedDataParallel(self.model)
        return self.model

    def make_optimizer(self) -> None:
        optimizer, schedule = self.config.optimizer, self.config.schedule
        curve = schedule.name in ("cosine", "tanh", "poly")  # from the end of the warm-up to the end of the run
        try:
            self.optimizer = create_optimizer_v2(
                self.model,
                optimizer.name,
                lr=optimizer.lr,
                weight_decay=optimizer.weight_decay,
                layer_decay=optimizer.layer_decay,
                **optimizer.options,
            )
            self.schedule, _ = create_scheduler_v2(
                self.optimizer,
                schedule.name,
                num_epochs=self.config.epochs - (schedule.warmup_epochs if curve else 0),
                warmup_epochs=schedule.warmup_epochs,
                warmup_prefix=curve,
                warmup_lr=schedule.warmup_lr,
                min_lr=schedule.min_lr,
                step_on_epochs=False,
                updates_per_epoch=self.steps_per_epoch,
                **schedule.options,
            )
        except (TypeError, AssertionError) as error:
            raise ValueError(f"optimizer {optimizer} or schedule {schedule}: {error}") from error
        self.scaler = torch.amp.GradScaler(self.processes.device.type, enabled=self.config.precision == "float16")

    # One update

    def autocast(self) -> Any:
        if self.config.precision == "float32":
            return nullcontext()
        return torch.autocast(self.processes.device.type, getattr(torch, self.config.precision))

    def forward(self, number: int, batch: Any) -> Tensor:
        """Forward and backward of the run's ``number``-th micro-batch: masks and keep-ratio follow that number."""
        if self.sbp:
            torchsbp.set_step(self.model, number)
        counting: AbstractContextManager[Any] = nullcontext()
        if self.counts_saved and self.saved is None:
            counting = self.saved = Saved(self.model)
        with synchronised(self.parallel, last=(number + 1) % self.accumulate == 0):
            with self.autocast(), counting:
                loss = self.task.loss(self.parallel, batch)
            self.scaler.scale(loss / self.accumulate).backward()
        return loss.detach()

    def update(self, batches: Iterator[Any]) -> Tensor:
        """One step of the optimizer; the loss of this process."""
        step, clip = self.progress.step, self.config.optimizer.clip_norm
        self.schedule.step_update(step)
        losses = []
        for micro in range(self.accumulate):
            batch = self.task.prepare(next(batches), training=True)
            losses.append(self.forward(step * self.accumulate + micro, batch))
        if clip is not None:
            self.scaler.unscale_(self.optimizer)
            nn.utils.clip_grad_norm_(self.model.parameters(), clip)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        self.progress.step += 1
        if self.ema is not None:
            self.ema.update(self.model, self.progress.step)
        return torch.stack(losses).mean()

    # The run

    def batches(self) -> Iterator[Any]:
        """From where the run is to its end."""
        self.order.start = self.progress.step * self.accumulate
        return iter(self.loader(self.task.train_data, self.order))

    def loader(self, samples: Any, order: Any) -> Any:
        workers = self.config.task.data.workers
        return loader(samples, order, self.task.collate, workers, pin=self.processes.device.type == "cuda")

    def fit(self) -> None:
        """Train to the end. Raises ``SignalError`` after a signal, when everything is saved."""
        self.folder = checkpoint.Folder(self.config.out / "checkpoints", self.config.checkpoint.keep)
        self.signals = Signals()
        with self.signals:
            self.resume()
            self.metrics = self.open_metrics()
            self.bar = tqdm(
                total=self.steps,
                initial=self.progress.step,
                unit="step",
                dynamic_ncols=True,
                disable=not (self.config.log.progress and self.processes.main),
            )
            try:
                self.run()
            finally:
                self.bar.close()
                if self.metrics is not None:
                    self.metrics.close()

    def run(self) -> None:
        progress, config = self.progress, self.config
        self.clock = Clock(progress.seconds)
        self.loss = torch.tensor(progress.loss_sum, dtype=torch.float64, device=self.processes.device)
        batches = self.batches()
        self.model.train()
        if self.processes.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.processes.device)
        before = self.clock.seconds, progress.step
        while True:
            if self.due_for_evaluation():
                self.evaluate()
            if progress.step >= self.steps:
                break
            self.clock.start()
            self.loss += self.update(batches)
            progress.loss_steps += 1
            self.bar.update()
            stopping = self.stopping()
            if progress.step % config.log.every_steps == 0 or progress.step == self.steps:
                before = self.record(*before)
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
        """A line of metrics over the steps since the last one; NaN ends the run."""
        loss = self.mean_loss()
        progress = self.progress
        now = self.clock.stop()
        self.loss.zero_()
        progress.loss_steps = 0
        rate = (progress.step - step) * self.config.batch / max(now - seconds, 1e-9)
        memory = self.memory()
        epoch = progress.step / self.steps_per_epoch
        shown = "" if memory is None else f", {memory:.0f} MiB"
        self.bar.set_postfix_str(f"epoch {epoch:.2f}, loss {loss:.3f}, {rate:.0f} images/s{shown}")
        self.write(
            "train",
            epoch=epoch,
            loss=loss,
            lr=max(group["lr"] for group in self.optimizer.param_groups),
            images_per_s=rate,
            memory_mib=memory,
            seconds=now,
        )
        self.clock.start()
        return now, progress.step

    def mean_loss(self) -> float:
        """Over processes and the steps since the last line. Raises if it is not a number."""
        loss = float(all_sum(self.loss)) / max(self.progress.loss_steps, 1) / self.processes.world
        if loss != loss or abs(loss) == float("inf"):
            newest = next(iter(reversed(self.folder.steps())), None)
            raise RunError(
                f"the loss is {loss} at step {self.progress.step}. Nothing was saved since; the last good checkpoint: "
                f"{newest or 'none'}. A lower optimizer.lr, optimizer.clip_norm or another precision may help."
            )
        return loss

    def memory(self) -> float | None:
        """MiB: the peak on a GPU; on a CPU, in eager mode, what the first forward saved for backward."""
        device = self.processes.device
        if device.type == "cuda":
            return torch.cuda.max_memory_allocated(device) / MIB
        return None if self.saved is None else self.saved.total / MIB

    def write(self, kind: str, **values: Any) -> None:
        if self.metrics is not None:
            self.metrics.write(kind, self.progress.step, **values)

    # Evaluation

    def due_for_evaluation(self) -> bool:
        step = self.progress.step
        every = self.config.eval_every * self.steps_per_epoch
        return step > 0 and step != self.progress.evaluated and (step % every == 0 or step == self.steps)

    def evaluate(self) -> None:
        """Metrics of the model and of its average; the checkpoint of this step may become the best."""
        progress = self.progress
        values = self.test(self.model)
        if self.ema is not None:
            values |= {f"ema_{name}": value for name, value in self.test(self.ema.module).items()}
        self.model.train()
        progress.evaluated = progress.step
        metric = values[f"ema_{self.task.metric}" if self.ema is not None else self.task.metric]
        best = progress.best is None or metric > progress.best
        if best:
            progress.best, progress.best_step = metric, progress.step
        epoch = progress.step / self.steps_per_epoch
        self.write("valid", epoch=epoch, seconds=progress.seconds, best=progress.best, **values)
        if self.processes.main and self.config.log.progress:
            text = ", ".join(f"{name} {value:.2f}" for name, value in values.items())
            tqdm.write(f"epoch {epoch:.0f}: {text}", file=sys.stderr)
        self.save(best)

    @torch.no_grad()
    def test(self, model: nn.Module) -> dict[str, float]:
        model.eval()
        processes = self.processes
        order = EvalOrder(len(self.task.valid_data), self.micro_batch, processes.rank, processes.world)
        evaluator = self.task.evaluator()
        for number, batch in enumerate(self.loader(self.task.valid_data, order)):
            if self.stopping():
                raise SignalError  # saved before the evaluation, which is done again
            with self.autocast():
                evaluator.update(model, self.task.prepare(batch, training=False), order.valid(number))
        return evaluator.result()

    # Checkpoints

    def save(self, best: bool = False) -> None:
        """All processes together; the first one writes."""
        self.mean_loss()  # nothing is saved after NaN
        progress = self.progress
        progress.seconds = self.clock.stop()
        progress.loss_sum = float(all_sum(self.loss)) / self.processes.world
        content = {
            "config": self.described(),
            "progress": progress.state(),
            "model": model_state(self.model),
            "ema": None if self.ema is None else model_state(self.ema.module),
            "optimizer": optimizer_state(self.model, self.optimizer),
            "schedule": self.schedule.state_dict(),
            "scaler": self.scaler.state_dict(),
            "sampler": {"seed": self.config.seed, "start": progress.step * self.accumulate},
            "sbp_step": progress.step * self.accumulate,
            "random": gather(random_state(self.processes.device)),
        }
        if self.processes.main:
            self.folder.save(content, progress.step, best)
        barrier()

    def described(self) -> dict[str, Any]:
        return plain(asdict(self.config))

    def resume(self) -> None:
        """Continue from the checkpoint that ``resume`` names; refuse to mix with another run."""
        config = self.config
        if config.resume is None:
            taken = self.processes.main and ((config.out / FILE).exists() or bool(self.folder.steps()))
            if any_of(taken):  # all look before the first one writes
                raise RunError(f"{config.out} has a run already: continue with --resume auto, or choose another --out")
            return
        self.clean()
        if config.resume == "auto":
            found = self.folder.newest(self.say)
            if found is None:
                return
            path, content = found
        else:
            path = Path(config.resume)
            content = checkpoint.read_run(path)
        self.restore(path, content)
        self.say(f"resumed from {path} at step {self.progress.step} of {self.steps}")

    def clean(self) -> None:
        if self.processes.main:
            self.folder.clean()
        barrier()

    def restore(self, path: Path, content: dict[str, Any]) -> None:
        progress = Progress.of(content["progress"])
        differing = differences(content["config"], self.described())
        if differing:
            self.say(f"{path} was made with other settings; now {', '.join(differing)}")
        check_fit(self.model.state_dict(), content["model"], head_names(self.model), str(path))
        if (content["ema"] is None) != (self.ema is None):
            raise CheckpointError(f"{path} has {'no' if self.ema else 'an'} average of weights: ema.decay was changed")
        if progress.step * self.accumulate != content["sampler"]["start"] or progress.step > self.steps:
            self.say(f"{path}: the data order differs, since batch, micro_batch, processes or epochs were changed")
        try:
            load_model(self.model, content["model"])
            if self.ema is not None:
                load_model(self.ema.module, content["ema"])
            load_optimizer(self.model, self.optimizer, content["optimizer"])
        except (KeyError, RuntimeError, ValueError) as error:
            raise CheckpointError(f"{path} does not fit this optimizer or model: {error}") from error
        if not differing:  # otherwise it follows the new settings
            self.schedule.load_state_dict(content["schedule"])
        self.scaler.load_state_dict(content["scaler"])
        states = content["random"]
        if len(states) == self.processes.world:
            set_random_state(states[self.processes.rank], self.processes.device)
        else:
            self.say(f"{path} is of {len(states)} processes, now {self.processes.world}: random numbers differ")
        self.progress = progress
        in_folder = path.parent.resolve() == self.folder.folder.resolve()
        if self.processes.main and in_folder and progress.best_step == progress.step > 0:
            self.folder.mark_best(progress.step)  # the process may have ended between the two names
        barrier()

    def load_for_test(self, content: dict[str, Any], weights: str, path: Path) -> None:
        """The weights of a checkpoint, "model" or "ema", and nothing else of it."""
        if content[weights] is None:
            raise CheckpointError(f"{path} has no average of weights: use --weights model")
        check_fit(self.model.state_dict(), content[weights], head_names(self.model), str(path))
        load_model(self.model, content[weights])

    def open_metrics(self) -> Metrics | None:
        if not self.processes.main:
            return None
        config = self.config
        config.out.mkdir(parents=True, exist_ok=True)
        first = not (config.out / FILE).exists()
        described = self.described()
        metrics = Metrics(config.out, self.progress.step, described, config.log.tensorboard, config.log.wandb)
        if first:
            metrics.write("run", 0, config=described, environment=environment(self.processes), steps=self.steps)
        return metrics

    def finish(self) -> None:
        """The final weights as safetensors: the average, if there is one."""
        weights = model_state(self.model if self.ema is None else self.ema.module)
        if self.processes.main:
            path = self.config.out / "model.safetensors"
            export(weights, path, {"step": self.progress.step, "config": self.described()})
            self.write("end", best=self.progress.best, best_step=self.progress.best_step)
            self.say(f"finished: best {self.task.metric} {self.progress.best:.2f}, weights in {path}")

    def say(self, message: str) -> None:
        if self.processes.main:
            tqdm.write(message, file=sys.stderr)


def plain(value: Any) -> Any:
    """As JSON has it: paths as text, tuples as lists."""
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return str(value) if isinstance(value, Path) else value


def differences(before: Any, now: Any, name: str = "") -> list[str]:
    """What was changed, as ``name=value``, but for where the run is and how it is watched."""
    if isinstance(before, dict) and isinstance(now, dict):
        keys = [k for k in now if name or k not in ("out", "resume", "log", "checkpoint", "throughput")]
        return [d for k in keys for d in differences(before.get(k), now[k], f"{name}.{k}" if name else k)]
    return [] if before == now else [f"{name}={now} instead of {before}"]


def environment(processes: Processes) -> dict[str, Any]:
    cuda = processes.device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name(processes.device) if cuda else "CPU",
        "processes": processes.world,
        "memory": "peak GPU memory" if cuda else "saved activations",
        "torch": torch.__version__,
        "torchsbp": torchsbp.__version__,
    }
