"""What a study is asked to run: models, arms, seeds, and what is tuned."""

from dataclasses import dataclass

from .arms import ARMS, enters, of_grids


@dataclass(frozen=True)
class Plan:
    """``arms`` is empty: those of the study. ``epochs``, ``lr`` (times the model's own) and ``drop_path`` are lists:
    every combination runs."""

    models: tuple[str, ...]
    arms: tuple[str, ...] = ()
    seeds: int = 1
    epochs: tuple[int, ...] = (40,)
    lr: tuple[float, ...] = (1.0,)
    drop_path: tuple[float, ...] = (0.1,)

    def arms_of(self, model: str, trained: bool = True) -> list[str]:
        """The arms that a model enters, those of the contest unless others are given; ``trained``: but for those that
        train the same model as another."""
        return [arm for arm in self.arms or CONTEST if enters(model, arm) and not (trained and ARMS[arm].same)]

    def grids_of(self, model: str) -> list[str]:
        """Those given, or all of the grids."""
        return [arm for arm in of_grids(model) if not self.arms or arm in self.arms]


CONTEST = (
    "full", "exact", "checkpoint", "batch ½", "batch ¼", "patches ½",
    "grid 0.5", "balanced 0.5", "rows 0.5", "rows 0.25", "own rows 0.5", "own rows 0.25", "mlp rows 0.5",
    "mlp rows 0.25",
    "down exact 0.5", "down exact, balanced 0.5", "down exact, rows 0.5", "down exact, own 0.5",
    "down exact, own rows 0.75", "down exact, own rows 0.5",
)  # fmt: skip
