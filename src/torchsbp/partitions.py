"""Windows: how attention layers cut a grid, and equally many kept positions in each of them.

A grid is padded to whole windows and rolled back by a shift, in one order or the other. *Places* number what results,
window after window.
"""

import math
from dataclasses import dataclass
from itertools import product
from operator import index
from typing import Any

import torch
from torch import Tensor

from .ops.windows import Windows

Grid = tuple[int, ...]


@dataclass(frozen=True)
class Partition:
    """A grid cut into windows of this size; ``pads_first``: it is padded before it is rolled."""

    grid: Grid
    window: Grid
    shift: Grid
    pads_first: bool

    @property
    def area(self) -> int:
        return math.prod(self.window)

    @property
    def counts(self) -> Grid:
        """Number of windows in each dimension."""
        return tuple(-(-n // w) for n, w in zip(self.grid, self.window, strict=True))

    def rolled(self, dim: int, i: Any) -> Any:
        """Where coordinate i of a dimension lies after padding and rolling."""
        around = self.counts[dim] * self.window[dim] if self.pads_first else self.grid[dim]
        return (i - self.shift[dim]) % around

    def places(self, device: torch.device) -> Tensor:
        """The place of every position, ``[n]``."""
        window = slot = torch.zeros((), dtype=torch.int64, device=device)
        for dim, (n, w, count) in enumerate(zip(self.grid, self.window, self.counts, strict=True)):
            i = self.rolled(dim, torch.arange(n, device=device))
            window, slot = window.unsqueeze(-1) * count + i // w, slot.unsqueeze(-1) * w + i % w
        return (window * self.area + slot).flatten()

    def regions(self, device: torch.device) -> Tensor | None:
        """Numbers of the places, ``[windows, area]``, that differ where rolling made neighbours of opposite edges."""
        if not any(self.shift):
            return None
        padded = tuple(count * w for count, w in zip(self.counts, self.window, strict=True))
        region = torch.zeros((), dtype=torch.int64, device=device)
        for n, s in zip(padded, self.shift, strict=True):
            region = region.unsqueeze(-1) * 2 + (torch.arange(n, device=device) >= n - s)
        places = Partition(padded, self.window, (0,) * len(padded), True).places(device)
        return torch.empty_like(places).index_copy(0, places, region.flatten()).view(-1, self.area)

    def total(self, k: int) -> int:
        """Σ min(k, positions in the window): what is kept of a sample, where padding is not counted."""
        sizes = []
        for dim, (n, w, count) in enumerate(zip(self.grid, self.window, self.counts, strict=True)):
            found = [0] * count
            for i in range(n):
                found[self.rolled(dim, i) // w] += 1
            sizes.append([(size, found.count(size)) for size in sorted(set(found))])
        sides = [zip(*of_dims, strict=True) for of_dims in product(*sizes)]
        return sum(math.prod(times) * min(k, math.prod(size)) for size, times in sides)


def keep(order: Tensor, partition: Partition, ratio: float) -> tuple[Tensor, Windows]:
    """The first max(1, round(r · area)) positions of every window by the order ``[samples, n]``.

    Positions ``[samples, kept]`` come window after window. Padding is last in a window: it fills the count where there
    is nothing else and is not among the positions.
    """
    samples, n, area = *order.shape, partition.area
    k = max(1, index(round(ratio * area)))
    places = partition.places(order.device)
    windows = math.prod(partition.counts)
    rank = order.new_full((samples, windows * area), n).index_copy(1, places, order.argsort(dim=1))
    slots = rank.view(samples, windows, area).argsort(dim=2, stable=True)[:, :, :k]
    position = order.new_full((windows * area,), n).index_copy(0, places, torch.arange(n, device=order.device))
    kept = position.view(1, windows, area).expand(samples, -1, -1).gather(2, slots).flatten(1)
    total, filled = partition.total(k), None
    if total < kept.shape[1]:
        filled = (kept[0] == n).to(torch.int8).argsort(stable=True)[:total]
        kept = kept.index_select(1, filled)
    return kept, Windows(partition.grid, partition.window, places, slots, filled, partition.regions(order.device))
