"""Along training: norms of gradients, and how an arm's model diverges from that of full backpropagation.

Both are trained from the same weights on the same batches. The arm "other order" is the control: full backpropagation
from the same weights on other batches.
"""

import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from statistics import mean

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..adapters.blocks import blocks_of
from ..report.charts import Axis, Drawing
from ..report.sheet import drawn
from . import results
from .arms import ARMS, FULL
from .data import Data
from .models import TITLES
from .plan import Plan
from .results import Finding
from .saved import write
from .training import Place, Row, Run, Settings, Training, fresh, predictions

PAPERS, CONTROL = "grid 0.5", "other order"
ARMS_HERE = (PAPERS, "own rows 0.5", "down exact, own rows 0.5", CONTROL)


def jobs(plan: Plan) -> list[Run]:
    arms = plan if plan.arms else replace(plan, arms=ARMS_HERE)
    return [
        Run(model, arm, seed, plan.lengths(model)[-1])
        for seed in range(plan.seeds)
        for model in plan.models
        for arm in arms.arms_of(model)
        if arm != FULL and not ARMS[arm].same
    ]


def work(run: Run, settings: Settings, place: Place) -> Iterator[Row]:
    """Yield a row per epoch: norms by block in both runs, cosines of their weights, and how many predictions agree."""
    # A replayed graph would not call the hooks that record norms.
    data, settings = Data.load(place.data, settings.images), replace(settings, capture=False)
    plain = replace(run, arm=FULL)
    twin = fresh(plain, settings, data).to(data.device)
    mine = Training(run, settings, data)
    norms = watched(mine.model)
    for number, (weights_of_full, full_norms) in enumerate(full_epochs(plain, settings, data, place.out)):
        twin.load_state_dict(weights_of_full)
        mine.epoch(number)
        full, its = (predictions(model, data, settings.batch) for model in (twin, mine.model))
        yield {
            "epoch": number + 1, "accuracy": share(its == data.y_test), "full_accuracy": share(full == data.y_test),
            "agreement": share(its == full), "weights": weights(twin, mine.model),
            "full_norms": full_norms, "norms": emptied(norms, mine.steps),
        }  # fmt: skip


Epoch = tuple[dict[str, Tensor], dict[str, float]]
"""(state dict, norm of every block's gradient)"""


def full_epochs(run: Run, settings: Settings, data: Data, folder: Path) -> Iterator[Epoch]:
    """Yield the state of full backpropagation after every epoch. It is trained once for all arms of a folder."""
    file = folder / "states" / f"trajectory, {run.name}.pt"
    if file.exists():
        known, before = torch.load(file, weights_only=True, map_location=data.device)
        if known == str(settings):
            yield from before
            return
    training, epochs = Training(run, settings, data), list[Epoch]()
    norms = watched(training.model)
    for number in range(run.epochs):
        training.epoch(number)
        now = {name: tensor.clone() for name, tensor in training.model.state_dict().items()}
        epochs.append((now, emptied(norms, training.steps)))
        yield epochs[-1]
    write(file, (str(settings), epochs), f".{os.getpid()}")


def share(right: Tensor) -> float:
    """The share of what is true, in percent."""
    return 100 * float(right.float().mean())


def block_names(model: nn.Module) -> Callable[[str], str]:
    """Return a function from a parameter's name to its block, "" outside of blocks."""
    blocks = blocks_of(model)
    return lambda name: next((block for block in blocks if name.startswith(f"{block}.")), "")


def watched(model: nn.Module) -> dict[str, list[Tensor]]:
    """block -> squared norms of its parameters' gradients, which hooks append before gradients are clipped."""
    of, found = block_names(model), dict[str, list[Tensor]]()
    for name, p in model.named_parameters():
        into = found.setdefault(of(name), [])
        p.register_post_accumulate_grad_hook(lambda p, into=into: into.append(p.grad.detach().square().sum()))
    return found


def emptied(found: dict[str, list[Tensor]], steps: int) -> dict[str, float]:
    """block -> the norm of its gradient, as the root mean square over the steps of an epoch. Empties the lists."""
    means = {block: float((torch.stack(values).sum() / steps).sqrt()) for block, values in found.items()}
    for values in found.values():
        values.clear()
    return means


def weights(a: nn.Module, b: nn.Module) -> dict[str, float]:
    """block -> the cosine of its matrices in both models; "all" -> that of all matrices. Vectors, which start
    as constants, are left out."""
    of = block_names(a)
    sides: list[dict[str, list[Tensor]]] = [{}, {}]
    for side, model in zip(sides, (a, b), strict=True):
        for name, p in model.named_parameters():
            for block in (of(name), "all") if p.dim() > 1 else ():
                side.setdefault(block, []).append(p.detach().flatten())
    return {
        block: float(F.cosine_similarity(torch.cat(sides[0][block]), torch.cat(sides[1][block]), dim=0))
        for block in sides[0]
    }


