"""A second task, in one file: the sum of two coordinates, learned from generated points. Nothing else knows of it."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from torchsbp.train.data.samples import Samples
from torchsbp.train.distributed import all_sum
from torchsbp.train.record import Metric
from torchsbp.train.task import Evaluator, Task, TaskOptions


@dataclass
class RegressionOptions(TaskOptions):
    """The sum of two coordinates."""

    width: int = 8


class Points(list):
    def where(self, index: int) -> str:
        return f"point {index}"


def mirrored(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    return (x, y) if torch.rand(()) < 0.5 else (-x, -y)  # the target too


class Error(Evaluator):
    total = points = 0.0

    def update(self, model: nn.Module, batch: tuple[Tensor, Tensor], valid: int) -> None:
        x, y = (part[:valid] for part in batch)
        self.total, self.points = self.total + float((model(x) - y).abs().sum()), self.points + valid

    def result(self) -> dict[str, float]:
        total, points = all_sum(torch.tensor([self.total, self.points])).tolist()
        return {"error": total / points}

    def sections(self) -> dict[str, str]:
        return {"Points seen": f"<p>{self.points:.0f} points</p>"}


class Regression(Task):
    Options, evaluator = RegressionOptions, staticmethod(Error)
    metrics = (Metric("error", "mean error", "mm", ".4f", higher=False, chart="Error on new points"),)
    best_by, unit = "error", "points"

    def __init__(self, options: RegressionOptions, seed: int) -> None:
        super().__init__(options, seed)
        points = [(x, x.sum(0, keepdim=True)) for x in torch.randn(64, 2)]
        self.train_data, self.valid_data = (Samples(Points(part), mirrored, seed) for part in (points, points[:13]))

    def model(self, start: bool) -> nn.Module:
        return nn.Sequential(nn.Linear(2, self.options.width), nn.Tanh(), nn.Linear(self.options.width, 1))

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
        return {"square": (model(batch[0]) - batch[1]).square().mean(), "weight": 0.01 * model[0].weight.square().sum()}
