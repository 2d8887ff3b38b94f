"""Train a small ViT on handwritten digits with full backprop and with SBP, and compare accuracy, memory and time.

python examples/demo.py [--seed 0] [--epochs 6] [--keep-ratio 0.5] [--out runs/demo]

About a minute on a CPU. Prints a table; saves it as results.json, with a picture of the kept patches, in runs/demo.
"""

import argparse
import json
from collections.abc import Sequence
from copy import deepcopy
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure, SubFigure
from torch import Tensor, nn
from tqdm import tqdm

import digits
import torchsbp
from digits import PATCH, SIZE, Run

TRAIN, BATCH = 1400, 32  # the images after the first 1400 are for testing
COLOURS = ("#0072B2", "#D55E00")  # full backprop and SBP; the colour-blind can tell them apart
KEPT = (1.0, 0.75, 0.35)

Row = dict[str, Any]


def prepare(keep_ratio: float, steps: int) -> list[Run]:
    """Full backprop and SBP, from the same weights."""
    full = digits.vit()
    sampled = torchsbp.apply(deepcopy(full), keep_ratio=keep_ratio)
    return [Run("full backprop", full, steps), Run(f"SBP, r = {keep_ratio:g}", sampled, steps)]


def saved_bytes(model: nn.Module, images: Tensor) -> int:
    """What a training forward keeps for the backward pass: each storage once, without the parameters."""
    sizes: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        sizes[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = model(images)  # its graph holds all that is saved, so that no address is used twice
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
    del output
    return sum(size for address, size in sizes.items() if address not in parameters)


def train(runs: list[Run], images: Tensor, labels: Tensor, epochs: int) -> None:
    """The runs take turns at every batch: they see the same data, and their times the same load of the machine."""
    steps = TRAIN // BATCH
    with tqdm(total=epochs * steps, unit="step", dynamic_ncols=True) as bar:
        for _ in range(epochs):
            for batch in torch.randperm(TRAIN).split(BATCH)[:steps]:
                for run in runs:
                    run.step(images[batch], labels[batch])
                bar.set_postfix_str("; ".join(run.progress() for run in runs), refresh=False)
                bar.update()
            for run in runs:
                run.test(images[TRAIN:], labels[TRAIN:])
        bar.set_postfix_str("; ".join(run.progress() for run in runs))


def results(runs: list[Run], saved: list[int]) -> list[Row]:
    return [
        {
            "name": run.name,
            "test_accuracy": run.accuracies[-1],
            "saved_mib": size / 2**20,
            "saved_ratio": size / saved[0],
            "step_ms": 1000 * median(run.seconds),
            "step_ratio": median(run.seconds) / median(runs[0].seconds),
            "test_accuracies": run.accuracies,
            "losses": run.losses,
        }
        for run, size in zip(runs, saved, strict=True)
    ]


def table(rows: list[Row]) -> str:
    lines = [f"{'':15}  {'test accuracy':>13}  {'saved activations':>17}  {'time per step':>16}"]
    for row in rows:
        saved = f"{row['saved_mib']:.2f} MiB {row['saved_ratio']:.2f}×"
        step = f"{row['step_ms']:.1f} ms {row['step_ratio']:.2f}×"
        lines.append(f"{row['name']:15}  {row['test_accuracy']:>13.1%}  {saved:>17}  {step:>16}")
    return "\n".join(lines)


def shade(images: Tensor, kept: Tensor) -> np.ndarray:
    """The kept patches in black ink on orange, the others pale: [B, H, W, 3]."""
    grid = SIZE // PATCH
    cells = torch.zeros(len(images), grid * grid, dtype=torch.bool).scatter_(1, kept, True).view(-1, grid, grid)
    pixels = cells.repeat_interleave(PATCH, 1).repeat_interleave(PATCH, 2)[..., None]
    paper = ((images.max() - images) / (images.max() - images.min())).permute(0, 2, 3, 1)
    return torch.where(pixels, paper * torch.tensor(KEPT), 0.85 + 0.15 * paper).numpy()


def draw_patches(figure: SubFigure, model: nn.Module, images: Tensor, steps: int) -> None:
    """The images and what the masks of the first training steps keep of them."""
    columns = {"digit": -images[:, 0].numpy()}
    torchsbp.set_step(model, 1)  # mask 0 went to saved_bytes
    for step in range(1, 1 + steps):
        model(images)
        kept = next(iter(torchsbp.kept(model).values()))  # one mask for all sampled blocks
        columns[f"step {step}"] = shade(images, kept)
    axes = figure.subplots(len(images), len(columns))
    for column, (title, pictures) in zip(axes.T, columns.items(), strict=True):
        column[0].set_title(title)
        for axis, picture in zip(column, pictures, strict=True):
            axis.imshow(picture, cmap="gray")
            axis.set_axis_off()


def draw_curves(figure: SubFigure, rows: list[Row]) -> None:
    loss, accuracy, memory = figure.subplots(1, 3)
    for row, colour, line in zip(rows, COLOURS, ("-", "--"), strict=True):
        percent = [100 * a for a in row["test_accuracies"]]
        loss.plot(row["losses"], line, color=colour, linewidth=1)
        accuracy.plot(range(1, 1 + len(percent)), percent, line, marker="o", color=colour, label=row["name"])
        memory.bar_label(memory.bar(row["name"], row["saved_mib"], color=colour, width=0.6), fmt="%.1f")
    loss.set(title="training loss", xlabel="step", ylim=(0, None))
    accuracy.set(title="test accuracy, %", xlabel="epoch", xticks=range(1, 1 + len(percent)), ylim=(0, 102))
    accuracy.legend(loc="lower right", frameon=False)
    memory.set(title="saved activations, MiB")
    memory.margins(y=0.1)
    for axis in (loss, accuracy, memory):
        axis.spines[["top", "right"]].set_visible(False)


def draw(path: Path, rows: list[Row], model: nn.Module, images: Tensor) -> None:
    figure = Figure(figsize=(10, 8), layout="constrained")
    top, bottom = figure.subfigures(2, 1, height_ratios=(3, 2), hspace=0.05)
    top.suptitle(f"{rows[1]['name']}: kept patches (orange) in the first training steps; the forward pass uses all")
    draw_patches(top, model, images, steps=5)
    draw_curves(bottom, rows)
    figure.savefig(path, dpi=120)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Full backprop and SBP on handwritten digits.")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--keep-ratio", type=float, default=0.5)
    parser.add_argument("--out", type=Path, default=Path("runs/demo"))
    options = parser.parse_args(arguments)
    if options.epochs < 1:
        parser.error(f"--epochs must be at least 1, found {options.epochs}")
    torch.set_num_threads(1)  # the same sums on every machine, and no waiting for threads on a busy one
    torch.manual_seed(options.seed)
    images, labels = digits.load()
    try:
        runs = prepare(options.keep_ratio, options.epochs * (TRAIN // BATCH))
        saved = [saved_bytes(run.model, images[:BATCH]) for run in runs]
    except ValueError as error:
        parser.error(str(error))
    exact = saved_bytes(torchsbp.apply(deepcopy(runs[0].model), keep_ratio=1.0), images[:BATCH])
    options.out.mkdir(parents=True, exist_ok=True)

    train(runs, images, labels, options.epochs)
    rows = results(runs, saved)
    print(table(rows))
    print(f"saved activations without sampling (keep_ratio=1: exact gradients, recomputation): {exact / 2**20:.2f} MiB")
    (options.out / "results.json").write_text(json.dumps(rows, indent=1))
    shown = [TRAIN + labels[TRAIN:].tolist().index(digit) for digit in (3, 6, 9)]
    draw(options.out / "kept.png", rows, runs[1].model, images[shown])
    print(f"picture: {options.out / 'kept.png'}")


if __name__ == "__main__":
    main()
