"""Arms: ways to take gradients, by name, and the grids of them that figures compare."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..config import PRESETS
from ..sampling.schedules import Milestones
from .chosen import apply_chosen
from .local import apply_local

Options = dict[str, Any]
ALL = ("vit", "hybrid", "pooled", "convnext", "convnext2", "swin")


@dataclass(frozen=True)
class Arm:
    """One way to take gradients; by default plain backpropagation.

    - ``options``: those of ``torchsbp.apply``, or None for plain backpropagation.
    - ``checkpoint``: every block is computed twice; ``batch``: the share of the batch that is used; ``patch_drop``: the
      share of patches that is left out of the model altogether.
    - ``instead``: a function that patches the model with these options in place of ``torchsbp.apply``, for estimators
      that the library does not have: the papers' code (``local.py``), rows chosen in backward (``chosen.py``). It
      returns an object whose ``step`` can be set; as that counts in Python, nothing is compiled or captured.
    - ``reordered``: the same initial weights with other batches, to see how far two runs diverge by chance.
    - ``same``: the arm that trains the same model in other time and memory. Its results stand for this arm's.
    """

    options: Options | None = None
    checkpoint: bool = False
    batch: float = 1.0
    patch_drop: float = 0.0
    instead: Callable[..., Any] | None = None
    reordered: bool = False
    same: str = ""
    models: tuple[str, ...] = ALL

    @property
    def changes(self) -> bool:
        """Whether the keep-ratio changes when the learning rate starts to fall."""
        return isinstance((self.options or {}).get("keep_ratio"), Milestones)


VIT, PYRAMID = ("vit", "hybrid", "pooled"), ("convnext", "convnext2")
TOKENS = (*VIT, "swin")
FULL = "full"
FALLING = 10**12
"""Added to the step of the masks once the learning rate falls: a milestone of the keep-ratio can refer to it."""
GRID: Options = PRESETS["paper"] | {"attention": "query"}
APART: Options = {"sampler": "random", "per_sample": True}
BALANCED: Options = {"sampler": "random", "per_sample": "balanced"}
OWN: Options = BALANCED | {"per_block": True}
STRATIFIED: Options = OWN | {"sampler": "stratified"}
ROWS: Options = {"scale": "rows"}
DOWN: Options = {"exact_downsampling": True}
MLP: Options = {"attention": "exact"}
NORM: Options = OWN | DOWN | ROWS | {"sampler": "norm", "per_sample": True}


def sampled(ratio: Any, *parts: Options, models: tuple[str, ...] = ALL, instead: Any = None, **more: Any) -> Arm:
    options: Options = ({} if instead else GRID) | {"keep_ratio": ratio} | more
    for part in parts:
        options |= part
    return Arm(options, models=models, instead=instead)


ARMS: dict[str, Arm] = {
    FULL: Arm(),
    "exact": Arm({"keep_ratio": 1.0}, same=FULL),
    "checkpoint": Arm(checkpoint=True, same=FULL),
    "batch ½": Arm(batch=0.5),
    "batch ¼": Arm(batch=0.25),
    "patches ½": Arm(patch_drop=0.5, models=VIT),
    "other order": Arm(reordered=True),
    "grid 0.75": sampled(0.75),
    "grid 0.5": sampled(0.5),
    "grid 0.25": sampled(0.25),
    "random 0.5": sampled(0.5, sampler="random"),
    "apart 0.5": sampled(0.5, APART),
    "balanced 0.5": sampled(0.5, BALANCED),
    "balanced 0.25": sampled(0.25, BALANCED),
    "rows 0.5": sampled(0.5, BALANCED, ROWS, models=TOKENS),
    "rows 0.25": sampled(0.25, BALANCED, ROWS, models=TOKENS),
    "own rows 0.5": sampled(0.5, OWN, ROWS, models=TOKENS),
    "own rows 0.25": sampled(0.25, OWN, ROWS, models=TOKENS),
    "own stratified rows 0.5": sampled(0.5, STRATIFIED, ROWS, models=TOKENS),
    "own stratified rows 0.25": sampled(0.25, STRATIFIED, ROWS, models=TOKENS),
    "own stratified rows decreasing": sampled((0.75, 0.25), STRATIFIED, ROWS, models=TOKENS),
    "own norm rows 0.5": sampled(0.5, NORM),
    "own norm rows 0.25": sampled(0.25, NORM),
    "own norm rows 0.125": sampled(0.125, NORM),
    "own norm rows decreasing": sampled((0.5, 0.125), NORM),
    "own norm rows, all": sampled((0.75, 0.125), NORM, blocks=1.0),
    "own norm rows, all, few": sampled((0.5, 0.0625), NORM, blocks=1.0),
    "own rows decreasing": sampled((0.75, 0.25), OWN, ROWS, models=TOKENS),
    "own rows 0.5, then exact": sampled(Milestones(((0, 0.5), (FALLING, 1.0))), OWN, ROWS, models=TOKENS),
    "mlp 0.5": sampled(0.5, BALANCED, MLP, models=VIT),
    "mlp rows 0.5": sampled(0.5, BALANCED, MLP, ROWS, models=VIT),
    "mlp rows 0.25": sampled(0.25, BALANCED, MLP, ROWS, models=VIT),
    "own mlp rows 0.5": sampled(0.5, OWN, MLP, ROWS, models=VIT),
    "own mlp rows 0.375": sampled(0.375, OWN, MLP, ROWS, models=VIT),
    "own mlp norm rows 0.5": sampled(0.5, NORM, MLP, models=VIT),
    "own mlp norm rows 0.375": sampled(0.375, NORM, MLP, models=VIT),
    "down exact 0.5": sampled(0.5, DOWN, models=PYRAMID),
    "down exact, balanced 0.5": sampled(0.5, BALANCED, DOWN, models=PYRAMID),
    "down exact, rows 0.5": sampled(0.5, BALANCED, DOWN, ROWS, models=PYRAMID),
    "down exact, own 0.5": sampled(0.5, OWN, DOWN, models=PYRAMID),
    "down exact, own rows 0.75": sampled(0.75, OWN, DOWN, ROWS, models=PYRAMID),
    "down exact, own rows 0.5": sampled(0.5, OWN, DOWN, ROWS, models=PYRAMID),
    "down exact, own rows 0.25": sampled(0.25, OWN, DOWN, ROWS, models=PYRAMID),
    "down exact, own stratified rows 0.5": sampled(0.5, STRATIFIED, DOWN, ROWS, models=PYRAMID),
    "down exact, own stratified rows 0.25": sampled(0.25, STRATIFIED, DOWN, ROWS, models=PYRAMID),
    "increasing": sampled((0.25, 0.75)),
    "decreasing": sampled((0.75, 0.25)),
    "last 2": sampled(0.5, blocks=2 / 12, models=VIT),
    "last 4": sampled(0.5, blocks=4 / 12, models=VIT),
    "last 10": sampled(0.5, blocks=10 / 12, models=VIT),
    "all 12": sampled(0.5, blocks=1.0, models=VIT),
    "qkv 0.5": sampled(0.5, attention="qkv", models=TOKENS),
    "head 0.5": sampled(0.5, attention="head", models=VIT),
    "qkv-local 0.5": sampled(0.5, models=VIT, instead=apply_local),
    "even 0.5": sampled(0.5, instead=apply_chosen, by="even"),
    "even 0.25": sampled(0.25, instead=apply_chosen, by="even"),
    "norm 0.5": sampled(0.5, instead=apply_chosen),
    "norm 0.25": sampled(0.25, instead=apply_chosen),
    "largest 0.5": sampled(0.5, instead=apply_chosen, by="largest"),
    "dW 0.5": sampled(0.5, instead=apply_chosen, by="even", of="weights"),
    "norm dW 0.5": sampled(0.5, instead=apply_chosen, of="weights"),
}

GRIDS: dict[str, dict[str, str]] = {
    "number of sampled blocks": {
        "0": FULL, "2": "last 2", "4": "last 4", "8": "grid 0.5", "10": "last 10", "12": "all 12",
    },
    "keep-ratio": {"0.25": "grid 0.25", "0.5": "grid 0.5", "0.75": "grid 0.75", "1": FULL},
    "ratios over depth": {"uniform": "grid 0.5", "increasing": "increasing", "decreasing": "decreasing"},
    "masks": {"grid": "grid 0.5", "random": "random 0.5", "per sample": "apart 0.5", "balanced": "balanced 0.5"},
    "attention rule": {"query": "grid 0.5", "qkv": "qkv 0.5", "head": "head 0.5", "qkv-local": "qkv-local 0.5"},
    "masks and weights": {
        "grid": "grid 0.5", "balanced": "balanced 0.5", "rows": "rows 0.5", "own rows": "own rows 0.5",
        "mlp rows": "mlp rows 0.5", "down exact": "down exact 0.5", "down, balanced": "down exact, balanced 0.5",
        "down, rows": "down exact, rows 0.5", "down, own": "down exact, own 0.5",
        "down, own rows": "down exact, own rows 0.5",
    },
    "rows chosen in backward": {
        "own rows": "own rows 0.5", "down, own rows": "down exact, own rows 0.5", "even": "even 0.5",
        "norm": "norm 0.5", "largest": "largest 0.5", "dW": "dW 0.5", "norm dW": "norm dW 0.5",
        "even 0.25": "even 0.25", "norm 0.25": "norm 0.25",
    },
}  # fmt: skip
"""Title -> label -> arm. The first five are the papers' (rule "query" where an arm names none), the others ours."""


def enters(model: str, arm: str) -> bool:
    return model in ARMS[arm].models


def of_grids(model: str) -> list[str]:
    """The arms of all grids that are made for a model, each once."""
    return list(dict.fromkeys(arm for grid in GRIDS.values() for arm in grid.values() if enters(model, arm)))


def drawn_grids(known: Callable[[str], bool]) -> dict[str, dict[str, str]]:
    """The grids, reduced to known arms; without those that keep fewer than two or that are part of a larger one."""
    grids = {title: {label: arm for label, arm in grid.items() if known(arm)} for title, grid in GRIDS.items()}
    arms = [set(grid.values()) for grid in grids.values()]
    return {
        title: grid
        for title, grid in grids.items()
        if len(grid) > 1 and not any(set(grid.values()) < others for others in arms)
    }
