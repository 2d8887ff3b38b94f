"""Attention in windows for kept rows, against one dense map over all slots, in float64."""

import math

import pytest
import torch
from torch import Tensor

from torchsbp.ops import reference
from torchsbp.ops import rows as R
from torchsbp.ops.window_attention import Cut
from torchsbp.ops.windows import Windows, cut, cut_kept, join_kept, kept_scores

from .helpers import assert_same_gradients, gradients, param

B, HEADS, D, K = 2, 2, 4, 2
WINDOW = (2, 3)
AREA = math.prod(WINDOW)


def windows(grid: tuple[int, int], shared: bool, regions: bool) -> tuple[Windows, Tensor]:
    """Windows over a grid, padded where it is no multiple of them, with K kept slots in each; and the kept rows."""
    count = [-(-n // w) for n, w in zip(grid, WINDOW, strict=True)]
    i, j = torch.meshgrid(*(torch.arange(n) for n in grid), indexing="ij")
    window = i // WINDOW[0] * count[1] + j // WINDOW[1]
    slot = i % WINDOW[0] * WINDOW[1] + j % WINDOW[1]
    places, n = (window * AREA + slot).flatten(), math.prod(grid)
    number = math.prod(count)
    slots = torch.rand(1 if shared else B, number, AREA).argsort(-1)[..., :K].sort(-1).values
    of_row = torch.full((number * AREA,), -1).index_copy(0, places, torch.arange(n))
    kept = of_row[(torch.arange(number)[:, None] * AREA + slots).flatten(1)].expand(B, -1)
    filled = None
    if n < len(of_row):
        assert shared
        (filled,) = (kept[0] >= 0).nonzero(as_tuple=True)
        kept = kept.index_select(1, filled)
    rows = (kept + n * torch.arange(B)[:, None]).flatten()
    numbers = torch.randint(2, (number, AREA)) if regions else None
    beyond = (of_row < 0).cumsum(0) + n - 1
    rows_in_slots = of_row.where(of_row >= 0, beyond).view(number, AREA)
    return Windows(grid, WINDOW, places, slots, filled, numbers, Cut(rows_in_slots, numbers)), rows


def kept_attention(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, w: Windows, rows: Tensor) -> Tensor:
    """Kept rows ``[B, kept, heads * D]``, from windows."""

    def by_head(x: Tensor) -> Tensor:
        return x.unflatten(-1, (HEADS, D)).transpose(1, 2)

    q, k, v = (x.transpose(1, 2).flatten(2) for x in (q, k, v))
    q = cut_kept(R.take(q, rows).view(B, -1, HEADS * D), w)
    q, k, v = by_head(q), by_head(cut(k, w)), by_head(cut(v, w))
    o = (q @ k.mT * D**-0.5 + kept_scores(bias, w, B)).softmax(-1) @ v
    return join_kept(o.transpose(1, 2).flatten(2), w)


@pytest.mark.parametrize("regions", [False, True])
@pytest.mark.parametrize("grid, shared", [((4, 6), True), ((4, 6), False), ((3, 5), True), ((5, 7), True)])
def test_kept_rows_equal_reference(grid, shared, regions):
    torch.manual_seed(0)
    w, rows = windows(grid, shared, regions)
    leaves = [param(B, HEADS, math.prod(grid), D) for _ in range(3)] + [param(HEADS, AREA, AREA)]
    ours = kept_attention(*leaves, w, rows)
    theirs = reference.window_attention(*leaves, None, w.cut, D**-0.5).transpose(1, 2).flatten(2)
    torch.testing.assert_close(R.flat(ours), R.take(theirs, rows), rtol=1e-12, atol=1e-12)
    dy = torch.randn_like(theirs)
    expected = gradients(reference.gate(theirs, rows), dy, leaves)
    assert_same_gradients(gradients(ours, R.take(dy, rows).view_as(ours), leaves), expected)


def test_a_bias_with_a_leading_dimension_of_one_is_the_same():
    torch.manual_seed(0)
    w, _ = windows((4, 6), True, True)
    bias = param(HEADS, AREA, AREA)
    assert torch.equal(kept_scores(bias, w, B), kept_scores(bias[None], w, B))
