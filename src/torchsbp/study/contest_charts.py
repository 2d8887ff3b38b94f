"""Figures of the contest: accuracy over time, and differences to full backpropagation with intervals."""

from collections.abc import Mapping, Sequence
from statistics import mean

from ..report.charts import Axis, Drawing
from ..report.sheet import drawn
from . import results
from .arms import ARMS, FULL
from .contest import Curve, Fit, against, at_equal_time, curves, pairs_of
from .models import TITLES
from .training import Row

ENOUGH = 3
"""Pairs that a difference needs to be drawn: the interval of two is wider than any figure."""
Differences = dict[str, dict[str, list[float]]]
"""arm -> where it was compared -> paired differences"""


def drawings(rows: list[Row]) -> dict[str, list[Drawing]]:
    """For every model: accuracy over time, and differences at equal epochs and at equal time."""
    panels = []
    for model in dict.fromkeys(model for model, _ in curves(rows)):
        panels += [over_time(model, rows), at_epochs(model, rows)]
    return {"": [its for its in panels if its.parts] + in_time(rows, "own clock")}


def numbers_of(rows: list[Row]) -> dict[str, int]:
    """arm -> its number, so that it looks the same in all panels."""
    first = [FULL, *(arm for arm, its in ARMS.items() if its.same)]
    return {arm: i for i, arm in enumerate(dict.fromkeys([*first, *(arm for _, arm in curves(rows))]))}


def over_time(model: str, rows: list[Row]) -> Drawing:
    """Accuracy over the time of training, for the arms that were timed; if none was, over epochs, for all arms."""
    found = curves(rows)
    speeds = [row for row in results.of(rows, "speed", "ms") if row["model"] == model]
    seconds = {row["arm"]: row["ms"] * row["steps"] / 1000 for row in speeds}
    units = seconds or {arm: 1.0 for its, arm in found if its == model}
    lines = {arm: means(found.get((model, ARMS[arm].same or arm), {}), unit) for arm, unit in units.items()}
    below = "seconds of training" if seconds else "epochs"
    return drawn(TITLES[model], "accuracy, %", below, lines, numbers=numbers_of(rows))


def means(seeds: dict[int, Curve], unit: float) -> list[tuple[float, float]]:
    """Points (length · unit, mean accuracy over seeds), where ``unit`` is the size of an epoch on the axis."""
    lengths = sorted({length for curve in seeds.values() for length in curve})
    return [(length * unit, mean(its[length] for its in seeds.values() if length in its)) for length in lengths]


def at_epochs(model: str, rows: list[Row]) -> Drawing:
    found = curves(rows)
    arms = [arm for its, arm in found if its == model and arm != FULL]
    pairs = {
        arm: {f"{length} epochs": values for length, values in pairs_of(found, model, arm).items()} for arm in arms
    }
    return differences(f"{TITLES[model]}, equal epochs", pairs, numbers_of(rows))


def in_time(rows: list[Row], clock: str) -> list[Drawing]:
    """Differences at equal time, for models that have enough pairs; ``clock`` says whose steps were timed."""
    fits, panels = at_equal_time(rows), []
    for model in dict.fromkeys(its.model for its in fits):
        mine = [its for its in fits if its.model == model]
        panels.append(differences(f"{TITLES[model]}, equal time, {clock}", by_arm(fits, mine), numbers_of(rows)))
    return [its for its in panels if its.parts]


def by_arm(fits: list[Fit], mine: Sequence[Fit]) -> Differences:
    found: Differences = {}
    for its in mine:
        if its.arm != FULL:
            found.setdefault(its.arm, {})[f"{its.budget:.1f} epochs of full"] = against(fits, its, FULL)
    return found


def differences(title: str, pairs: Differences, numbers: Mapping[str, int]) -> Drawing:
    """Means with 95 % intervals, the arms side by side."""
    known = {arm: {name: values for name, values in its.items() if len(values) >= ENOUGH} for arm, its in pairs.items()}
    arms = [arm for arm, its in known.items() if its]
    names = sorted({name for its in known.values() for name in its}, key=lambda name: float(name.split()[0]))
    lines, spreads = dict[str, list[tuple[float, float]]](), dict[str, list[float]]()
    for i, arm in enumerate(arms):
        shift = 0.5 * (i + 0.5) / len(arms) - 0.25
        at = [(names.index(name) + shift, values) for name, values in known[arm].items()]
        lines[arm] = [(x, mean(values)) for x, values in at]
        spreads[arm] = [results.interval(values) or 0.0 for _, values in at]
    ends = [y + sign * half for arm in arms for (_, y), half in zip(lines[arm], spreads[arm], strict=True)
            for sign in (-1, 1)]  # fmt: skip
    axis = Axis.of([0.0, *ends])
    return drawn(
        title,
        "points against full",
        "mean and 95 % interval",
        lines,
        names=names,
        joined=False,
        axis=axis,
        numbers=numbers,
        spreads=spreads,
    )
