"""One run: a small model, trained from scratch by one arm, on images that are on the device.

Runs of one seed are pairs: they have the same initial weights, images, order, augmentation and stochastic depth. Arms
with another batch, with patches left out, or with checkpointing may differ in the last two.

A step of such a model is hundreds of kernels that run for less time than a CPU takes to launch them. So all that
differs between the steps of an epoch (batches, rates, random numbers) is on the device, and each step reads its own. On
a GPU a whole step is one CUDA graph, and an epoch replays it. All runs of an arm replay the same graph.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..patching.apply import apply, set_step
from .arms import ARMS, FALLING, FULL
from .augment import NUMBERS, Augment
from .data import Data
from .models import MODELS, build
from .optimizer import optimizers
from .results import Row
from .saved import Saved, write

WARM = 3
"""Warm-up steps before one is captured."""
TOLD_EVERY = 60.0
"""Seconds between two lines that say how far a run is."""


@dataclass(frozen=True)
class Run:
    """What differs between runs. ``lr`` multiplies the model's own learning rate. ``shorter``: smaller numbers of
    epochs for which the run also gives results, each with the schedule of that length."""

    model: str
    arm: str
    seed: int = 0
    epochs: int = 40
    lr: float = 1.0
    drop_path: float = 0.0
    shorter: tuple[int, ...] = ()

    @property
    def name(self) -> str:
        tuned = f"lr {self.lr:g}, drop path {self.drop_path:g}"
        return f"{self.model}, {self.arm}, {'+'.join(map(str, self.lengths))} epochs, {tuned}, seed {self.seed}"

    @property
    def lengths(self) -> tuple[int, ...]:
        return *self.shorter, self.epochs


@dataclass(frozen=True)
class Settings:
    """What all runs of a study share.

    - ``warmup``: in epochs; ``decay``: the share of a run in which the learning rate falls to 0.
    - ``images``: the number of images to train on (the first ones), with a fifth as many to test on; 0: all.
    - ``masks``: how many masks gradients are compared over. ``capture``: on a GPU, steps are CUDA graphs.
    """

    batch: int = 256
    optimizer: str = "muon"
    weight_decay: float = 0.05
    warmup: float = 2.0
    decay: float = 0.4
    clip: float = 1.0
    compile: bool = True
    capture: bool = True
    size: str = "full"
    masks: int = 16
    images: int = 0
    augment: Augment = field(default_factory=Augment)

    def turn(self, length: int) -> int:
        """The epoch in which the learning rate of a run of that length starts to fall."""
        return int((1 - self.decay) * length)

    def rate(self, epoch: float, length: int) -> float:
        """The rate, relative: up to 1, constant, linearly to 0. Runs of all lengths are the same before their turn."""
        return min(1.0, epoch / self.warmup) * min(1.0, (length - epoch) / (length - self.turn(length)))


class Place(NamedTuple):
    """Where the data are, and where results go."""

    data: Path
    out: Path


class Training:
    """A model, its optimizers and its data: ``begin`` a run, then call ``epoch`` again and again. An epoch depends only
    on its number and on ``state``."""

    def __init__(self, run: Run, settings: Settings, data: Data) -> None:
        self.settings, self.data = settings, data
        arm = self.arm = ARMS[run.arm]
        self.model = fresh(run, settings, data).to(data.device)
        if arm.checkpoint:
            self.model.set_grad_checkpointing(True)  # type: ignore[operator]
        self.draw = arm.instead(self.model, **arm.options or {}) if arm.instead else None
        if arm.options is not None and not arm.instead:
            apply(self.model, capture=not settings.capture, **arm.options)  # else the whole step is captured
        # With Inductor's own random numbers the compiled graphs of two arms would draw different ones.
        paired: Any = {"fallback_random": not arm.checkpoint}
        compiled = settings.compile and not arm.instead
        self.forward = torch.compile(self.model, dynamic=False, options=paired) if compiled else self.model
        self.batch = round(settings.batch * arm.batch)
        self.steps = len(data.x_train) // self.batch
        self.make_epoch()
        self.optimizers = optimizers(settings.optimizer, self.model, self.rate, settings.weight_decay)
        # Eager checkpointing reads the state of random numbers, "instead" counts in Python: neither can be captured.
        captured = settings.capture and data.device.type == "cuda" and (compiled or not (arm.checkpoint or arm.instead))
        self.peak = 0
        self.ways = [self.way(first, captured) for first in ((0, FALLING) if arm.changes else (0,))]
        self.begin(run)

    def way(self, first: int, captured: bool) -> Callable[[], None]:
        """Return what takes a step, with the keep-ratios that hold when masks are counted from ``first``."""
        if self.arm.options is not None and self.draw is None:
            set_step(self.model, first)
        if captured:
            return self.captured()
        self.step()  # at rate 0, so that optimizers have their state
        return self.step

    def make_epoch(self) -> None:
        """Allocate what the steps of an epoch read (image numbers, rates, random numbers, the number of the step) and
        the loss that they add to."""
        device, steps = self.data.device, self.steps
        self.order = torch.zeros(steps, self.batch, dtype=torch.long, device=device)
        self.rates = torch.zeros(steps, device=device)
        self.numbers = torch.zeros(steps, NUMBERS, self.batch, device=device)
        self.turn = torch.zeros(1, dtype=torch.long, device=device)
        self.rate, self.loss = (torch.zeros((), device=device) for _ in range(2))

    def begin(self, run: Run) -> None:
        """Go back to the first step, with the run's initial weights. Its model, arm and stochastic depth must be those
        of the constructor's run."""
        self.run, self.advance, self.told = run, self.ways[0], time.monotonic()
        torch.manual_seed(run.seed)
        first = fresh(run, self.settings, self.data).state_dict().values()  # in order, as "qkv-local" has other names
        for tensor, value in zip(self.model.state_dict().values(), first, strict=True):
            tensor.copy_(value)
        for tensor in self.moments():
            tensor.zero_()

    def epoch(self, number: int, length: int | None = None) -> float:
        """Train epoch ``number``, from 0, of a run of that length (by default its own). Return the mean loss."""
        length = length or self.run.epochs
        self.fill(number, length)
        for _ in range(self.steps):
            self.advance()
        wait(self.data.device)
        loss = float(self.loss) / self.steps
        if time.monotonic() > self.told + TOLD_EVERY:
            print(f"{self.run.name}: epoch {number + 1} of {length}, loss {loss:.3f}", flush=True)
            self.told = time.monotonic()
        return loss

    def fill(self, number: int, length: int) -> None:
        """Fill in what the steps of an epoch read."""
        seed, steps = 1000 * (number + 1) + self.run.seed, self.steps
        torch.manual_seed(seed)  # stochastic depth: the same in every arm
        generator = torch.Generator().manual_seed(seed + 500 * self.arm.reordered)
        order = torch.randperm(len(self.data.x_train), generator=generator)
        self.order.copy_(order[: self.order.numel()].view(steps, -1))
        self.numbers.copy_(torch.rand(self.numbers.shape, generator=generator))
        base = self.run.lr * MODELS[self.run.model].lr[self.settings.optimizer]
        self.rates.copy_(
            torch.tensor([base * self.settings.rate(number + (i + 0.5) / steps, length) for i in range(steps)])
        )
        self.turn.zero_()
        self.loss.zero_()
        falls = self.arm.changes and number >= self.settings.turn(length)
        self.advance = self.ways[falls]
        first = 10**6 * self.run.seed + number * steps + FALLING * falls  # other seeds have other masks
        if self.draw is not None:
            self.draw.step = first
        elif self.arm.options is not None:
            set_step(self.model, first)

    def step(self) -> None:
        """Take the step whose turn it is."""
        chosen, numbers, rate = (its.index_select(0, self.turn)[0] for its in (self.order, self.numbers, self.rates))
        self.rate.copy_(rate)
        x, targets = self.data.batch(chosen, self.settings.augment, numbers)
        with half(x):
            loss = F.cross_entropy(self.forward(x).float(), targets)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), self.settings.clip, foreach=True)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        self.loss += loss.detach()
        self.turn.add_(1).remainder_(self.steps)

    def captured(self) -> Callable[[], None]:
        """Capture a step and return its replay. Warm-up steps at rate 0 come first, to make what lasts: kernels,
        workspaces and the optimizers' state."""
        adamw, aside = self.optimizers[0].param_groups, torch.cuda.Stream()
        for group in adamw:
            group["capturable"] = False  # else AdamW warns of a step outside of a graph
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            for _ in range(WARM):
                self.step()
        torch.cuda.current_stream().wait_stream(aside)
        for group in adamw:
            group["capturable"] = True
        torch.cuda.reset_peak_memory_stats()  # replays allocate nothing: the peak is the capture's
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.step()
        self.peak = max(self.peak, torch.cuda.max_memory_allocated())
        return graph.replay

    def moments(self) -> list[Tensor]:
        return [tensor for its in self.optimizers for tensors in its.state.values() for tensor in tensors.values()]

    def tensors(self) -> list[Tensor]:
        return [*self.model.state_dict().values(), *self.moments()]

    def state(self) -> list[Tensor]:
        return [tensor.clone() for tensor in self.tensors()]

    def restore(self, state: list[Tensor]) -> None:
        for tensor, before in zip(self.tensors(), state, strict=True):
            tensor.copy_(before)


