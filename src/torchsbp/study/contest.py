"""The contest: accuracy of arms on the same models, data and seeds, at equal epochs and at equal time.

Every arm trains for each number of epochs, with the schedule of that length. Between these lengths accuracy is
interpolated by a polynomial in log(epochs), a parabola if there are three. With the step times that ``speed.py``
measures one run at a time, this gives accuracy at equal time. Arms that train the same model as full backpropagation
have its accuracy in their own time; they run with the first seed at most, to show that.
"""

import math
from collections.abc import Iterable, Iterator
from statistics import mean
from typing import NamedTuple

from . import results
from .arms import ARMS, FULL
from .plan import Plan, Tuned
from .results import difference, relative
from .training import Place, Row, Run, Settings, prepared, train

REACH = 1.4
Curve = dict[int, float]
"""Number of epochs of a run -> its accuracy."""


def jobs(plan: Plan) -> list[Run]:
    """All runs of the first seed, then of the next, so that a contest that is stopped early has complete pairs."""
    return [
        Run(model, arm, seed, longest, lr, drop_path, tuple(shorter))
        for seed in range(plan.seeds)
        for arm in dict.fromkeys(arm for model in plan.models for arm in plan.arms_of(model))
        for model in plan.models
        if arm in plan.arms_of(model) and not (seed and ARMS[arm].same)
        for lr, drop_path in plan.settings(model, arm)
        for *shorter, longest in [plan.lengths(model)]
    ]


def work(run: Run, settings: Settings, place: Place) -> Iterator[Row]:
    training = prepared(run.model, run.arm, run.drop_path, settings, place.data)
    yield from train(run, settings, training.data, training, place.out / "states" / f"{run.name}.pt")


def tried(rows: list[Row], study: str = "contest") -> dict[tuple[str, str], dict[Tuned, dict[int, Curve]]]:
    """(model, arm) -> (learning rate, stochastic depth) -> seed -> curve. If several runs had the same length, the
    newest counts."""
    found: dict[tuple[str, str], dict[Tuned, dict[int, Curve]]] = {}
    for row in results.of(rows, study, "accuracy"):
        of_arm = found.setdefault((row["model"], row["arm"]), {})
        of_arm.setdefault((row["lr"], row["drop_path"]), {}).setdefault(row["seed"], {})[row["epoch"]] = row["accuracy"]
    return found


def tuned(rows: list[Row], study: str = "contest") -> dict[tuple[str, str], Tuned]:
    """(model, arm) -> the best learning rate and stochastic depth: those that reach the greatest length, among them
    those with the most seeds there, and of these the ones with the highest mean."""

    def rank(seeds: dict[int, Curve]) -> tuple[int, int, float]:
        longest = max(max(curve) for curve in seeds.values())
        values = [curve[longest] for curve in seeds.values() if longest in curve]
        return longest, len(values), mean(values)

    return {key: max(of_arm, key=lambda its: rank(of_arm[its])) for key, of_arm in tried(rows, study).items()}


def curves(rows: list[Row], study: str = "contest") -> dict[tuple[str, str], dict[int, Curve]]:
    """(model, arm) -> seed -> curve, with the learning rate and stochastic depth that are best for the arm."""
    found = tried(rows, study)
    return {key: found[key][best] for key, best in tuned(rows, study).items()}


def at(curve: Curve, epochs: float) -> float | None:
    """Accuracy between the lengths that were run, on the polynomial in log(epochs) through all of them; None outside.

    Curves bend, so linear interpolation would favour arms whose epochs are near a length that was run."""
    if not min(curve) <= epochs <= max(curve):
        return None

    def share(length: int) -> float:
        others = (other for other in curve if other != length)
        return math.prod(math.log(epochs / other) / math.log(length / other) for other in others)

    return sum(share(length) * accuracy for length, accuracy in curve.items())


def shared(curves: Iterable[Curve]) -> set[int]:
    """The lengths that all of those curves have that reach the greatest length."""
    lengths = [set(curve) for curve in curves]
    longest = max(map(max, lengths))
    return set.intersection(*(its for its in lengths if longest in its))


def budgets(lengths: set[int]) -> list[float]:
    """Three budgets of time, in epochs of full backpropagation, for arms up to REACH times as fast or as slow."""
    low, high = REACH * min(lengths), max(lengths) / REACH
    return [low, math.sqrt(low * high), high] if low < high else []


