"""Accuracy after training, over the grids of the papers' figures 1 and 4."""

from statistics import mean

from ..report.charts import Axis, Drawing
from ..report.sheet import drawn
from . import contest, results
from .arms import FULL, drawn_grids
from .models import TITLES
from .plan import Plan
from .results import Finding, above, difference
from .training import Row, Run


def jobs(plan: Plan) -> list[Run]:
    return [
        Run(model, arm, seed, plan.lengths(model)[-1])
        for seed in range(plan.seeds)
        for model in plan.models
        for arm in plan.grids_of(model)
    ]


def last(rows: list[Row]) -> dict[tuple[str, str], dict[int, float]]:
    """(model, arm) -> seed -> accuracy at the end."""
    found = contest.curves(rows, "accuracy")
    return {key: {seed: curve[max(curve)] for seed, curve in seeds.items()} for key, seeds in found.items()}


def table(rows: list[Row]) -> str:
    found, cells = last(rows), []
    for (model, arm), seeds in found.items():
        full = found.get((model, FULL), {})
        pairs = [value - full[seed] for seed, value in seeds.items() if seed in full]
        values = ", ".join(f"{seeds[seed]:.1f}" for seed in sorted(seeds))
        cells.append((model, arm, values, f"{mean(seeds.values()):.2f}", difference(pairs)))
    return results.table(("model", "arm", "accuracy by seed", "mean", "against full"), cells)


def drawings(rows: list[Row]) -> dict[str, list[Drawing]]:
    """One panel per model and grid; the panels of a model share their axis."""
    found, panels = last(rows), []
    for model in dict.fromkeys(model for model, _ in found):
        mine = {arm: seeds for (its, arm), seeds in found.items() if its == model}
        axis = Axis.of([value for seeds in mine.values() for value in seeds.values()])
        for title, grid in drawn_grids(mine.__contains__).items():
            seeds = [mine[arm] for arm in grid.values()]
            apart = {
                f"seed {seed}": [(i, its[seed]) for i, its in enumerate(seeds) if seed in its]
                for seed in sorted({seed for its in seeds for seed in its})
            }
            means = {"mean": [(i, mean(its.values())) for i, its in enumerate(seeds)]}
            lines = means | apart if len(apart) > 1 else apart
            panels.append(
                drawn(f"{TITLES[model]}: {title}", "accuracy, %", "", lines, names=[*grid], joined=False, axis=axis)
            )
    return {"": panels}


CHANCE = 0.6
"""Points by which runs of one seed differ by chance: twice the contest's standard deviation of differences (0.31)."""


def findings(rows: list[Row]) -> list[Finding]:
    values = {arm: mean(seeds.values()) for (model, arm), seeds in last(rows).items() if model == "vit"}
    claims = [
        ("1, left", "8 of 12 blocks cost within 1.5 points, all 12 a large drop", ("grid 0.5", "all 12"), 1.0),
        ("1, middle", "a ratio of 0.25 costs much more than 0.5 (3.0 points)", ("grid 0.5", "grid 0.25"), 1.5),
        ("1, right", "increasing ratios are significantly worse than uniform ones", ("grid 0.5", "increasing"), 0.0),
        ("1, right", "decreasing ratios are significantly worse than uniform ones", ("grid 0.5", "decreasing"), 0.0),
        ("4, left", "grid masks are 0.5 to 1.7 points better than random ones", ("grid 0.5", "random 0.5"), 0.0),
        ("4, right", "dropping Q, K and V is better than dropping queries only", ("qkv 0.5", "grid 0.5"), 0.0),
        ("4, right", "dropping heads is no better", ("qkv 0.5", "head 0.5"), 0.0),
    ]  # the last number: better by more than so many points
    return [
        Finding(
            figure,
            paper,
            f"{better} {values[better]:.1f}, {worse} {values[worse]:.1f}",
            above(values[better] - least, values[worse], CHANCE),
        )
        for figure, paper, (better, worse), least in claims
        if better in values and worse in values
    ]
