"""Train a small ViT on handwritten digits with full backprop and with SBP, and compare accuracy, memory and time.

python examples/demo.py [--seed 0] [--epochs 8] [--keep-ratio 0.5] [--out runs/demo]

About a minute on two CPU cores. Prints a table; leaves a picture of the kept patches and results.json in runs/demo.
"""

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import digits
import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from torch import Tensor, nn
from tqdm import tqdm

import torchsbp

TRAIN, BATCH, LEARNING_RATE = 1400, 32, 1.5e-3  # the images after the first 1400 are for testing
COLOURS = ("#0072B2", "#D55E00")  # full backprop, SBP: also the colour-blind can tell them apart


class Run:
    """One model in training, and what is measured of it."""

    def __init__(self, name: str, model: nn.Module, images: Tensor, steps: int) -> None:
        self.name, self.model = name, model
        self.optimizer = torch.optim.AdamW(model.parameters(), LEARNING_RATE, weight_decay=0.05)
        self.schedule = torch.optim.lr_scheduler.OneCycleLR(
            self.optimizer, LEARNING_RATE, total_steps=steps, pct_start=0.2, cycle_momentum=False
        )
        self.saved = saved_bytes(model, images[:BATCH])
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
        predicted = self.model.eval()(images).argmax(1)
        self.model.train()
        self.accuracies.append((predicted == labels).float().mean().item())

    def progress(self) -> str:
        accuracy = f" {self.accuracies[-1]:.1%}" if self.accuracies else ""
        return f"{self.name}: loss {statistics.mean(self.losses[-10:]):.3f}{accuracy}"


def saved_bytes(model: nn.Module, images: Tensor) -> int:
    """What a training forward keeps for the backward pass: each storage once, without the parameters."""
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
    sizes: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        sizes[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        graph = model.train()(images).grad_fn  # it holds all that is saved, so that no address is used twice
    assert graph is not None
    return sum(size for address, size in sizes.items() if address not in parameters)


def prepare(images: Tensor, keep_ratio: float, steps: int) -> list[Run]:
    """Full backprop and SBP, from the same weights."""
    full = digits.vit()
    sampled = torchsbp.apply(deepcopy(full), keep_ratio=keep_ratio)
    return [Run("full backprop", full, images, steps), Run(f"SBP, r = {keep_ratio:g}", sampled, images, steps)]


def train(runs: list[Run], images: Tensor, labels: Tensor, epochs: int) -> None:
    """The runs take turns at every batch: they see the same data, and their times the same load of the machine."""
    per_epoch = TRAIN // BATCH
    with tqdm(total=epochs * per_epoch, unit="step", dynamic_ncols=True) as bar:
        for _ in range(epochs):
            for batch in torch.randperm(TRAIN).split(BATCH)[:per_epoch]:
                for run in runs:
                    run.step(images[batch], labels[batch])
                bar.set_postfix_str(" | ".join(run.progress() for run in runs), refresh=False)
                bar.update()
            for run in runs:
                run.test(images[TRAIN:], labels[TRAIN:])
        bar.set_postfix_str(" | ".join(run.progress() for run in runs))


def results(runs: list[Run]) -> list[dict[str, Any]]:
    seconds = [statistics.median(run.seconds) for run in runs]
    return [
        {
            "name": run.name,
            "test_accuracy": run.accuracies[-1],
            "saved_mib": run.saved / 2**20,
            "saved_ratio": run.saved / runs[0].saved,
            "step_ms": 1000 * median,
            "step_ratio": median / seconds[0],
            "test_accuracies": run.accuracies,
            "losses": run.losses,
        }
        for run, median in zip(runs, seconds, strict=True)
    ]


def table(rows: list[dict[str, Any]]) -> str:
    lines = [f"{'':15}  {'test accuracy':>13}  {'saved activations':>17}  {'time per step':>16}"]
    for row in rows:
        saved = f"{row['saved_mib']:.2f} MiB {row['saved_ratio']:.2f}×"
        step = f"{row['step_ms']:.1f} ms {row['step_ratio']:.2f}×"
        lines.append(f"{row['name']:15}  {row['test_accuracy']:>13.1%}  {saved:>17}  {step:>16}")
    return "\n".join(lines)


def kept_patches(model: nn.Module, images: Tensor) -> Tensor:
    """The pixels of the patches that a training forward keeps: booleans, the shape of the images."""
    model.train()(images)
    positions = next(iter(torchsbp.kept(model).values()))  # the same for all sampled blocks
    kept = torch.zeros(len(images), digits.GRID**2, dtype=torch.bool).scatter_(1, positions, True)
    kept = kept.view(-1, 1, digits.GRID, digits.GRID)
    return kept.repeat_interleave(digits.PATCH, 2).repeat_interleave(digits.PATCH, 3)


def shade(images: Tensor, kept: Tensor) -> Tensor:
    """Black ink on orange where patches are kept, pale ink on white elsewhere: [B, H, W, 3]."""
    low, high = images.min(), images.max()
    paper = ((high - images) / (high - low)).permute(0, 2, 3, 1)
    return torch.where(kept.permute(0, 2, 3, 1), paper * torch.tensor([1.0, 0.75, 0.3]), 0.8 + 0.2 * paper)


def draw(runs: list[Run], images: Tensor, path: Path, steps: int = 5) -> None:
    figure = Figure(figsize=(9, 8), layout="constrained")
    top, bottom = figure.subfigures(2, 1, height_ratios=(3, 2), hspace=0.06)
    top.suptitle(f"{runs[1].name}: kept patches (orange) get gradients, dropped ones (pale) run forward only")
    pictures = [shade(images, kept_patches(runs[1].model, images)) for _ in range(steps)]
    gray = shade(images, torch.zeros_like(images, dtype=torch.bool))
    axes = top.subplots(len(images), steps + 1)
    for column, (title, picture) in enumerate([("digit", gray), *((f"step {i + 1}", p) for i, p in enumerate(pictures))]):
        axes[0, column].set_title(title, fontsize=10)
        for row in range(len(images)):
            axes[row, column].imshow(picture[row])
            axes[row, column].set_axis_off()
    loss, accuracy, memory = bottom.subplots(1, 3)
    for run, colour in zip(runs, COLOURS, strict=True):
        loss.plot(run.losses, color=colour, label=run.name)
        accuracy.plot(range(1, len(run.accuracies) + 1), run.accuracies, color=colour)
        memory.bar(run.name, run.saved / 2**20, color=colour)
    figure.savefig(path, dpi=120)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Full backprop and SBP on handwritten digits.")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--keep-ratio", type=float, default=0.5)
    parser.add_argument("--out", type=Path, default=Path("runs/demo"))
    options = parser.parse_args(arguments)
    if options.epochs < 1:
        parser.error(f"--epochs must be at least 1, found {options.epochs}")
    options.out.mkdir(parents=True, exist_ok=True)

    torch.manual_seed(options.seed)
    images, labels = digits.load()
    try:
        runs = prepare(images, options.keep_ratio, options.epochs * (TRAIN // BATCH))
    except ValueError as error:
        parser.error(str(error))
    train(runs, images, labels, options.epochs)
    rows = results(runs)
    print(table(rows))
    (options.out / "results.json").write_text(json.dumps(rows, indent=1))
    draw(runs, images[TRAIN : TRAIN + 3], options.out / "kept.png")
    print(f"picture: {options.out / 'kept.png'}")


if __name__ == "__main__":
    main()
