"""One run: a small model, trained from scratch on images that are on the device, by one arm.

Runs of one seed are pairs: the same initial weights, the same images in the same order, the same augmentation and
stochastic depth.
"""

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..errors import DataError
from ..patching.apply import apply
from .arms import ARMS, FULL
from .augment import Augment
from .local import apply_local
from .models import MODELS, build

KEYS = ("x_train", "y_train", "x_test", "y_test")
Row = dict[str, Any]


@dataclass(frozen=True)
class Run:
    """What differs between runs. ``lr`` multiplies the model's own learning rate."""

    model: str
    arm: str
    seed: int = 0
    epochs: int = 40
    lr: float = 1.0
    drop_path: float = 0.1

    @property
    def name(self) -> str:
        tuned = f"lr {self.lr:g}, drop path {self.drop_path:g}"
        return f"{self.model}, {self.arm}, {self.epochs} epochs, {tuned}, seed {self.seed}"


@dataclass(frozen=True)
class Settings:
    """What all runs of a study share. ``images``: the first so many to train on, and a fifth as many to test on; 0: all
    of them. ``masks``: to compare gradients by."""

    batch: int = 512
    weight_decay: float = 0.05
    warmup: float = 0.1
    clip: float = 1.0
    compile: bool = True
    evaluations: int = 4
    size: str = "full"
    masks: int = 16
    images: int = 0
    augment: Augment = field(default_factory=Augment)


class Place(NamedTuple):
    """Where data are, and where results go."""

    data: Path
    out: Path


@dataclass(frozen=True)
class Data:
    """Images ``[N, 3, H, W]`` or clips ``[N, 3, T, H, W]`` (uint8) and labels, on the device."""

    x_train: Tensor
    y_train: Tensor
    x_test: Tensor
    y_test: Tensor

    @classmethod
    def load(cls, path: Path, images: int = 0) -> "Data":
        """From an .npz file with images ``[N, H, W, 3]`` or clips ``[N, T, H, W, 3]``, to the GPU if there is one."""
        import numpy as np

        with np.load(path) as arrays:
            missing = [key for key in KEYS if key not in arrays]
            if missing:
                raise DataError(f"{path} has no {', '.join(missing)}; a study needs the arrays {', '.join(KEYS)}")
            ends = [images or None] * 2 + [images // 5 or None] * 2
            tensors = [torch.from_numpy(arrays[key][:end]) for key, end in zip(KEYS, ends, strict=True)]
        ready = [t.movedim(-1, 1).contiguous() if t.dim() > 1 else t.long() for t in tensors]
        return cls(*(t.to("cuda" if torch.cuda.is_available() else "cpu") for t in ready))

    @property
    def classes(self) -> int:
        return int(self.y_train.max()) + 1


class Training:
    """A model, its optimizer and its data: ``epoch`` after ``epoch``."""

    def __init__(self, run: Run, settings: Settings, data: Data) -> None:
        self.run, self.settings, self.data = run, settings, data
        arm, device = ARMS[run.arm], data.x_train.device
        torch.manual_seed(run.seed)
        self.generator = torch.Generator(device).manual_seed(run.seed + 1000 * arm.reordered)
        more = {"patch_drop_rate": arm.patch_drop} if arm.patch_drop else {}
        self.model = fresh(run, settings, data, **more).to(device)
        if arm.checkpoint:
            self.model.set_grad_checkpointing(True)  # type: ignore[operator]
        if arm.local:
            apply_local(self.model, **arm.options or {})
        elif arm.options is not None:
            apply(self.model, **arm.options)
        # Compiled graphs of two arms have random numbers of their own unless PyTorch's are asked for.
        paired: Any = {"fallback_random": not arm.checkpoint}
        compiled = settings.compile and not arm.local
        self.forward = torch.compile(self.model, dynamic=False, options=paired) if compiled else self.model
        fused = device.type == "cuda"
        self.optimizer = torch.optim.AdamW(
            groups(self.model), lr=0.0, weight_decay=settings.weight_decay, fused=fused, betas=(0.9, 0.99)
        )
        self.batch = round(settings.batch * arm.batch)
        self.steps = len(data.x_train) // self.batch

    def epoch(self, number: int) -> float:
        """The mean loss of the epoch of that number, from 0."""
        torch.manual_seed(1000 * (number + 1) + self.run.seed)  # stochastic depth: the same in every arm
        total, losses = self.steps * self.run.epochs, []
        order = torch.randperm(len(self.data.x_train), generator=self.generator, device=self.data.x_train.device)
        for step, chosen in enumerate(order[: self.steps * self.batch].split(self.batch), number * self.steps):
            rate = self.run.lr * MODELS[self.run.model].lr * schedule(step / total, self.settings.warmup)
            losses.append(self.step(chosen, rate))
        return float(torch.stack(losses).mean())  # waits for the device

    def step(self, chosen: Tensor, rate: float) -> Tensor:
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        x, targets = augmented(self.data, chosen, self.settings, self.generator)
        with half(x):
            loss = F.cross_entropy(self.forward(x).float(), targets)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), self.settings.clip, foreach=True)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()


