"""Muon for matrices and AdamW for the rest, or AdamW for all.

Muon (Jordan, 2024) replaces a matrix of gradients by the nearest orthogonal one. Small models from scratch need fewer
epochs with it. PyTorch's Muon takes the learning rate as a number and matrices one by one. Here the rate is a tensor,
as steps are replayed from CUDA graphs, and matrices of one shape are updated together: a model has few shapes.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

OPTIMIZERS = ("muon", "adamw")
MOMENTUM, RMS = 0.95, 0.2  # RMS: updates are as large as AdamW's, so rates are comparable
NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
"""Coefficients of x, x³ and x⁵. Applied five times, the polynomial brings singular values to between 0.7 and 1.2."""


class Muon(Optimizer):
    """For weights of linear layers and convolutions, ``[out, …]``."""

    def __init__(self, params: Iterable[Tensor], lr: Tensor, weight_decay: float) -> None:
        alike: dict[torch.Size, list[Tensor]] = {}
        for its in params:
            alike.setdefault(its.shape, []).append(its)
        super().__init__([{"params": its} for its in alike.values()], {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            params, rate = group["params"], group["lr"]
            gradient = torch.stack([its.grad for its in params]).flatten(2)
            state = self.state[params[0]]
            if not state:
                state["momentum"] = torch.zeros_like(gradient)
            momentum = state["momentum"].lerp_(gradient, 1 - MOMENTUM)
            update = orthogonal(gradient.lerp(momentum, MOMENTUM)) * (RMS * max(gradient.shape[1:]) ** 0.5 * rate)
            torch._foreach_mul_(params, 1 - rate * group["weight_decay"])
            torch._foreach_sub_(params, [its.view_as(params[0]) for its in update])


def orthogonal(x: Tensor) -> Tensor:
    """Approximate the nearest orthogonal matrix of each in ``[n, rows, columns]``, by the Newton-Schulz iteration."""
    linear, cubic, quintic = NEWTON_SCHULZ
    tall = x.shape[-2] > x.shape[-1]
    y = (x.mT if tall else x).bfloat16()
    y = y / y.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-7)
    for _ in range(5):
        square = y @ y.mT
        factor = torch.baddbmm(square, square, square, beta=cubic, alpha=quintic)
        y = torch.baddbmm(y, factor, y, beta=linear)
    return (y.mT if tall else y).to(x.dtype)


def optimizers(name: str, model: nn.Module, rate: Tensor, weight_decay: float) -> list[Optimizer]:
    """The optimizers of a model. Vectors (biases, norms, scales) do not decay. The classifier, tokens, positions and
    depthwise convolutions are not maps between features and are left to AdamW."""
    matrices = features(model) if name == "muon" else []
    known = set(map(id, matrices))
    rest = [its for its in model.parameters() if id(its) not in known]
    groups: list[dict[str, Any]] = [
        {"params": [its for its in rest if its.dim() > 1]},
        {"params": [its for its in rest if its.dim() <= 1], "weight_decay": 0.0},
    ]
    adamw = AdamW(groups, lr=rate, weight_decay=weight_decay, betas=(0.9, 0.99), fused=True)
    return [adamw, Muon(matrices, rate, weight_decay)] if matrices else [adamw]


def features(model: nn.Module) -> list[Tensor]:
    """The weights that map features to features."""
    classifier = getattr(model, "head", None)
    head = set() if classifier is None else set(classifier.modules())
    layers = [its for its in model.modules() if isinstance(its, nn.Linear | nn.Conv2d) and its not in head]
    return [its.weight for its in layers if getattr(its, "groups", 1) == 1]
