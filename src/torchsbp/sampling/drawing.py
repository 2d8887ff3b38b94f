"""What a training forward keeps: a function of its step, its batch and its images' sizes, all else is a plan."""

import math
from dataclasses import dataclass
from operator import index
from typing import NamedTuple

import torch
from torch import Tensor

from ..ops import chosen
from ..ops.chosen import first_rows
from ..ops.constants import range_of
from ..ops.device import device_of
from ..ops.windows import Windows
from . import area, keys, samplers, windows
from .area import Images
from .windows import Grid, Partition


class Kept(NamedTuple):
    """What a site keeps: rows, their inverse (where a device wants it), heads, and where the rows are in the windows of
    its attention. None: all; no windows. Where rows are chosen in backward, the ``marks [B, k]`` of ``ops/chosen.py``
    instead of them."""

    rows: Tensor | None = None
    inverse: Tensor | None = None
    heads: Tensor | None = None
    windows: Windows | None = None
    marks: Tensor | None = None


class Order(NamedTuple):
    """Orders of the positions of a grid, one per mask, as they were drawn for these ratios with that key."""

    order: Tensor
    grid: Grid
    ratios: tuple[float, ...]
    key: Tensor


class Given(NamedTuple):
    """What a forward brings: its batch, the step counter, and where its images end (None: nowhere before the batch
    does)."""

    batch: int
    step: Tensor
    images: Images | None = None


class Sampled(NamedTuple):
    """A sampled module: its stage, its number of heads (0 where heads are not sampled), its keep-ratio, and the windows
    that its grid is cut into (None: there are none)."""

    stage: int
    heads: int
    ratio: float
    partition: Partition | None


@dataclass(frozen=True)
class Plan:
    """What is known before a forward: how its masks are drawn, the grid of every stage, and who keeps what share."""

    sampler: str | samplers.Sampler
    seed: int
    per_sample: bool | str
    per_block: bool
    prefix: int
    grids: tuple[Grid, ...]
    sites: tuple[Sampled, ...]

    def draw(self, given: Given) -> tuple[Kept, ...]:
        """What every site keeps, from (seed, step, rank)."""
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
        """The numbers of the sites whose rows are drawn together: stage, ratio and windows decide about them. Those of
        windows, and of padded images, have masks of their own one by one."""
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
        if given.images is not None:  # what takes the place of padding differs from step to step
            order = samplers.shuffle(order, counts, key)
        return Order(order, grid, ratios, key)

    def _rows(
        self, given: Given, drawn: Order, stage: int, ratio: float, partition: Partition | None, sites: int = 1
    ) -> list[Kept]:
        """What so many sites keep, by orders that come site after site."""
        if ratio == 1:
            return [Kept()] * sites
        order, coarse, ratios, key = drawn
        fine, cut = self.grids[stage], None
        order = samplers.enlarge(order, coarse, fine)
        counts = {r: samplers.enlarged_count(samplers.count(self.sampler, coarse, r), coarse, fine) for r in ratios}
        if partition is not None:  # windows keep a few positions more or less than the order says: not always the same
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
        first = first_rows(given.batch, n, order.device)
        each = [(first + its).flatten() for its in positions.chunk(sites)]
        return [Kept(rows, device_of(rows).inverse(rows, given.batch * n), None, cut) for rows in each]

    def _marks(self, given: Given, stage: int, ratio: float, own_keys: Tensor) -> list[Kept]:
        """The same where rows are chosen in backward."""
        sites, grid = index(own_keys.shape[0] // given.batch), self.grids[stage]
        if ratio == 1:
            return [Kept()] * sites
        k = samplers.count(self.sampler, grid, ratio)
        starts = (own_keys.double() + 0.5) / 2**32
        return [Kept(marks=chosen.marks(start, k)) for start in starts.chunk(sites)]

    def _heads(self, heads: int, ratio: float, key: Tensor) -> Tensor | None:
        """Kept heads of a site: a random subset, at least one, the same for the batch."""
        if not heads or ratio == 1:
            return None
        order = samplers.SAMPLERS["random"]((heads,), (ratio,), key[:1])
        return samplers.first(order, max(1, round(ratio * heads)))[0]


def rank() -> int:
    distributed = torch.distributed
    return distributed.get_rank() if distributed.is_available() and distributed.is_initialized() else 0
