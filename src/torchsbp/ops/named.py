"""Named tuples from flat sequences: an autograd function's arguments, its saved tensors, which gradients are needed."""

from collections.abc import Sequence
from typing import Any

Needs = Any
"""A named tuple of the parameters' kind that has a bool for each: whether its gradient is needed."""


def first(values: Sequence[Any], kind: type[Any]) -> tuple[Any, Sequence[Any]]:
    """Return the first values as a named tuple of that kind, and the rest as they are."""
    count = len(kind._fields)
    return kind(*values[:count]), values[count:]


def split(values: Sequence[Any], *kinds: type[Any]) -> list[Any]:
    """Return all values as named tuples of these kinds, one after the other."""
    found, end = [], 0
    for kind in kinds:
        start, end = end, end + len(kind._fields)
        found.append(kind(*values[start:end]))
    assert end == len(values), f"{len(values)} values, {end} names"
    return found
