"""Gradients at fixed weights: how far an arm's are from those of full backpropagation, and why.

Layer by layer, M masks give gradients g, which are compared with the full gradient f: the mean cosine of g and f, the
mean of |g| / |f|, the bias |E g − f|² / |f|² and the variance E|g − E g|² / |f|², both estimated without bias. Beside
them stands the noise E|f − E f|² / |f|² of the full gradients of M other batches. Training has that noise anyway, so
what sampling adds matters little where it is a small share of it.
"""

import copy
from collections.abc import Iterator, Sequence
from functools import lru_cache
from statistics import mean
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..adapters.blocks import blocks_of
from ..patching.apply import apply, set_step
from ..report.charts import Axis, Drawing
from ..report.sheet import drawn
from . import results
from .arms import ARMS, PYRAMID, VIT, drawn_grids
from .data import Data
from .models import TITLES
from .plan import Plan
from .results import Finding, above
from .training import Place, Row, Run, Settings, accuracy, trained

KEYS = ("cosine", "norm", "bias", "variance")
Gradients = dict[str, Tensor]


def jobs(plan: Plan) -> list[Run]:
    """The arms of all grids, or those given, that have options: they differentiate the same loss."""
    return [
        Run(model, arm, epochs=plan.lengths(model)[-1])
        for model in plan.models
        for arm in (plan.arms_of(model) if plan.arms else plan.grids_of(model))
        if ARMS[arm].options
    ]


def work(run: Run, settings: Settings, place: Place) -> Iterator[Row]:
    """Yield one row: the four numbers of every layer and the noise of batches, at the weights that full backpropagation
    reaches, and the accuracy of these weights."""
    data, arm = Data.load(place.data, settings.images), ARMS[run.arm]
    plain, reached, full, noise = exact(run.model, run.epochs, settings, place)
    x, targets = data.any_batch(settings.batch, settings.augment)
    twin, found = copy.deepcopy(plain), []
    draw = arm.instead(twin, **arm.options or {}) if arm.instead else None
    if draw is None:
        apply(twin, **arm.options or {})
    for step in range(settings.masks):
        if draw is None:
            set_step(twin, step)
        found.append(by_layer(twin, x, targets))
    layers = {layer: statistics([its[layer] for its in found], its_full) for layer, its_full in full.items()}
    yield {"accuracy": reached, "layers": layers, "noise": noise, "blocks": blocks_of(plain)}


class Exact(NamedTuple):
    """What all arms of a model are compared with: the trained model and its accuracy, the full gradient of a batch, and
    the noise of such gradients in every layer."""

    model: nn.Module
    accuracy: float
    full: Gradients
    noise: dict[str, float]


@lru_cache(maxsize=1)
def exact(model: str, epochs: int, settings: Settings, place: Place) -> Exact:
    """Cached, as the arms of a model come one after the other."""
    data = Data.load(place.data, settings.images)
    plain = trained(model, settings, data, place.out, epochs)
    reached = accuracy(plain, data, settings.batch)  # before all else: forward passes change a batch norm's statistics
    numbers = range(settings.masks + 1)
    full, *others = (by_layer(plain, *data.any_batch(settings.batch, settings.augment, number)) for number in numbers)
    noise = {layer: statistics([its[layer] for its in others], its_full)[-1] for layer, its_full in full.items()}
    return Exact(plain, reached, full, noise)


def by_layer(model: nn.Module, x: Tensor, targets: Tensor) -> Gradients:
    """The gradient of each layer's parameters as one vector. Stochastic depth drops the same branches in every call."""
    model.zero_grad()
    torch.manual_seed(0)
    F.cross_entropy(model(x), targets).backward()
    parts = dict[str, list[Tensor]]()
    for name, p in model.named_parameters():
        if p.grad is not None:
            layer = name.replace(".inner.", ".").rpartition(".")[0] or name
            parts.setdefault(layer, []).append(p.grad.flatten())
    return {layer: torch.cat(gradients) for layer, gradients in parts.items()}


def statistics(found: Sequence[Tensor], full: Tensor) -> list[float]:
    """Return the numbers of KEYS for one layer: ``found`` has its gradients, one for each mask (or batch)."""
    g, size, n = torch.stack(list(found)), full.square().sum().clamp(min=1e-30), len(found)
    middle = g.mean(0)
    variance = (g - middle).square().sum() / max(1, n - 1)
    bias = ((middle - full).square().sum() - variance / n).clamp(min=0)
    cosine = F.cosine_similarity(g, full[None], dim=1).mean()
    norm = (g.norm(dim=1) / size.sqrt()).mean()
    return [round(float(value), 6) for value in (cosine, norm, bias / size, variance / size)]


def by_block(row: Row) -> list[list[float]]:
    """The four numbers of every block, as means over its layers."""
    found = []
    for block in row["blocks"]:
        layers = [values for layer, values in row["layers"].items() if layer.startswith(f"{block}.")]
        found.append([mean(values) for values in zip(*layers, strict=True)])
    return found


