"""Redundancy: how similar neighbouring positions and neighbouring frames are, in activations and in their gradients."""

from collections.abc import Iterator
from functools import partial
from math import isqrt
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..adapters.blocks import blocks_of
from ..report.charts import Axis, Drawing
from ..report.sheet import drawn
from . import results
from .arms import VIT
from .data import Data
from .models import TITLES
from .plan import Plan
from .results import Finding
from .training import Place, Row, Run, Settings, accuracy, trained

PAIRS = ("neighbours", "frames", "far")
"""Pairs of positions: next to each other in space; in time; any two of one image."""


def jobs(plan: Plan) -> list[Run]:
    return [Run(model, "full", epochs=plan.lengths(model)[-1]) for model in plan.models]


def work(run: Run, settings: Settings, place: Place) -> Iterator[Row]:
    """Yield one row: the accuracy of the model, and for every block's output the mean cosines between positions, of
    activations and of gradients."""
    data = Data.load(place.data, settings.images)
    model = trained(run.model, settings, data, place.out, run.epochs)
    reached = accuracy(model, data, settings.batch)
    found: dict[str, Tensor] = {}
    for name in blocks_of(model):
        model.get_submodule(name).register_forward_hook(partial(noted, found, name))
    x, targets = data.any_batch(min(64, settings.batch), settings.augment)
    F.cross_entropy(model(x), targets).backward()
    blocks = {}
    for name, its in found.items():
        assert its.grad is not None
        kinds = {"activations": its.detach(), "gradients": its.grad}
        blocks[name] = {kind: cosines(on_grid(run.model, tensor)) for kind, tensor in kinds.items()}
    yield {"accuracy": reached, "blocks": blocks}


def noted(found: dict[str, Tensor], name: str, module: nn.Module, given: Any, output: Tensor) -> None:
    output.retain_grad()
    found[name] = output


def on_grid(model: str, x: Tensor) -> Tensor:
    """A block's output as ``[B, T, H, W, C]``, without class tokens."""
    if model in VIT:
        side = isqrt(x.shape[1])
        x = x[:, -side * side :].unflatten(1, (side, side))
    if model.startswith("convnext"):
        x = x.movedim(1, -1)
    return x if x.dim() == 5 else x[:, None]


def cosines(x: Tensor) -> dict[str, float]:
    """The mean cosine of each kind of PAIRS in ``[B, T, H, W, C]``, if there are such pairs."""
    if not x.any():  # after the last block of a ViT only the class token has a gradient
        return {}
    x = F.normalize(x.float(), dim=-1)
    flat = x.flatten(1, 3)
    any_two = flat[:, torch.randperm(flat.shape[1], generator=torch.Generator().manual_seed(0)).to(x.device)]
    pairs = {
        "neighbours": [(x[:, :, 1:], x[:, :, :-1]), (x[:, :, :, 1:], x[:, :, :, :-1])],
        "frames": [(x[:, 1:], x[:, :-1])],
        "far": [(flat, any_two)],
    }
    sums = {kind: [(a * b).sum(-1).flatten() for a, b in both] for kind, both in pairs.items()}
    return {kind: round(float(torch.cat(its).mean()), 4) for kind, its in sums.items() if sum(map(len, its))}


def table(rows: list[Row]) -> str:
    cells = []
    for row in results.of(rows, "similarity", "blocks"):
        for block, kinds in row["blocks"].items():
            numbers = [f"{its[pair]:.3f}" if pair in its else "–" for its in kinds.values() for pair in PAIRS]
            cells.append((row["model"], block, *numbers))
    names = [f"{kind}, {pair}" for kind in ("activations", "gradients") for pair in PAIRS]
    return results.table(("model", "block", *names), cells)


def drawings(rows: list[Row]) -> dict[str, list[Drawing]]:
    """A chart for activations and one for gradients per model, all with one axis."""
    names = {"neighbours": "next in space", "frames": "next in time", "far": "any two of an image"}
    charts = {}
    for row in results.of(rows, "similarity", "blocks"):
        for kind in ("activations", "gradients"):
            charts[f"{TITLES[row['model']]}: {kind}"] = {
                names[pair]: [(i, its[kind][pair]) for i, its in enumerate(row["blocks"].values()) if pair in its[kind]]
                for pair in PAIRS
            }
    values = [value for lines in charts.values() for points in lines.values() for _, value in points]
    axis = Axis.of(values) if values else None
    below = "block, from the image to the head"
    return {"": [drawn(title, "cosine of two positions", below, lines, axis=axis) for title, lines in charts.items()]}


def findings(rows: list[Row]) -> list[Finding]:
    """For every model: whether frames, or neighbours in an image, are more similar in the first block than in the last.

    Where a head averages positions, they all have the same gradient after the last block. That says nothing, so such
    blocks are left out."""
    paper = "frames are alike in the bottom layers and quite different in the top ones, activations and gradients"
    found = []
    for row in results.of(rows, "similarity", "blocks"):
        telling = [its for its in row["blocks"].values() if its["gradients"] and its["gradients"]["far"] < 0.9999]
        if len(telling) < 2:
            continue
        first, last = telling[0], telling[-1]
        pair = "frames" if "frames" in first["activations"] else "neighbours"
        texts = [f"{kind} {first[kind][pair]:.2f} → {last[kind][pair]:.2f}" for kind in ("activations", "gradients")]
        agrees = all(first[kind][pair] > last[kind][pair] for kind in ("activations", "gradients"))
        found.append(Finding(f"video 1 ({row['model']})", paper, f"{pair}, bottom → top: {', '.join(texts)}", agrees))
    return found
