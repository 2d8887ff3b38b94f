"""Allowed ranges of the numbers in a configuration: declared with each field, checked when a configuration is made."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

from ..errors import UsageError

KEY = "range"


@dataclass(frozen=True)
class Range:
    """The interval from ``low`` to ``high``; ``open_low`` and ``open_high`` exclude that bound itself."""

    low: float
    high: float = math.inf
    open_low: bool = False
    open_high: bool = False

    def __contains__(self, value: float) -> bool:
        above = value > self.low if self.open_low else value >= self.low
        below = value < self.high if self.open_high else value <= self.high
        return above and below and math.isfinite(value)

    def __str__(self) -> str:
        if self.high == math.inf:
            return f"{'more than' if self.open_low else 'at least'} {self.low:g}"
        return f"in {'(' if self.open_low else '['}{self.low:g}, {self.high:g}{')' if self.open_high else ']'}"


def ranged(low: float, high: float = math.inf, **bounds: bool) -> dict[str, Range]:
    """Metadata for a dataclass field whose number, or list, tuple or dictionary of numbers, must be in this range."""
    return {KEY: Range(low, high, **bounds)}


POSITIVE = ranged(0, open_low=True)
NOT_NEGATIVE = ranged(0)
COUNT = ranged(1)
WORKERS = ranged(0, 1024)
SHARE = ranged(0, 1)
SHARE_BELOW_1 = ranged(0, 1, open_high=True)
SHARE_ABOVE_0 = ranged(0, 1, open_low=True)


def check(options: Any, name: str = "") -> None:
    """Raise ``UsageError`` for the first number outside its range, in these options or in nested ones."""
    for its in fields(options):
        value = getattr(options, its.name)
        path = f"{name}.{its.name}" if name else its.name
        allowed = its.metadata.get(KEY)
        if is_dataclass(value) and not isinstance(value, type):
            check(value, path)
        elif allowed is not None:
            optional, whole = its.default is None, "float" not in str(its.type)
            if isinstance(value, str) and repr(value) in str(its.type):
                continue  # a word that the field's type allows instead of a number
            kinds = (int,) if whole else (int, float)
            inside = all(type(number) in kinds and number in allowed for number in numbers(value, optional))
            if not inside or value == []:
                many = isinstance(value, list | tuple | dict)
                one = "an integer" if whole else "a number"
                refuse(path, value, f"{'numbers' if many else one} {allowed}{', or null' if optional else ''}")


def numbers(value: Any, optional: bool) -> Iterator[Any]:
    if isinstance(value, list | tuple):
        yield from value
    elif isinstance(value, dict):
        yield from value.values()
    elif not (value is None and optional):
        yield value


def refuse(name: str, value: Any, allowed: str) -> None:
    raise UsageError(f"{name}={value!r} is not allowed; allowed: {allowed}")