def table(rows: list[Row]) -> str:
    """One line per arm: the layer with the lowest cosine, and means over layers. If the noise of batches was measured,
    also what the arm adds to it, and the layer where it adds most."""
    cells, measured = [], results.of(rows, "gradients", "layers")
    with_noise = any("noise" in row for row in measured)
    for row in measured:
        lowest, layer = min((values[0], layer) for layer, values in row["layers"].items())
        cosine, norm, *squares = (mean(values) for values in zip(*row["layers"].values(), strict=True))
        means = f"{cosine:.3f}", f"{norm:.3f}", *(f"{square:.5f}" for square in squares)
        cells.append((row["model"], row["arm"], f"{lowest:.3f}", layer, *means, *([added(row)] if with_noise else ())))
    header = ("model", "arm", "lowest cosine", "layer", *(f"mean {key}" for key in KEYS))
    return results.table((*header, "of the batch's noise") if with_noise else header, cells)


def added(row: Row) -> str:
    """What an arm adds to the noise of batches: the mean over layers, and the layer where it is most."""
    if "noise" not in row:
        return "–"
    found = shares(row)
    highest = max(found, key=lambda layer: found[layer])
    return f"{mean(found.values()):.1%}; {highest} {found[highest]:.0%}"


def shares(row: Row) -> dict[str, float]:
    """layer -> (bias + variance) of an arm, relative to the noise of batches"""
    return {
        layer: (bias + variance) / row["noise"][layer]
        for layer, (_, _, bias, variance) in row["layers"].items()
        if row["noise"][layer]
    }


FLOOR = 1e-6
"""Smaller numbers are rounding errors; they are drawn here."""


def drawings(rows: list[Row]) -> dict[str, list[Drawing]]:
    """One sheet per model with one row per grid: the cosine over depth, and the bias and variance of the grid's arms.
    The latter share one axis."""
    sheets: dict[str, list[Drawing]] = {}
    found = {(row["model"], row["arm"]): row for row in results.of(rows, "gradients", "layers")}
    for model in dict.fromkeys(model for model, _ in found):
        mine = {arm: row for (its, arm), row in found.items() if its == model}
        grids = drawn_grids(mine.__contains__)
        means = {arm: [mean(its) for its in zip(*row["layers"].values(), strict=True)] for arm, row in mine.items()}
        axis = Axis.of([max(FLOOR, value) for values in means.values() for value in values[2:]], log=True)
        sheets[model] = [
            panel
            for title, grid in grids.items()
            for panel in (
                cosines_drawn(f"{TITLES[model]}: {title}", grid, mine),
                squares_drawn(f"{title}: bias and variance", grid, means, axis),
            )
        ]
    return sheets


def cosines_drawn(title: str, grid: dict[str, str], rows: dict[str, Row]) -> Drawing:
    lines = {
        label: [(float(i), values[0]) for i, values in enumerate(by_block(rows[arm]))] for label, arm in grid.items()
    }
    return drawn(title, "cosine with full", "block, from the image to the head", lines)


def squares_drawn(title: str, grid: dict[str, str], means: dict[str, list[float]], axis: Axis) -> Drawing:
    apart = {
        KEYS[key]: [(float(i), max(FLOOR, means[arm][key])) for i, arm in enumerate(grid.values())] for key in (2, 3)
    }
    return drawn(title, "of |full|²", "", apart, names=[*grid], joined=False, axis=axis)


CLAIMS = [
    ("2", VIT, "uniform ratios correlate better than increasing ones", ("grid 0.5", "increasing")),
    ("2", VIT, "uniform ratios correlate better than decreasing ones", ("grid 0.5", "decreasing")),
    ("3", VIT, "grid masks correlate better than random ones", ("grid 0.5", "random 0.5")),
    ("5", VIT, "dropping Q, K and V correlates slightly better than queries only", ("qkv 0.5", "grid 0.5")),
    ("5", VIT, "the same, with the softmax over kept keys that their code has", ("qkv-local 0.5", "grid 0.5")),
    ("5", VIT, "dropping heads correlates much less", ("qkv 0.5", "head 0.5")),
    ("6", PYRAMID, "uniform ratios correlate better than increasing ones", ("grid 0.5", "increasing")),
    ("6", PYRAMID, "uniform ratios correlate better than decreasing ones", ("grid 0.5", "decreasing")),
    ("8", PYRAMID, "grid masks correlate better than random ones", ("grid 0.5", "random 0.5")),
]
"""(figure of the paper, models, its finding, two arms): if it holds, the first arm has the higher cosine."""


def findings(rows: list[Row]) -> list[Finding]:
    values = {
        (row["model"], row["arm"]): mean(its[0] for its in row["layers"].values())
        for row in results.of(rows, "gradients", "layers")
    }
    return [
        Finding(
            f"{figure} ({model})", paper,
            f"mean cosine: {better} {values[model, better]:.3f}, {worse} {values[model, worse]:.3f}",
            above(values[model, better], values[model, worse], 0.001),
        )
        for figure, models, paper, (better, worse) in CLAIMS
        for model in models
        if (model, better) in values and (model, worse) in values
    ]  # fmt: skip