def train(run: Run, settings: Settings, data: Data, begin: Callable[[Training], Any] | None = None) -> Iterator[Row]:
    """A row after every evaluation: epoch, accuracy in percent, mean loss, seconds of training. ``begin`` is given the
    training before its first step."""
    training = Training(run, settings, data)
    if begin is not None:
        begin(training)
    evaluated = {round(run.epochs * i / settings.evaluations) for i in range(1, settings.evaluations + 1)}
    seconds = 0.0
    for epoch in range(1, run.epochs + 1):
        start = time.perf_counter()
        loss = training.epoch(epoch - 1)
        seconds += time.perf_counter() - start
        if epoch in evaluated:
            right = predictions(training.model, data, settings.batch) == data.y_test
            yield {"epoch": epoch, "accuracy": 100 * float(right.float().mean()), "loss": loss, "seconds": seconds}


def trained(model: str, settings: Settings, data: Data, folder: Path, epochs: int) -> nn.Module:
    """The model that full backpropagation reaches, from its file in the folder if it has one."""
    run = Run(model, FULL, epochs=epochs)
    about = f"{settings.size}, batch {settings.batch}" + (f", {settings.images} images" if settings.images else "")
    file = folder / "weights" / f"{run.name}, {about}.pt"
    if not file.exists():
        kept: list[Training] = []
        for row in train(run, settings, data, kept.append):
            print(f"{run.name}: {row}", flush=True)
        file.parent.mkdir(parents=True, exist_ok=True)
        torch.save(kept[0].model.state_dict(), file)
    result = fresh(run, settings, data)
    result.load_state_dict(torch.load(file, weights_only=True, map_location="cpu"))
    return result.to(data.x_train.device)


def fresh(run: Run, settings: Settings, data: Data, **options: Any) -> nn.Module:
    return build(
        run.model, settings.size, data.x_train.shape[-1], data.classes, drop_path_rate=run.drop_path, **options
    ).train()


def augmented(data: Data, chosen: Tensor, settings: Settings, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Images around 0 and targets ``[B, classes]``; clips stay as they are."""
    x, y = data.x_train[chosen].float() / 255, data.y_train[chosen]
    x, targets = settings.augment(x, y, data.classes, generator)
    return x - 0.5, targets


def half(x: Tensor) -> torch.autocast:
    """Products in bfloat16, on a GPU."""
    return torch.autocast(x.device.type, torch.bfloat16, enabled=x.is_cuda)


def groups(model: nn.Module) -> list[Row]:
    """Matrices decay; vectors (biases, norms, scales) do not."""
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() <= 1]
    return [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]


def schedule(progress: float, warmup: float) -> float:
    """Linear warm-up, then half a cosine."""
    if progress < warmup:
        return progress / warmup
    return 0.5 * (1 + math.cos(math.pi * (progress - warmup) / (1 - warmup)))


@torch.no_grad()
def predictions(model: nn.Module, data: Data, batch: int) -> Tensor:
    """The classes of the test images."""
    model.eval()
    found = []
    for images in data.x_test.split(2 * batch):
        with half(images):
            found.append(model(images.float() / 255 - 0.5).argmax(1))
    model.train()
    return torch.cat(found)
