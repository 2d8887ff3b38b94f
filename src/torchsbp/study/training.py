"""One run of a contest: a small model, trained from scratch on images that are on the device, by one arm's settings.

Runs of one seed are pairs: the same initial weights, the same images in the same order, the same augmentation.
"""

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..errors import DataError
from ..patching.apply import apply
from .augment import Augment

KEYS = ("x_train", "y_train", "x_test", "y_test")
Row = dict[str, Any]


@dataclass(frozen=True)
class Run:
    """``options`` are those of ``torchsbp.apply``; None: plain backpropagation."""

    model: str
    arm: str
    seed: int
    options: dict[str, Any] | None = None

    @property
    def name(self) -> str:
        return f"{self.model}, {self.arm}, seed {self.seed}"


@dataclass(frozen=True)
class Settings:
    """What all runs share. ``lr`` multiplies the model's own learning rate; ``toy``: models of two blocks."""

    epochs: int = 40
    batch: int = 512
    lr: float = 1.0
    weight_decay: float = 0.05
    warmup: float = 0.1
    drop_path: float = 0.1
    clip: float = 1.0
    compile: bool = True
    evaluations: int = 4
    toy: bool = False
    augment: Augment = field(default_factory=Augment)


@dataclass(frozen=True)
class Recipe:
    """A model for images of 32 pixels, and its learning rate for batches of 512."""

    build: Callable[..., nn.Module]
    lr: float


def vit(size: int, classes: int, toy: bool, **options: Any) -> nn.Module:
    from timm.models.vision_transformer import VisionTransformer

    sizes: dict[str, Any] = {"embed_dim": 192, "depth": 12, "num_heads": 3}
    if toy:
        sizes = {"embed_dim": 32, "depth": 3, "num_heads": 2}
    return VisionTransformer(img_size=size, patch_size=4, num_classes=classes, **sizes, **options)


def convnext(size: int, classes: int, toy: bool, **options: Any) -> nn.Module:
    from timm.models.convnext import ConvNeXt

    sizes: dict[str, Any] = {"depths": (2, 2, 6, 2), "dims": (64, 128, 256, 512)}
    if toy:
        sizes = {"depths": (1, 1, 1, 1), "dims": (8, 8, 16, 16)}
    # From a stem of 2 pixels timm's first stage goes on to 4, and the mask of stage 3 would be drawn on 2×2 cells.
    return ConvNeXt(num_classes=classes, patch_size=1, ls_init_value=1.0, **sizes, **options)


def swin(size: int, classes: int, toy: bool, **options: Any) -> nn.Module:
    from timm.models.swin_transformer import SwinTransformer

    sizes: dict[str, Any] = {"embed_dim": 64, "depths": (2, 2, 6, 2), "num_heads": (2, 4, 8, 16)}
    if toy:
        sizes = {"embed_dim": 8, "depths": (2, 2), "num_heads": (1, 2)}
    return SwinTransformer(img_size=size, patch_size=2, window_size=4, num_classes=classes, **sizes, **options)


MODELS = {"vit": Recipe(vit, 1e-3), "convnext": Recipe(convnext, 2e-3), "swin": Recipe(swin, 1e-3)}


@dataclass(frozen=True)
class Data:
    """Images ``[N, 3, H, W]`` (uint8) and labels, on the device."""

    x_train: Tensor
    y_train: Tensor
    x_test: Tensor
    y_test: Tensor

    @classmethod
    def load(cls, path: Path, device: torch.device) -> "Data":
        """From an .npz file with images ``[N, H, W, 3]``."""
        import numpy as np

        with np.load(path) as arrays:
            missing = [key for key in KEYS if key not in arrays]
            if missing:
                raise DataError(f"{path} has no {', '.join(missing)}; a contest needs the arrays {', '.join(KEYS)}")
            tensors = [torch.from_numpy(arrays[key]) for key in KEYS]
        images = [t.permute(0, 3, 1, 2).contiguous() if t.dim() == 4 else t.long() for t in tensors]
        return cls(*(t.to(device) for t in images))

    @property
    def classes(self) -> int:
        return int(self.y_train.max()) + 1


def train(run: Run, settings: Settings, data: Data, keep: Callable[[nn.Module], Any] | None = None) -> Iterator[Row]:
    """A row after every evaluation: epoch, accuracy in percent, mean loss, seconds of training, peak memory. ``keep``
    is given the model that is trained."""
    device = data.x_train.device
    torch.manual_seed(run.seed)
    generator = torch.Generator(device).manual_seed(run.seed)
    recipe = MODELS[run.model]
    model = recipe.build(data.x_train.shape[-1], data.classes, settings.toy, drop_path_rate=settings.drop_path)
    model = model.to(device).train()
    if run.options is not None:
        apply(model, **run.options)
    if keep is not None:
        keep(model)
    forward = torch.compile(model, dynamic=False) if settings.compile else model
    optimizer = torch.optim.AdamW(groups(model), lr=0.0, weight_decay=settings.weight_decay, fused=True)
    per_epoch = len(data.x_train) // settings.batch
    evaluated = {round(settings.epochs * i / settings.evaluations) for i in range(1, settings.evaluations + 1)}
    step, seconds, memory = 0, 0.0, 0
    for epoch in range(1, settings.epochs + 1):
        start, losses = time.perf_counter(), []
        for chosen in torch.randperm(len(data.x_train), generator=generator, device=device).split(settings.batch):
            if len(chosen) < settings.batch:
                break
            rate = settings.lr * recipe.lr * schedule(step / (per_epoch * settings.epochs), settings.warmup)
            for group in optimizer.param_groups:
                group["lr"] = rate
            images = normalised(data.x_train[chosen])
            x, targets = settings.augment(images, data.y_train[chosen], data.classes, generator)
            losses.append(train_step(forward, model, optimizer, x, targets, settings.clip))
            step += 1
        loss = float(torch.stack(losses).mean())  # waits for the device
        seconds += time.perf_counter() - start
        if epoch == 1 and device.type == "cuda":
            memory = torch.cuda.max_memory_allocated()
        if epoch in evaluated:
            accuracy = evaluate(model, data, settings.batch)
            yield {"epoch": epoch, "accuracy": accuracy, "loss": loss, "seconds": seconds, "peak_bytes": memory}


def train_step(
    forward: Callable[[Tensor], Tensor], model: nn.Module, optimizer: Any, x: Tensor, targets: Tensor, clip: float
) -> Tensor:
    with torch.autocast(x.device.type, torch.bfloat16):
        loss = F.cross_entropy(forward(x - 0.5).float(), targets)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), clip, foreach=True)
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def normalised(images: Tensor) -> Tensor:
    return images.float() / 255


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
def evaluate(model: nn.Module, data: Data, batch: int) -> float:
    """Accuracy in percent."""
    model.eval()
    right = torch.zeros((), device=data.x_test.device)
    with torch.autocast(data.x_test.device.type, torch.bfloat16):
        for images, labels in zip(data.x_test.split(2 * batch), data.y_test.split(2 * batch), strict=True):
            right += (model(normalised(images) - 0.5).argmax(1) == labels).sum()
    model.train()
    return 100 * float(right) / len(data.y_test)
