"""Gradients at fixed weights: how far an arm's are from those of full backpropagation, and why.

Of M masks with gradients g, and the full gradient f: the cosine of g and f and |g| / |f| in the mean, the bias
|E g − f|² / |f|² and the variance E|g − E g|² / |f|², both estimated without bias; by block.
"""

import copy
from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..adapters.blocks import blocks_of
from ..patching.apply import apply, set_step
from .contest import ARMS
from .training import Data, Row, Run, Settings, normalised, train

Gradients = dict[str, Tensor]


def compare(model: str, arms: Sequence[str], settings: Settings, data: Data, masks: int) -> Iterator[Row]:
    """A row for every arm and block, at the weights that full backpropagation reaches in these settings."""
    trained: list[nn.Module] = []
    for _ in train(Run(model, "full", 0), settings, data, trained.append):
        pass
    (plain,) = trained
    generator = torch.Generator(data.x_train.device).manual_seed(0)
    chosen = torch.randperm(len(data.x_train), generator=generator, device=data.x_train.device)[: settings.batch]
    x, targets = settings.augment(normalised(data.x_train[chosen]), data.y_train[chosen], data.classes, generator)
    full = by_block(plain, x, targets)
    for arm in arms:
        twin, found = copy.deepcopy(plain), []
        options = ARMS[arm]
        if options is None:
            continue
        apply(twin, **options)
        for step in range(masks):
            set_step(twin, step)
            found.append(by_block(twin, x, targets))
        for block, exact in full.items():
            yield {"model": model, "arm": arm, "block": block} | statistics([its[block] for its in found], exact)


def by_block(model: nn.Module, x: Tensor, targets: Tensor) -> Gradients:
    """The gradient of each block, and of every other part of the model, as one vector; stochastic depth drops the same
    branches every time."""
    model.zero_grad()
    torch.manual_seed(0)
    F.cross_entropy(model(x - 0.5), targets).backward()
    names, parts = blocks_of(model), dict[str, list[Tensor]]()
    for name, p in model.named_parameters():
        if p.grad is not None:
            block = next((block for block in names if name.startswith(f"{block}.")), name.rpartition(".")[0] or name)
            parts.setdefault(block, []).append(p.grad.flatten())
    return {block: torch.cat(gradients) for block, gradients in parts.items()}


def statistics(found: Sequence[Tensor], full: Tensor) -> Row:
    """Of one block's gradients with so many masks."""
    g, size, n = torch.stack(list(found)), full.square().sum(), len(found)
    mean = g.mean(0)
    variance = (g - mean).square().sum() / max(1, n - 1)
    bias = ((mean - full).square().sum() - variance / n).clamp(min=0)
    return {
        "cosine": float(F.cosine_similarity(g, full[None], dim=1).mean()),
        "norm": float((g.norm(dim=1) / size.sqrt()).mean()),
        "bias": float(bias / size),
        "variance": float(variance / size),
    }


def table(rows: list[Row]) -> str:
    """Arm by arm: the block with the lowest cosine, and means over blocks."""
    lines = [
        "| model | arm | lowest cosine | block | mean cosine | mean norm | mean bias | mean variance |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for model, arm in dict.fromkeys((row["model"], row["arm"]) for row in rows):
        mine = [row for row in rows if (row["model"], row["arm"]) == (model, arm)]
        worst = min(mine, key=lambda row: float(row["cosine"]))
        means = [f"{sum(row[key] for row in mine) / len(mine):.3f}" for key in ("cosine", "norm", "bias", "variance")]
        lines.append("| " + " | ".join([model, arm, f"{worst['cosine']:.3f}", worst["block"], *means]) + " |")
    return "\n".join(lines)
