"""Attention in windows for kept rows: rows to windows and back, and what is added to their scores."""

import math
from typing import NamedTuple

from torch import Tensor

from .window_attention import MASKED, Cut


class Windows(NamedTuple):
    """Where the rows of a layer are in its windows: nW of them, each with k kept slots.

    - ``grid``, ``window``: their sizes.
    - ``slot_of_row``: window · area + slot of every row, ``[n]``.
    - ``slots``: the kept ones of each window, ``[B, nW, k]``, or ``[1, nW, k]`` where samples share them.
    - ``filled``: which of the nW · k kept slots are rows, ``[kept]``; the rest is padding. None: all.
    - ``regions``: numbers ``[nW, area]``; rows of unequal ones do not see each other. None: all do.
    - ``cut``: the same for blocks that are known part by part.
    """

    grid: tuple[int, ...]
    window: tuple[int, ...]
    slot_of_row: Tensor
    slots: Tensor
    filled: Tensor | None
    regions: Tensor | None
    cut: Cut


def cut(x: Tensor, w: Windows) -> Tensor:
    """All rows ``[B, n, C]`` as windows ``[B · nW, area, C]``; padding is zero."""
    area = math.prod(w.window)
    return _spread(x, w.slot_of_row, w.slots.shape[1] * area).view(-1, area, x.shape[-1])


def cut_kept(x: Tensor, w: Windows) -> Tensor:
    """Kept rows ``[B, kept, C]`` by window, ``[B · nW, k, C]``."""
    _, count, k = w.slots.shape
    return (x if w.filled is None else _spread(x, w.filled, count * k)).reshape(-1, k, x.shape[-1])


def join_kept(x: Tensor, w: Windows) -> Tensor:
    """The inverse of ``cut_kept``."""
    _, count, k = w.slots.shape
    x = x.reshape(-1, count * k, x.shape[-1])
    return x if w.filled is None else x.index_select(1, w.filled)


def _spread(x: Tensor, index: Tensor, size: int) -> Tensor:
    return x.new_zeros(x.shape[0], size, x.shape[-1]).index_copy(1, index, x)


def kept_scores(bias: Tensor, w: Windows, batch: int) -> Tensor:
    """What is added to the scores of kept queries, ``[B · nW, heads, k, area]``: their rows of the bias
    ``[(1,) heads, area, area]``, and the mask across regions."""
    samples, count, k = w.slots.shape
    bias = bias.flatten(0, -3)
    added = bias.index_select(1, w.slots.flatten()).unflatten(1, (samples, count, k)).movedim(0, 2)
    if w.regions is not None:
        of_queries = w.regions.expand(samples, -1, -1).gather(2, w.slots)
        across = of_queries.unsqueeze(3) != w.regions.unsqueeze(1)
        added = added + MASKED * across.unsqueeze(2).to(added.dtype)
    return added.expand(batch, -1, -1, -1, -1).flatten(0, 1)
