"""Train a small ViT on handwritten digits with full backprop and with SBP, and compare accuracy, memory and time.

python examples/demo.py [--seed 0] [--epochs 6] [--keep-ratio 0.5] [--out runs/demo]

It takes about a minute on a CPU. It runs `torchsbp train digits` twice and `torchsbp report`, prints a table, and saves
it as results.json in runs/demo, with a picture of the kept patches, an HTML page and both runs.
"""

import argparse
import json
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure, SubFigure
from torch import Tensor, nn

import torchsbp
from torchsbp import report
from torchsbp.cli.main import main as torchsbp_command
from torchsbp.cli.recipe import parse
from torchsbp.train.distributed import Processes
from torchsbp.train.loop import Trainer

SIZE, PATCH, BATCH = 32, 4, 32  # as in the recipe
COLOURS = ("#0072B2", "#D55E00")  # full backprop and SBP, safe for colour blindness
KEPT = (1.0, 0.75, 0.35)

Row = dict[str, Any]


def prepare(*options: str) -> Trainer:
    """A trainer with the recipe's model, data and SBP, which does not train."""
    return Trainer(parse("train", ["digits", *options]), Processes(torch.device("cpu")))


def saved_mib(trainer: Trainer) -> float:
    """MiB that a training forward pass keeps for the backward pass."""
    trainer.model.train()
    trainer.forward(0, trainer.task.prepare(next(trainer.batches()), training=True))
    memory = trainer.memory()
    assert memory is not None
    return memory


def results(names: Sequence[str], folders: Sequence[Path]) -> list[Row]:
    rows: list[Row] = []
    for name, folder in zip(names, folders, strict=True):
        run = report.read(folder)
        row = {
            "name": name,
            "test_accuracy": run.curve("valid", "top1")[-1][1] / 100,
            "saved_mib": run.memory(),
            "step_ms": 1000 * median(BATCH / rate for _, rate in run.curve("train", "images_per_s")),
            "test_accuracies": [top1 / 100 for _, top1 in run.curve("valid", "top1")],
            "losses": [loss for _, loss in run.curve("train", "loss")],
        }
        first = rows[0] if rows else row
        row |= {"saved_ratio": row["saved_mib"] / first["saved_mib"], "step_ratio": row["step_ms"] / first["step_ms"]}
        rows.append(row)
    return rows


def table(rows: list[Row]) -> str:
    lines = [f"{'':15}  {'test accuracy':>13}  {'saved activations':>17}  {'time per step':>16}"]
    for row in rows:
        saved = f"{row['saved_mib']:.2f} MiB {row['saved_ratio']:.2f}×"
        step = f"{row['step_ms']:.1f} ms {row['step_ratio']:.2f}×"
        lines.append(f"{row['name']:15}  {row['test_accuracy']:>13.1%}  {saved:>17}  {step:>16}")
    return "\n".join(lines)


def shade(images: Tensor, kept: Tensor) -> np.ndarray:
    """Pictures with kept patches in black ink on orange and pale others: [B, H, W, 3]."""
    grid = SIZE // PATCH
    cells = torch.zeros(len(images), grid * grid, dtype=torch.bool).scatter_(1, kept, True).view(-1, grid, grid)
    pixels = cells.repeat_interleave(PATCH, 1).repeat_interleave(PATCH, 2)[..., None]
    paper = ((images.max() - images) / (images.max() - images.min())).permute(0, 2, 3, 1)
    return torch.where(pixels, paper * torch.tensor(KEPT), 0.85 + 0.15 * paper).numpy()


def masks(model: nn.Module, images: Tensor, count: int) -> dict[int, Tensor]:
    """step -> kept positions, for the first ``count`` steps that keep others than the step before."""
    model.train()
    found: dict[int, Tensor] = {}
    last = None
    for step in range(1, 100):
        torchsbp.set_step(model, step - 1)
        model(images)
        kept = next(iter(torchsbp.kept(model).values()))  # that of the first sampled block
        if last is None or not torch.equal(kept, last):
            found[step] = last = kept
        if len(found) == count:
            break
    return found


def draw_patches(figure: SubFigure, model: nn.Module, images: Tensor, steps: int) -> None:
    """Draw the images, and what is kept of them in some of the first training steps."""
    columns = {"digit": -images[:, 0].numpy()}
    columns |= {f"step {step}": shade(images, kept) for step, kept in masks(model, images, steps).items()}
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
    top.suptitle(f"{rows[1]['name']}: patches that the first sampled block keeps (orange); the forward pass uses all")
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
    torch.set_num_threads(1)  # the same sums on every machine, and a busy one need not wait for threads
    common = [f"--seed={options.seed}", f"--epochs={options.epochs}", "--log.every_steps=1"]
    common.append(f"--schedule.warmup_epochs={min(1, options.epochs - 1)}")
    sampling = ["--sbp.preset=default", f"--sbp.keep_ratio={options.keep_ratio}"]
    try:
        sampled = prepare(*common, *sampling)
        saved_mib(sampled)
    except ValueError as error:
        parser.error(str(error))
    exact = saved_mib(prepare(*common, "--sbp.preset=default", "--sbp.keep_ratio=1.0"))

    names = ["full backprop", f"SBP, r = {options.keep_ratio:g}"]
    folders = [options.out / "full", options.out / "sbp"]
    for name, folder, method in zip(names, folders, ([], sampling), strict=True):
        shutil.rmtree(folder, ignore_errors=True)  # a run of an earlier demo
        print(f"{name}: torchsbp train digits {' '.join([*common, *method])} --out={folder}", file=sys.stderr)
        code = torchsbp_command(["train", "digits", *common, *method, f"--out={folder}"])
        if code:
            raise SystemExit(code)
    rows = results(names, folders)
    print(table(rows))
    print(f"saved activations without sampling (keep_ratio=1: exact gradients, recomputation): {exact:.2f} MiB")
    (options.out / "results.json").write_text(json.dumps(rows, indent=1))
    draw(options.out / "kept.png", rows, sampled.model, shown(sampled))
    page = options.out / "report.html"
    page.write_text(report.html([report.read(folder) for folder in folders], "Digits"), encoding="utf-8")
    print(f"picture: {options.out / 'kept.png'}\npage: {page}")


def shown(trainer: Trainer) -> Tensor:
    """The images that are shown: a three, a six and a nine."""
    data = trainer.task.valid_data
    labels = [data.source[i][1] for i in range(len(data))]
    batch = trainer.task.collate([data[0, labels.index(digit)] for digit in (3, 6, 9)])
    return trainer.task.prepare(batch, training=False)[0]


if __name__ == "__main__":
    main()