def pairs_of(found: dict[tuple[str, str], dict[int, Curve]], model: str, arm: str) -> dict[int, list[float]]:
    """epochs -> paired differences to full backpropagation, one per seed"""
    full, pairs = found.get((model, FULL), {}), dict[int, list[float]]()
    for seed, curve in sorted(found[model, arm].items()):
        for length in sorted(curve.keys() & full.get(seed, {}).keys()):
            pairs.setdefault(length, []).append(curve[length] - full[seed][length])
    return pairs


def equal_epochs(rows: list[Row]) -> str:
    found, cells = curves(rows), []
    for (model, arm), seeds in found.items():
        pairs = pairs_of(found, model, arm)
        for length in sorted({length for curve in seeds.values() for length in curve}):
            mine = [curve[length] for _, curve in sorted(seeds.items()) if length in curve]
            values = ", ".join(f"{value:.1f}" for value in mine)
            cells.append((model, arm, length, values, f"{mean(mine):.2f}", difference(pairs.get(length, []))))
    cells.sort(key=lambda its: (its[0], its[2]))
    return results.table(("model", "arm", "epochs", "accuracy by seed", "mean", "against full"), cells)


class Fit(NamedTuple):
    """An arm in a budget of time: the epochs that fit, accuracy by seed, memory relative to full backpropagation."""

    model: str
    budget: float
    arm: str
    epochs: float
    values: dict[int, float]
    memory: str


def at_equal_time(rows: list[Row]) -> list[Fit]:
    """The fits of all models and arms that were timed, budget by budget (in epochs of full backpropagation)."""
    found, fits = curves(rows), []
    speeds = {(row["model"], row["arm"]): row for row in results.of(rows, "speed", "ms")}
    for model in dict.fromkeys(model for model, _ in found):
        full, clock = found.get((model, FULL), {}), speeds.get((model, FULL))
        if clock is None or not full:
            continue
        lengths = shared(full.values())
        for budget in budgets(lengths):
            for arm, epochs in fitting(speeds, model, budget).items():
                values = by_seed(found, model, arm, lengths, epochs)
                memory = relative(speeds[model, arm]["peak_bytes"], clock["peak_bytes"])
                fits.append(Fit(model, budget, arm, epochs, values, memory))
    return fits


def against(fits: list[Fit], its: Fit, bar: str) -> list[float]:
    """Paired differences to another arm, ``bar``, in the same budget."""
    others = next((other.values for other in fits if (other.arm, *other[:2]) == (bar, *its[:2])), {})
    return [value - others[seed] for seed, value in its.values.items() if seed in others]


def equal_time(rows: list[Row]) -> str:
    """A table of what every arm reaches in each budget: the epochs that fit, mean accuracy, and paired differences to
    full backpropagation and to exact gradients."""
    fits, cells = at_equal_time(rows), []
    for its in fits:
        accuracy = f"{mean(its.values.values()):.2f}" if its.values else "–"
        pairs = [difference(against(fits, its, bar)) for bar in (FULL, "exact")]
        cells.append((its.model, f"{its.budget:.1f}", its.arm, f"{its.epochs:.1f}", accuracy, *pairs, its.memory))
    header = (
        "model", "time of full's epochs", "arm", "epochs in it", "accuracy", "against full", "against exact",
        "peak memory",
    )  # fmt: skip
    return results.table(header, cells) if cells else "No table at equal time: it needs `study speed` and two lengths."


def fitting(speeds: dict[tuple[str, str], Row], model: str, budget: float) -> dict[str, float]:
    """arm -> the number of epochs that fit into the time of ``budget`` epochs of full backpropagation"""
    times = {arm: row["ms"] * row["steps"] for (its, arm), row in speeds.items() if its == model}
    return {arm: budget * times[FULL] / time for arm, time in times.items()}


def by_seed(
    found: dict[tuple[str, str], dict[int, Curve]], model: str, arm: str, lengths: set[int], epochs: float
) -> dict[int, float]:
    """seed -> accuracy after so many epochs, for seeds that have all of these lengths."""
    seeds = found.get((model, ARMS[arm].same or arm), {})
    whole = {seed: {its: curve[its] for its in lengths} for seed, curve in seeds.items() if lengths <= set(curve)}
    values = {seed: at(curve, epochs) for seed, curve in whole.items()}
    return {seed: value for seed, value in values.items() if value is not None}


def table(rows: list[Row]) -> str:
    return f"Equal epochs\n\n{equal_epochs(rows)}\n\nEqual time\n\n{equal_time(rows)}"
