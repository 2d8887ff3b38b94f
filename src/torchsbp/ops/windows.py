"""Attention in windows for blocks that run again on kept rows: rows to windows and back, what is added to scores."""

import math
from typing import NamedTuple

from torch import Tensor

from .window_attention import MASKED, Cut


class Windows(NamedTuple):
    """Where the n rows of a layer are in its nW windows, of area slots each, of which k are kept.

    - ``grid``, ``window``: their sizes.
    - ``slot_of_row``: window · area + slot of every row, ``[n]``.
    - ``slots``: the kept slots of each window, ``[B, nW, k]``, or ``[1, nW, k]`` where samples share them.
    - ``filled``: which of the nW · k kept slots hold rows, ``[kept]``; the rest is padding. None: all do.
    - ``regions``: numbers ``[nW, area]``; rows with unequal numbers do not see each other. None: all do.
    - ``cut``: the same as a ``Cut``, for blocks that are known part by part.
    """

    grid: tuple[int, ...]
    window: tuple[int, ...]
    slot_of_row: Tensor
    slots: Tensor
    filled: Tensor | None
    regions: Tensor | None
    cut: Cut


def cut(x: Tensor, w: Windows) -> Tensor:
    """Cut all rows ``[B, n, C]`` into windows ``[B · nW, area, C]``; padding is zero."""
    area = math.prod(w.window)
    return _spread(x, w.slot_of_row, w.slots.shape[1] * area).view(-1, area, x.shape[-1])


def cut_kept(x: Tensor, w: Windows) -> Tensor:
    """Cut kept rows ``[B, kept, C]`` into windows ``[B · nW, k, C]``."""
    _, count, k = w.slots.shape
    return (x if w.filled is None else _spread(x, w.filled, count * k)).reshape(-1, k, x.shape[-1])


def join_kept(x: Tensor, w: Windows) -> Tensor:
    """Undo ``cut_kept``."""
    _, count, k = w.slots.shape
    x = x.reshape(-1, count * k, x.shape[-1])
    return x if w.filled is None else x.index_select(1, w.filled)


def _spread(x: Tensor, index: Tensor, size: int) -> Tensor:
    return x.new_zeros(x.shape[0], size, x.shape[-1]).index_copy(1, index, x)


def kept_scores(bias: Tensor, w: Windows, batch: int) -> Tensor:
    """Return what is added to the scores of kept queries, ``[B · nW, heads, k, area]``: their rows of the bias
    ``[(1,) heads, area, area]``, and the mask across regions."""
    samples, count, k = w.slots.shape
    bias = bias.flatten(0, -3)
    added = bias.index_select(1, w.slots.flatten()).unflatten(1, (samples, count, k)).movedim(0, 2)
    if w.regions is not None:
        of_queries = w.regions.expand(samples, -1, -1).gather(2, w.slots)
        across = of_queries.unsqueeze(3) != w.regions.unsqueeze(1)
        added = added + MASKED * across.unsqueeze(2).to(added.dtype)
    return added.expand(batch, -1, -1, -1, -1).flatten(0, 1)