def train(
    run: Run, settings: Settings, data: Data, training: Training | None = None, file: Path | None = None
) -> Iterator[Row]:
    """Train, and yield a row at the end of every length: epoch, accuracy in percent, mean loss, seconds so far.

    Shorter lengths branch off the longest one where their rate starts to fall; it then continues from there.
    ``training``: that of another run, to be reused. ``file``: where the state is saved, and continued from.
    """
    start, saved = time.perf_counter(), Saved(file)
    training = training or Training(run, settings, data)
    training.begin(run)
    done = saved.load(training)
    for length in run.lengths:
        longest, turn = length == run.epochs, settings.turn(length)
        if done > turn and not longest:
            continue  # it had branched off before the run was stopped
        while done < turn:
            training.epoch(done, length)
            done += 1
            saved.save(training, done)
        before, loss = training.state(), 0.0
        for number in range(done, length):
            if longest:
                saved.save(training, number)
            loss = training.epoch(number, length)
        reached = accuracy(training.model, data, settings.batch)
        yield {"epoch": length, "accuracy": reached, "loss": loss, "seconds": time.perf_counter() - start}
        if not longest:
            training.restore(before)
    saved.remove()


@lru_cache(maxsize=1)
def prepared(model: str, arm: str, drop_path: float, settings: Settings, data: Path) -> Training:
    """The training that all runs of an arm share, as they replay one graph. Cached."""
    if settings.compile:
        torch.compiler.reset()  # PyTorch limits recompilations of a class; earlier ones are not needed
    return Training(Run(model, arm, drop_path=drop_path), settings, Data.load(data, settings.images))


