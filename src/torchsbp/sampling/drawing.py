"""What a training forward keeps: a function of its step, its batch, the sizes of its images, and a plan."""

import math
from dataclasses import dataclass
from operator import index
from typing import NamedTuple

import torch
from torch import Tensor

from ..ops import chosen
from ..ops.constants import range_of
from ..ops.device import device_of
from ..ops.windows import Windows
from . import area, keys, samplers, windows
from .area import Images
from .windows import Grid, Partition


class Kept(NamedTuple):
    """What a site keeps: rows, their inverse (where a device wants it), heads, and where the rows are in the windows of
    its attention. None means all of them, or no windows. If rows are chosen in backward, ``marks [B, k]`` take their
    place (``ops/chosen.py``)."""

    rows: Tensor | None = None
    inverse: Tensor | None = None
    heads: Tensor | None = None
    windows: Windows | None = None
    marks: Tensor | None = None


class Order(NamedTuple):
    """Orders of the positions of a grid, one per mask, with the ratios and the key from which they were drawn."""

    order: Tensor
    grid: Grid
    ratios: tuple[float, ...]
    key: Tensor


class Given(NamedTuple):
    """What a forward brings: its batch size, the step counter, and the sizes of its images (None: without padding)."""

    batch: int
    step: Tensor
    images: Images | None = None


class Sampled(NamedTuple):
    """A sampled module: its stage, its number of heads (0 if heads are not sampled), its keep-ratio, and the windows
    that its grid is cut into (None: it has none)."""

    stage: int
    heads: int
    ratio: float
    partition: Partition | None


@dataclass(frozen=True)
class Plan:
    """What is known before a forward: how masks are drawn, the grid of every stage, and what share each site keeps."""

    sampler: str | samplers.Sampler
    seed: int
    per_sample: bool | str
    per_block: bool
    prefix: int
    grids: tuple[Grid, ...]
    sites: tuple[Sampled, ...]

    def draw(self, given: Given) -> tuple[Kept, ...]:
        """Return what every site keeps, from (seed, step, rank)."""
        ratios = tuple(site.ratio for site in self.sites)
        key = keys.draw_key(self.seed, given.step, rank(), given.batch if self.per_sample is True else 1)
        coarsest = self.grids[max(site.stage for site in self.sites)]
        drawn = None if self.per_block else self._order(given, coarsest, ratios, key)
        rows: dict[int, Kept] = {}
        for (stage, ratio, partition, _), numbers in self._alike(given).items():
            if self.sampler in samplers.IN_BACKWARD:
                found = self._marks(given, stage, ratio, keys.more_keys(key, numbers[0], len(numbers)))
            elif drawn is not None:
                found = self._rows(given, drawn, stage, ratio, partition) * len(numbers)
            else:
                own_keys = keys.more_keys(key, numbers[0], len(numbers))
                own = self._order(given, self.grids[stage], (ratio,), own_keys)
                found = self._rows(given, own, stage, ratio, partition, len(numbers))
            rows.update(zip(numbers, found, strict=True))
        sites = []
        for number, site in enumerate(self.sites):
            kept, inverse, _, cut, marks = rows[number]  # not _replace: torch 2.11 does not compile what that makes
            sites.append(Kept(kept, inverse, self._heads(site.heads, site.ratio, key), cut, marks))
        return tuple(sites)

    def _alike(self, given: Given) -> dict[tuple[int, float, Partition | None, int], list[int]]:
        """Return the numbers of sites by what their rows depend on: stage, ratio and windows. Rows of a group are drawn
        together. With a mask per block, sites with windows or padded images are each a group of their own."""
        alike: dict[tuple[int, float, Partition | None, int], list[int]] = {}
        for number, (stage, _, ratio, partition) in enumerate(self.sites):
            apart = self.per_block and (partition is not None or given.images is not None)
            alike.setdefault((stage, ratio, partition, number if apart else 0), []).append(number)
        return alike

    def _order(self, given: Given, grid: Grid, ratios: tuple[float, ...], key: Tensor) -> Order:
        order = samplers.ordered(self.sampler, grid, ratios, key)
        counts = [samplers.count(self.sampler, grid, r) for r in ratios]
        if self.per_sample == "balanced":
            order = samplers.balanced(order, counts, given.batch)
        if given.images is not None:  # so that the positions that take the place of padding vary from step to step
            order = samplers.shuffle(order, counts, key)
        return Order(order, grid, ratios, key)

    def _rows(
        self, given: Given, drawn: Order, stage: int, ratio: float, partition: Partition | None, sites: int = 1
    ) -> list[Kept]:
        """Return what each of so many sites keeps; ``drawn`` has their orders, site after site, or one for all."""
        if ratio == 1:
            return [Kept()] * sites
        order, coarse, ratios, key = drawn
        fine, cut = self.grids[stage], None
        order = samplers.enlarge(order, coarse, fine)
        counts = {r: samplers.enlarged_count(samplers.count(self.sampler, coarse, r), coarse, fine) for r in ratios}
        if partition is not None:  # windows keep a few positions more or less than the order says: these must vary
            order = samplers.shuffle(order, tuple(counts.values()), key)
        if given.images is not None:
            order = area.images_first(order, area.outside(given.images, fine))
        if partition is None:
            positions = samplers.first(order, counts[ratio])
        else:
            positions, cut = windows.first_in_each(order, partition, ratio)
        if self.prefix:
            always = range_of(self.prefix, order.device).expand(positions.shape[0], -1)
            positions = torch.cat([always, self.prefix + positions], 1)
        n = self.prefix + math.prod(fine)
        first = chosen.first_rows(given.batch, n, order.device)
        each = [(first + its).flatten() for its in positions.chunk(sites)]
        return [Kept(rows, device_of(rows).inverse(rows, given.batch * n), None, cut) for rows in each]

    def _marks(self, given: Given, stage: int, ratio: float, own_keys: Tensor) -> list[Kept]:
        """Return what sites keep if rows are chosen in backward: the marks of ``ops/chosen.py``, site after site."""
        sites, grid = index(own_keys.shape[0] // given.batch), self.grids[stage]
        if ratio == 1:
            return [Kept()] * sites
        k = samplers.count(self.sampler, grid, ratio)
        starts = (own_keys.double() + 0.5) / 2**32
        return [Kept(marks=chosen.marks(start, k)) for start in starts.chunk(sites)]

    def _heads(self, heads: int, ratio: float, key: Tensor) -> Tensor | None:
        """Return the kept heads of a site: a random subset, at least one, the same for the whole batch."""
        if not heads or ratio == 1:
            return None
        order = samplers.SAMPLERS["random"]((heads,), (ratio,), key[:1])
        return samplers.first(order, max(1, round(ratio * heads)))[0]


def rank() -> int:
    distributed = torch.distributed
    return distributed.get_rank() if distributed.is_available() and distributed.is_initialized() else 0
