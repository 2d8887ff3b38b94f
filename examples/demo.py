"""Train a small ViT on handwritten digits with full backprop and with SBP, side by side: accuracy, memory, time.

    python examples/demo.py

About a minute on two CPU cores. The table is printed and, with a picture of the kept positions, saved in runs/demo/.
"""

import statistics
import time
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from sklearn.datasets import load_digits
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn
from tqdm import tqdm

import torchsbp

TRAIN, BATCH, LEARNING_RATE = 1400, 32, 1.5e-3
SIZE, PATCH = 32, 4
GRID = SIZE // PATCH
COLOURS = ("#0072B2", "#D55E00")  # full backprop, SBP: a pair that colour-blind people can tell apart


class Run:
    """One model in training, and what is measured of it."""

    def __init__(self, name: str, model: nn.Module, images: Tensor, steps: int) -> None:
        self.name, self.model = name, model
        self.optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.05)
        self.schedule = torch.optim.lr_scheduler.OneCycleLR(
            self.optimizer, LEARNING_RATE, total_steps=steps, pct_start=0.2, cycle_momentum=False
        )
        self.saved = saved_bytes(model, images)
        self.losses: list[float] = []
        self.seconds: list[float] = []
        self.accuracies: list[float] = []

    def step(self, images: Tensor, labels: Tensor) -> None:
        start = time.perf_counter()
        self.optimizer.zero_grad()
        loss = F.cross_entropy(self.model(images), labels)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.schedule.step()
        self.seconds.append(time.perf_counter() - start)
        self.losses.append(loss.item())

    @torch.no_grad()
    def test(self, images: Tensor, labels: Tensor) -> None:
        self.model.eval()
        self.accuracies.append((self.model(images).argmax(1) == labels).float().mean().item())
        self.model.train()

    def __str__(self) -> str:
        accuracy = f" {self.accuracies[-1]:.1%}" if self.accuracies else ""
        return f"{self.name}: loss {statistics.mean(self.losses[-10:]):.3f}{accuracy}"


def digits() -> tuple[Tensor, Tensor]:
    """The 1797 images of scikit-learn, enlarged from 8 × 8, in a fixed random order; the first TRAIN are for training."""
    data = load_digits()
    images = torch.from_numpy(data.images).float()[:, None]
    images = F.interpolate((images - images.mean()) / images.std(), (SIZE, SIZE), mode="bilinear")
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    return images[order], torch.from_numpy(data.target)[order]


def vit() -> nn.Module:
    """Xavier weights and large position embeddings: with timm's defaults a model this narrow learns slowly."""
    model = VisionTransformer(
        *(SIZE, PATCH),
        in_chans=1,
        num_classes=10,
        embed_dim=64,
        depth=6,
        num_heads=4,
        class_token=False,
        global_pool="avg",
        weight_init="jax",
    )
    nn.init.normal_(model.pos_embed)
    return model


def saved_bytes(model: nn.Module, images: Tensor) -> int:
    """What a training forward keeps for backward: every storage once, without the parameters."""
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
    storages: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = model.train()(images)  # the graph that output holds keeps the storages, so addresses are unique
    del output
    return sum(storages.values())


def prepare(images: Tensor, keep_ratio: float, steps: int) -> list[Run]:
    """Two runs from the same weights, one of them patched."""
    full = vit()
    sampled = torchsbp.apply(deepcopy(full), keep_ratio=keep_ratio)
    return [Run("full backprop", full, images, steps), Run(f"SBP r={keep_ratio:g}", sampled, images, steps)]


def train(runs: list[Run], images: Tensor, labels: Tensor, epochs: int, seed: int) -> None:
    """Both runs take each batch in turn, so that they see the same data and the same load of the machine."""
    generator = torch.Generator().manual_seed(seed)
    with tqdm(total=epochs * (TRAIN // BATCH), unit="step", dynamic_ncols=True) as bar:
        for _ in range(epochs):
            batches = torch.randperm(TRAIN, generator=generator).split(BATCH)[: TRAIN // BATCH]
            for batch in batches:
                for run in runs:
                    run.step(images[batch], labels[batch])
                bar.set_postfix_str(" | ".join(map(str, runs)), refresh=False)
                bar.update()
            for run in runs:
                run.test(images[TRAIN:], labels[TRAIN:])
        bar.set_postfix_str(" | ".join(map(str, runs)))


def summary(runs: list[Run]) -> list[dict[str, Any]]:
    rows = []
    for run in runs:
        milliseconds = 1000 * statistics.median(run.seconds)
        rows.append(
            {
                "name": run.name,
                "accuracy": run.accuracies[-1],
                "saved_mib": run.saved / 2**20,
                "saved_ratio": run.saved / runs[0].saved,
                "step_ms": milliseconds,
                "time_ratio": milliseconds / 1000 / statistics.median(runs[0].seconds),
                "losses": run.losses,
                "accuracies": run.accuracies,
            }
        )
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    lines = [f"{'':<15}  {'test accuracy':>13}  {'saved activations':>19}  {'time per step':>19}"]
    for row in rows:
        memory = f"{row['saved_mib']:.2f} MiB ({row['saved_ratio']:.2f}×)"
        duration = f"{row['step_ms']:.1f} ms ({row['time_ratio']:.2f}×)"
        lines.append(f"{row['name']:<15}  {row['accuracy']:>13.1%}  {memory:>19}  {duration:>19}")
    return "\n".join(lines)


def kept_patches(model: nn.Module, images: Tensor, steps: int) -> list[Tensor]:
    """For some consecutive training forwards, the share of gradient (0 or 1) that each pixel's patch gets: [B, SIZE, SIZE]."""
    masks = []
    for _ in range(steps):
        model.train()(images)
        positions = next(iter(torchsbp.kept(model).values()))  # all blocks share one mask
        mask = torch.zeros(len(images), GRID**2).scatter_(1, positions, 1.0).view(-1, GRID, GRID)
        masks.append(mask.repeat_interleave(PATCH, 1).repeat_interleave(PATCH, 2))
    return masks


def draw(runs: list[Run], rows: list[dict[str, Any]], images: Tensor, path: Path) -> None:
    steps = 6
    masks = kept_patches(runs[1].model, images, steps)
    figure = Figure(figsize=(10, 8.2), layout="constrained")
    top, bottom = figure.subfigures(2, 1, height_ratios=(3, 2))
    top.suptitle(f"{runs[1].name}: patches that send gradients (bright), in {steps} consecutive steps")
    for axes, image, *kept in zip(top.subplots(len(images), 1 + steps), images, *masks):
        pass
    figure.savefig(path, dpi=120)