def trained(model: str, settings: Settings, data: Data, folder: Path, epochs: int) -> nn.Module:
    """The model that full backpropagation reaches: read from the folder, or trained and saved there."""
    run = Run(model, FULL, epochs=epochs)
    about = f"{settings.size}, {settings.optimizer}, batch {settings.batch}" + (
        f", {settings.images} images" if settings.images else ""
    )
    file = folder / "weights" / f"{run.name}, {about}.pt"
    if not file.exists():
        training = Training(run, settings, data)
        for row in train(run, settings, data, training):
            print(f"{run.name}: {row}", flush=True)
        write(file, training.model.state_dict())
    result = fresh(run, settings, data)
    result.load_state_dict(torch.load(file, weights_only=True, map_location="cpu"))
    return result.to(data.device)


def fresh(run: Run, settings: Settings, data: Data) -> nn.Module:
    """The model before its first step, on the CPU."""
    left_out = ARMS[run.arm].patch_drop
    return build(
        run.model, settings.size, data.x_train.shape[-1], data.classes, drop_path_rate=run.drop_path,
        **({"patch_drop_rate": left_out} if left_out else {}),
    ).train()  # fmt: skip


def wait(device: torch.device) -> None:
    """Wait for the device without occupying the CPU, which several processes share."""
    if device.type == "cuda":
        done = torch.cuda.Event(blocking=True)
        done.record()
        done.synchronize()


def half(x: Tensor) -> torch.autocast:
    """Autocast to bfloat16 on a GPU. Without cache, as a CUDA graph may not read casts that were made before it."""
    return torch.autocast(x.device.type, torch.bfloat16, enabled=x.is_cuda, cache_enabled=False)


def accuracy(model: nn.Module, data: Data, batch: int) -> float:
    """The share of test images that are classified correctly, in percent."""
    return 100 * float((predictions(model, data, batch) == data.y_test).float().mean())


@torch.no_grad()
def predictions(model: nn.Module, data: Data, batch: int) -> Tensor:
    """The predicted classes of the test images."""
    model.eval()
    found = []
    for images in data.x_test.split(2 * batch):
        with half(images):
            found.append(model(images.float() / 255 - 0.5).argmax(1))
    model.train()
    return torch.cat(found)