def table(rows: list[Row]) -> str:
    cells = []
    for (model, arm), its in series(rows).items():
        row = its[-1]
        ratio = mean(row["norms"][block] / row["full_norms"][block] for block in row["norms"] if block)
        cells.append((
            model, arm, row["epoch"], f"{row['full_accuracy']:.1f}", f"{row['accuracy']:.1f}",
            f"{row['agreement']:.1f}", f"{row['weights']['all']:.3f}", f"{ratio:.2f}",
        ))  # fmt: skip
    header = ("model", "arm", "epoch", "accuracy of full", "of the arm", "predictions agree, %", "cosine of weights",
              "gradient norms, arm / full")  # fmt: skip
    return results.table(header, cells)


def series(rows: list[Row]) -> dict[tuple[str, str], list[Row]]:
    """(model, arm) -> the rows of seed 0, by epoch."""
    found: dict[tuple[str, str], list[Row]] = {}
    for row in sorted(results.of(rows, "trajectory", "agreement"), key=lambda row: (row["seed"], row["epoch"])):
        if row["seed"] == 0:
            found.setdefault((row["model"], row["arm"]), []).append(row)
    return found


def drawings(rows: list[Row]) -> dict[str, list[Drawing]]:
    """One sheet per model: norms of some blocks, of full backpropagation and arms on one axis; weights; agreement."""
    sheets: dict[str, list[Drawing]] = {}
    found = series(rows)
    for model in dict.fromkeys(model for model, _ in found):
        mine = {arm: its for (name, arm), its in found.items() if name == model}
        first = next(iter(mine.values()))
        norms = {FULL: norms_of("full_norms", first)}
        norms |= {arm: norms_of("norms", its) for arm, its in mine.items() if arm != CONTROL}
        axis = Axis.of([y for lines in norms.values() for its in lines.values() for _, y in its], log=True)
        sheets[model] = [
            drawn(f"{TITLES[model]}: {who}", "norm of a block's gradient", "epoch", lines, axis=axis)
            for who, lines in norms.items()
        ]
        for key, unit in (("weights", "cosine with full's"), ("predictions", "equal to full's, %")):
            lines = {
                arm: [(row["epoch"], row["weights"]["all"] if key == "weights" else row["agreement"]) for row in its]
                for arm, its in mine.items()
            }
            sheets[model].append(drawn(f"{TITLES[model]}: {key}", unit, "epoch", lines))
    return sheets


def norms_of(key: str, rows: list[Row]) -> dict[str, list[tuple[float, float]]]:
    """The norms of about four blocks, by epoch."""
    blocks = [block for block in rows[0][key] if block]
    return {block: [(row["epoch"], row[key][block]) for row in rows] for block in blocks[:: -(-len(blocks) // 4)]}


def findings(rows: list[Row]) -> list[Finding]:
    """Findings for the papers' setting, with the control beside it."""
    found, result = series(rows), []
    for model, figure in (("vit", "9"), ("hybrid", "9"), ("convnext", "10")):
        if (model, PAPERS) not in found:
            continue
        last, control = found[model, PAPERS][-1], found.get((model, CONTROL))
        lowest = min(last["norms"][block] / last["full_norms"][block] for block in last["norms"] if block)
        text = f"lowest block: {lowest:.2f} of the full norm after {last['epoch']} epochs"
        result.append(Finding(f"{figure} ({model})", "weight gradients do not vanish", text, lowest > 0.1))
        cosine, agreement = last["weights"]["all"], last["agreement"]
        text = f"{cosine:.2f} after {last['epoch']} epochs"
        if control:
            text += f"; full with other batches {control[-1]['weights']['all']:.2f}"
        paper = "weights part: a cosine of 0.14 (ViT-T) and 0.06 (ConvNeXt-B) in the end"
        result.append(Finding(f"11 ({model})", paper, text, True if cosine < 0.5 else None))
        text = f"{agreement:.1f} %, accuracies {last['full_accuracy']:.1f} and {last['accuracy']:.1f}"
        if control:
            text += f"; full with other batches {control[-1]['agreement']:.1f} %"
        higher = agreement > max(last["accuracy"], last["full_accuracy"])
        result.append(Finding(f"8.6 ({model})", "predictions agree more often than they are right", text, higher))
    return result
