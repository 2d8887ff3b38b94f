from typing import NamedTuple

import pytest

from torchsbp.ops.named import first, split


class Pair(NamedTuple):
    a: int
    b: int


class One(NamedTuple):
    c: int


def test_values_by_name():
    pair, one = split((1, 2, 3), Pair, One)
    assert pair == Pair(a=1, b=2)
    assert one.c == 3
    assert first((1, 2, 3, 4), Pair) == (Pair(1, 2), (3, 4))


@pytest.mark.parametrize("values", [(1, 2), (1, 2, 3, 4)])
def test_all_values_have_a_name(values):
    with pytest.raises((AssertionError, TypeError)):
        split(values, Pair, One)
