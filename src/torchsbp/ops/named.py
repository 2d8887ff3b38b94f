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
    found = []
    for kind in kinds:
        named, values = first(values, kind)
        found.append(named)
    assert not values, f"{len(values)} values more than {kinds} have"
    return found
