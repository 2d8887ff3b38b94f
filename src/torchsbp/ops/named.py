"""Flat sequences by name: an autograd function's arguments, its saved tensors, which gradients are needed."""

from collections.abc import Sequence
from typing import Any

Needs = Any
"""A named tuple of parameters that has, for each of them, whether its gradient is needed."""


def first(values: Sequence[Any], kind: type[Any]) -> tuple[Any, Sequence[Any]]:
    """The first values as a named tuple of that kind, and the rest."""
    count = len(kind._fields)
    return kind(*values[:count]), values[count:]


def split(values: Sequence[Any], *kinds: type[Any]) -> list[Any]:
    """All values as named tuples of these kinds, one after the other."""
    found, end = [], 0
    for kind in kinds:
        start, end = end, end + len(kind._fields)
        found.append(kind(*values[start:end]))
    assert end == len(values), f"{len(values)} values, {end} names"
    return found
