"""Windows: how attention layers cut a grid, and how equally many positions are kept in each of them.

A grid is padded to whole windows and rolled back by a shift, in one order or the other. *Slots* are the places of the
result, window after window.
"""

import math
from dataclasses import dataclass, replace
from itertools import product
from operator import index

import torch
import torch.nn.functional as F
from torch import Tensor

from ..ops.constants import constant
from ..ops.window_attention import Cut
from ..ops.windows import Windows

Grid = tuple[int, ...]


@dataclass(frozen=True)
class Partition:
    """A grid cut into windows of this size; ``pads_first``: it is padded before it is rolled. ``strided``: the
    positions of a window are not neighbours, but as far from each other as there are windows."""

    grid: Grid
    window: Grid
    shift: Grid
    pads_first: bool
    strided: bool = False

    @property
    def area(self) -> int:
        return math.prod(self.window)

    @property
    def counts(self) -> Grid:
        """The number of windows in each dimension."""
        return tuple(-(-n // w) for n, w in zip(self.grid, self.window, strict=True))

    def cut(self, x: Tensor, padding: int) -> Tensor:
        """Cut a map ``[*grid]`` into windows, ``[windows, area]``."""
        dims = range(len(self.grid))
        pads: list[int] = []
        for n, w, count in zip(self.grid, self.window, self.counts, strict=True):
            pads = [0, count * w - n, *pads]  # F.pad begins with the last dimension

        def rolled(x: Tensor) -> Tensor:
            return x.roll([-s for s in self.shift], list(dims))

        x = rolled(F.pad(x, pads, value=padding)) if self.pads_first else F.pad(rolled(x), pads, value=padding)
        outer, inner = (self.window, self.counts) if self.strided else (self.counts, self.window)
        x = x.view([side for pair in zip(outer, inner, strict=True) for side in pair])
        even, odd = [2 * d for d in dims], [2 * d + 1 for d in dims]
        return x.permute(odd + even if self.strided else even + odd).reshape(-1, self.area)

    @property
    def padded(self) -> bool:
        return any(n % w for n, w in zip(self.grid, self.window, strict=True))

    def places(self, device: torch.device) -> Tensor:
        """Return the position in every slot, ``[windows, area]``; of n positions, padding is n, n + 1, …"""
        n = math.prod(self.grid)
        places = self.cut(torch.arange(n, device=device).view(self.grid), n)
        if not self.padded:
            return places
        beyond = places == n
        return places + (beyond.flatten().cumsum(0).view_as(places) - 1) * beyond

    def regions(self, device: torch.device) -> Tensor | None:
        """Return numbers of the slots, ``[windows, area]``, unequal where rolling made opposite edges neighbours."""
        if not any(self.shift):
            return None
        padded = tuple(count * w for count, w in zip(self.counts, self.window, strict=True))
        region = torch.zeros((), dtype=torch.int64, device=device)
        for n, s in zip(padded, self.shift, strict=True):
            region = region.unsqueeze(-1) * 2 + (torch.arange(n, device=device) >= n - s)
        return replace(self, grid=padded, shift=(0,) * len(padded)).cut(region, 0)

    def total(self, ratio: float) -> int:
        """Return Σ share(r, positions in the window), the number kept of a sample; padding is not counted."""
        sizes = []
        for dim, (n, w, count) in enumerate(zip(self.grid, self.window, self.counts, strict=True)):
            found = [0] * count
            for i in range(n):
                found[(i - self.shift[dim]) % (count * w if self.pads_first else n) // w] += 1
            sizes.append([(size, found.count(size)) for size in sorted(set(found))])
        sides = [zip(*of_dims, strict=True) for of_dims in product(*sizes)]
        return sum(math.prod(times) * share(ratio, math.prod(size)) for size, times in sides)


def share(ratio: float, positions: int) -> int:
    """Return how many of so many positions of a window are kept."""
    return min(positions, max(1, index(round(ratio * positions))))


@constant
def cut_all(partition: Partition, device: torch.device) -> Cut:
    """Return where all rows are in their windows."""
    return Cut(partition.places(device), partition.regions(device))


def first_in_each(order: Tensor, partition: Partition, ratio: float) -> tuple[Tensor, Windows]:
    """Return the first max(1, round(r · m)) of the m positions of every window, by the order ``[samples, n]``.

    Positions ``[samples, kept]`` come window after window. In a window with padding, m is less than its area: padding
    fills the count up to that of the other windows, and is not among the positions.
    """
    samples, n, area = *order.shape, partition.area
    k = share(ratio, area)
    everything = cut_all(partition, order.device)
    places, regions = everything.places, everything.regions
    assert places is not None
    rank = order.argsort(dim=1)
    if partition.padded:
        rank = torch.cat([rank, order.new_full((samples, places.numel() - n), n)], 1)  # padding is last
    rank = rank.index_select(1, places.flatten()).view(samples, -1, area)
    slots = rank.argsort(dim=2, stable=True)
    slots = (filled_up(slots, places < n, ratio, k) if partition.padded else slots[:, :, :k]).contiguous()
    kept = places.expand(samples, -1, -1).gather(2, slots).flatten(1)
    slot_of_row = places.flatten().argsort()[:n]
    total, filled = partition.total(ratio), None
    number = torch.arange(kept.shape[1], device=order.device)
    if total < kept.shape[1]:
        filled = (kept[0] >= n).to(torch.int8).argsort(stable=True)[:total]
        kept = kept.index_select(1, filled)
        number = torch.full_like(number, total).index_copy(0, filled, number[:total])
    cut = Cut(places, regions, slots, number.view(-1, k))
    return kept, Windows(partition.grid, partition.window, slot_of_row, slots, filled, regions, cut)


def filled_up(slots: Tensor, real: Tensor, ratio: float, k: int) -> Tensor:
    """Return k slots of every window: its share of the real ones, then padding, which is last in the given slots."""
    found = real.sum(1, keepdim=True)
    kept = (ratio * found.double()).round().clamp(min=1).long().minimum(found)
    number = torch.arange(k, device=slots.device)
    number = torch.where(number < kept, number, number - kept + found)
    return slots.gather(2, number.expand(slots.shape[0], -1, -1))
