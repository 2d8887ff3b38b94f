"""The keep-ratio over depth (one per SBP block) and over training (a staircase of steps)."""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

from ..errors import UsageError, UsageTypeError
from .recommended import NAMES

Ratio = float | tuple[float, ...]
"""One number for all blocks, a pair (first block, last block), or one number per block."""


def check_ratio(value: Any, name: str = "keep_ratio") -> float:
    """Return the value as a float; raise UsageError unless it is a number in (0, 1]."""
    if isinstance(value, str) and value in NAMES:
        raise UsageTypeError(f"{name}={value!r} suits a model's family, and here is none; give a number in (0, 1]")
    if isinstance(value, bool) or not isinstance(value, Real):
        raise UsageTypeError(f"{name} must be a number in (0, 1], found {value!r} of type {type(value).__name__}")
    ratio = float(value)
    if not 0 < ratio <= 1:  # NaN fails both comparisons
        raise UsageError(f"{name} must be a number in (0, 1], found {value!r}")
    return ratio


def _ratio(value: Any, name: str = "keep_ratio") -> Ratio:
    """Return a number as a float, a list of numbers as a tuple."""
    if not isinstance(value, list | tuple):
        return check_ratio(value, name)
    if not value:
        raise UsageError(f"{name} is empty; give a number in (0, 1], a pair (first, last), or one number per block")
    return tuple(check_ratio(r, f"{name}[{i}]") for i, r in enumerate(value))


def over_depth(keep_ratio: float | Sequence[float], depth: int) -> tuple[float, ...]:
    """r_i = a + (b − a)·i / (depth − 1) for a pair (a, b); a number is repeated, a list is taken as it is."""
    if depth < 1:
        raise UsageError(f"depth must be at least 1, found {depth}")
    ratio = _ratio(keep_ratio)
    if isinstance(ratio, float):
        return (ratio,) * depth
    if len(ratio) == depth:
        return ratio
    if len(ratio) == 2:
        a, b = ratio
        # b itself comes last: rounding must not turn an end of 1 into almost 1.
        return (*(a + (b - a) * i / (depth - 1) for i in range(depth - 1)), b)
    raise UsageError(
        f"keep_ratio lists {len(ratio)} ratios for {depth} SBP blocks; "
        f"give {depth} of them, a pair (first, last), or one number for all"
    )


@dataclass(frozen=True)
class Milestones:
    """keep_ratio(step) = the ratio of the last point (step, ratio) at or before step; the first is at step 0.

    A staircase, not a curve: kept counts are shapes, so each new ratio means one recompilation under
    `torch.compile`.
    """

    points: tuple[tuple[int, Ratio], ...]

    def __post_init__(self) -> None:
        points: Any = self.points
        pairs = isinstance(points, list | tuple) and all(
            isinstance(its, list | tuple) and len(its) == 2 for its in points
        )
        if not pairs:
            raise UsageTypeError(f"points must be (step, ratio) pairs, found {self.points!r}")
        steps = [step for step, _ in self.points]
        if any(isinstance(step, bool) or not isinstance(step, int) for step in steps):
            raise UsageTypeError(f"the steps of points must be integers, found {steps}")
        if steps[:1] != [0] or steps != sorted(set(steps)):
            raise UsageError(f"the steps of points must start at 0 and increase strictly, found {steps}")
        points = tuple((step, _ratio(ratio, f"ratio at step {step}")) for step, ratio in self.points)
        object.__setattr__(self, "points", points)

    def at(self, step: int) -> Ratio:
        if step < 0:
            raise UsageError(f"step must be at least 0, found {step}")
        return self.points[bisect_right(self.points, step, key=lambda point: point[0]) - 1][1]


def ramp(start: float, stop: float = 1.0, *, steps: int, begin: int = 0, levels: int = 4) -> Milestones:
    """Return milestones from start to stop in `levels` equal jumps, the i-th at step begin + i·steps / levels."""
    a, b = check_ratio(start, "start"), check_ratio(stop, "stop")
    for name, value in {"steps": steps, "begin": begin, "levels": levels}.items():
        if isinstance(value, bool) or not isinstance(value, int):
            raise UsageTypeError(f"{name} must be an integer, found {value!r} of type {type(value).__name__}")
    if levels < 1 or steps < levels or begin < 0:
        raise UsageError(
            f"a ramp needs levels >= 1, steps >= levels and begin >= 0, found {levels=}, {steps=}, {begin=}"
        )
    ratios = over_depth((a, b), levels + 1)
    times = (0, *(begin + i * steps // levels for i in range(1, levels + 1)))
    return Milestones(tuple(zip(times, ratios, strict=True)))


def validate(keep_ratio: Any) -> Ratio | Milestones | str:
    """Return the keep-ratio in its normal form: a float, a tuple of floats, milestones, or a name."""
    if isinstance(keep_ratio, str) and keep_ratio not in NAMES:
        names = ", ".join(map(repr, NAMES))
        raise UsageTypeError(
            f"keep_ratio={keep_ratio!r} is not allowed; allowed: a number in (0, 1], a pair (first, last), one number "
            f"per block, Milestones, or a name of what is recommended for the model's family: {names}"
        )
    return keep_ratio if isinstance(keep_ratio, Milestones | str) else _ratio(keep_ratio)
