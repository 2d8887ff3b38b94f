"""What a study is asked to run: models, arms, seeds, and what is tuned."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import product

from .arms import ARMS, FULL, enters, of_grids

Tuned = tuple[float, float]
"""(learning rate, times the model's own; stochastic depth)"""


@dataclass(frozen=True)
class Plan:
    """Which runs a study makes.

    - ``arms``: if empty, those of the study. ``epochs``: by model, for all others under "" (default 40).
    - ``lr`` and ``drop_path``: every combination runs. ``tuned``: the best setting of (model, arm) so far. ``lr``
      multiplies its rate, and an empty ``drop_path`` stands for its stochastic depth.
    """

    models: tuple[str, ...]
    arms: tuple[str, ...] = ()
    seeds: int = 1
    epochs: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    lr: tuple[float, ...] = (1.0,)
    drop_path: tuple[float, ...] = ()
    tuned: Mapping[tuple[str, str], Tuned] = field(default_factory=dict)

    def arms_of(self, model: str) -> list[str]:
        """The given arms, or those of the contest, that are made for a model."""
        return [arm for arm in self.arms or CONTEST if enters(model, arm)]

    def grids_of(self, model: str) -> list[str]:
        """The arms of all grids; if some are given, only these."""
        return [arm for arm in of_grids(model) if not self.arms or arm in self.arms]

    def lengths(self, model: str) -> tuple[int, ...]:
        """Numbers of epochs, in ascending order."""
        return tuple(sorted(set(self.epochs.get(model) or self.epochs.get("", (40,)))))

    def settings(self, model: str, arm: str) -> list[Tuned]:
        """The settings to try. An arm that is not tuned yet starts from those of full backpropagation."""
        lr, drop_path = self.tuned.get((model, ARMS[arm].same or arm)) or self.tuned.get((model, FULL), (1.0, 0.0))
        return list(product((factor * lr for factor in self.lr), self.drop_path or (drop_path,)))


CONTEST = (
    "full", "exact", "checkpoint", "batch ½", "batch ¼", "patches ½",
    "grid 0.5", "balanced 0.5", "rows 0.5", "rows 0.25", "own rows 0.5", "own rows 0.25", "mlp rows 0.5",
    "mlp rows 0.25",
    "down exact 0.5", "down exact, balanced 0.5", "down exact, rows 0.5", "down exact, own 0.5",
    "down exact, own rows 0.75", "down exact, own rows 0.5",
)  # fmt: skip
