"""The kept rows of one backbone in the current training forward: drawn once, read by every sampled module."""

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ..errors import UsageError, UsageTimeError
from ..ops.constants import constant, range_of
from ..ops.device import device_of
from ..ops.windows import Windows
from . import area, samplers, windows
from .area import Images
from .captures import Captures
from .windows import Grid, Partition


@dataclass(frozen=True)
class SiteSpec:
    """A sampled module: its name, its stage, its number of heads (0 where heads are not sampled), and how it cuts its
    grid into windows (None: not at all)."""

    name: str
    stage: int
    heads: int = 0
    cut: Callable[[Grid], Partition] | None = None


class Kept(NamedTuple):
    """What a site keeps: rows, their inverse (where a device wants it), heads, and where the rows are in the windows of
    its attention. None: all; no windows."""

    rows: Tensor | None = None
    inverse: Tensor | None = None
    heads: Tensor | None = None
    windows: Windows | None = None


class Forward(NamedTuple):
    """A training forward: its batch, the grid of every stage, the keep-ratio of every site, the step counter, and where
    its images end (None: nowhere before the batch does)."""

    batch: int
    grids: tuple[Grid, ...]
    ratios: tuple[float, ...] | None
    step: Tensor
    images: Images | None = None


class Call(NamedTuple):
    """A training forward whose backward may come: how many nodes autograd had made when its blocks began."""

    nodes: int
    forward: Forward


class Drawn(NamedTuple):
    """What a training forward keeps, site by site, of its batch and the grid of every stage."""

    batch: int
    grids: tuple[Grid, ...]
    sites: tuple[Kept, ...]


class Order(NamedTuple):
    """Orders of the positions of a grid, one per mask, as they were drawn for these ratios with that key."""

    order: Tensor
    grid: Grid
    ratios: tuple[float, ...]
    key: Tensor


class Masks:
    """One mask per training forward for all layers of a backbone, drawn on the coarsest grid that is sampled; or, if
    they are drawn ``per_block``, one for each of them, on its own grid.

    ``shrinks`` has what every stage does to the grid at first; ``ratios`` the keep-ratio of every site, None while a
    schedule has not been told the step. The step counter is a buffer of the entry module, so that it follows the model
    to its device.
    """

    def __init__(
        self,
        sampler: str | samplers.Sampler,
        seed: int,
        per_sample: bool | str,
        per_block: bool,
        prefix: int,
        shrinks: tuple[tuple[Callable[[Grid], Grid], ...], ...],
        sites: tuple[SiteSpec, ...],
    ) -> None:
        self.sampler, self.seed, self.per_sample, self.per_block = sampler, seed, per_sample, per_block
        self.prefix, self.shrinks, self.sites = prefix, shrinks, sites
        self.ratios: tuple[float, ...] | None = None
        self.images: Images | None = None  # of the next forward
        self.pending: Forward | None = None  # masks are not drawn yet
        self.drawn: Drawn | None = None  # in the last forward
        self.captures = Captures()
        self.calls: deque[Call] = deque(maxlen=256)  # of one model before a backward: Siamese use, many crops

    def begin(self, batch: int, grid: Grid, step: Tensor) -> None:
        """A new forward has begun with this first grid. Masks are drawn now, or under no_grad when first needed."""
        images, self.images = self.images, None
        if images is not None and len(images.sizes) != batch:
            raise UsageError(f"set_sizes was told of {len(images.sizes)} images, the model was given {batch}")
        grids = []
        for shrinks in self.shrinks:
            for shrink in shrinks:
                grid = shrink(grid)
            grids.append(grid)
        self.pending = forward = Forward(batch, tuple(grids), self.ratios, step, images)
        if torch.is_grad_enabled():
            self.draw()
        if not torch.compiler.is_compiling():
            self._remember(forward)

    def _remember(self, forward: Forward) -> None:
        if torch.is_grad_enabled():
            self.calls.append(Call(torch._C._autograd._get_sequence_nr(), forward))
        else:  # drawn later, perhaps in a backward: the nodes of these blocks do not tell
            self.calls.clear()

    def draw(self) -> None:
        """Sample what every site keeps from (seed, step, rank), and count the step."""
        if self.pending is None:
            raise UsageTimeError(
                "a sampled block ran before the model's patch embedding or stem: SBP learns the image size there. "
                "Call the model (or its forward_features), not its blocks alone."
            )
        if self.pending.ratios is None:
            raise UsageTimeError(
                "keep_ratio is a schedule over training: call torchsbp.set_step(model, step) before each step"
            )
        self.drawn = None  # an error below leaves no rows of another grid behind
        self.drawn = self._replayed(self.pending)
        self.pending.step.add_(1)
        self.pending = None

    def _replayed(self, forward: Forward) -> Drawn:
        """Drawn; by a graph where the sampler is ours."""
        if callable(self.sampler) or torch.compiler.is_compiling() or keeps_all(forward):
            return self._draw(forward)
        images = forward.images
        depends = forward.batch, forward.grids, forward.ratios, None if images is None else images.padded

        def draw(sizes: Tensor | None) -> Drawn:
            its = None if images is None or sizes is None else images._replace(sizes=sizes)
            return self._draw(forward._replace(images=its))

        return self.captures.drawn(draw, None if images is None else images.sizes, forward.step, depends)

    def _draw(self, forward: Forward) -> Drawn:
        assert forward.ratios is not None
        if keeps_all(forward):
            return Drawn(forward.batch, forward.grids, (Kept(),) * len(self.sites))
        samples = forward.batch if self.per_sample is True else 1
        key = samplers.draw_key(self.seed, forward.step, _rank(), samples)
        coarsest = forward.grids[max(site.stage for site in self.sites)]
        drawn = None if self.per_block else self._order(forward, coarsest, forward.ratios, key)
        rows: dict[int, Kept] = {}
        for (stage, ratio, partition, _), numbers in self._alike(forward).items():
            if drawn is not None:
                found = self._rows(forward, drawn, stage, ratio, partition) * len(numbers)
            else:
                keys = samplers.more_keys(key, numbers[0], len(numbers))
                own = self._order(forward, forward.grids[stage], (ratio,), keys)
                found = self._rows(forward, own, stage, ratio, partition, len(numbers))
            rows.update(zip(numbers, found, strict=True))
        sites = []
        for number, (site, ratio) in enumerate(zip(self.sites, forward.ratios, strict=True)):
            kept, inverse, _, cut = rows[number]  # not _replace: torch 2.11 does not compile what that makes
            sites.append(Kept(kept, inverse, self._heads(site.heads, ratio, key), cut))
        return Drawn(forward.batch, forward.grids, tuple(sites))

    def _alike(self, forward: Forward) -> dict[tuple[int, float, Partition | None, int], list[int]]:
        """The numbers of the sites whose rows are drawn together: stage, ratio and windows decide about them. Those of
        windows, and of padded images, have masks of their own one by one."""
        assert forward.ratios is not None
        alike: dict[tuple[int, float, Partition | None, int], list[int]] = {}
        for number, (site, ratio) in enumerate(zip(self.sites, forward.ratios, strict=True)):
            partition = None if site.cut is None else site.cut(forward.grids[site.stage])
            apart = self.per_block and (partition is not None or forward.images is not None)
            alike.setdefault((site.stage, ratio, partition, number if apart else 0), []).append(number)
        return alike

    def _order(self, forward: Forward, grid: Grid, ratios: tuple[float, ...], key: Tensor) -> Order:
        order = samplers.ordered(self.sampler, grid, ratios, key)
        counts = [samplers.count(self.sampler, grid, r) for r in ratios]
        if self.per_sample == "balanced":
            order = samplers.balanced(order, counts, forward.batch)
        if forward.images is not None:  # what takes the place of padding differs from step to step
            order = samplers.shuffle(order, counts, key)
        return Order(order, grid, ratios, key)

    def _rows(
        self, forward: Forward, drawn: Order, stage: int, ratio: float, partition: Partition | None, sites: int = 1
    ) -> list[Kept]:
        """What so many sites keep, by orders that come site after site."""
        if ratio == 1:
            return [Kept()] * sites
        order, coarse, ratios, key = drawn
        fine, cut = forward.grids[stage], None
        order = samplers.enlarge(order, coarse, fine)
        counts = {r: samplers.enlarged_count(samplers.count(self.sampler, coarse, r), coarse, fine) for r in ratios}
        if partition is not None:  # windows keep a few positions more or less than the order says: not always the same
            order = samplers.shuffle(order, tuple(counts.values()), key)
        if forward.images is not None:
            order = area.images_first(order, area.outside(forward.images, fine))
        if partition is None:
            positions = samplers.first(order, counts[ratio])
        else:
            positions, cut = windows.first_in_each(order, partition, ratio)
        if self.prefix:
            always = range_of(self.prefix, order.device).expand(positions.shape[0], -1)
            positions = torch.cat([always, self.prefix + positions], 1)
        n = self.positions(fine)
        first = _first_rows(forward.batch, n, order.device)
        each = [(first + its).flatten() for its in positions.chunk(sites)]
        return [Kept(rows, device_of(rows).inverse(rows, forward.batch * n), None, cut) for rows in each]

    def _heads(self, heads: int, ratio: float, key: Tensor) -> Tensor | None:
        """Kept heads of a site: a random subset, at least one, the same for the batch."""
        if not heads or ratio == 1:
            return None
        order = samplers.SAMPLERS["random"]((heads,), (ratio,), key[:1])
        return samplers.first(order, max(1, round(ratio * heads)))[0]

    def positions(self, grid: Grid) -> int:
        """Rows per sample."""
        return self.prefix + math.prod(grid)

    def kept(self, site: int, batch: int, positions: int) -> Kept:
        """What a site keeps whose input has that many samples and rows per sample."""
        drawn = self.of_this_call()
        name, grid = self.sites[site].name, drawn.grids[self.sites[site].stage]
        expected = self.positions(grid)
        if drawn.sites[site].rows is not None and (batch != drawn.batch or positions != expected):
            raise UsageError(
                f"{name} was given {batch} samples of {positions} positions, but the image gives "
                f"{drawn.batch} samples of {expected} ({self.prefix} prefix tokens and a grid {grid}). "
                "Tokens that were dropped, merged or added between the patch embedding and the blocks (by "
                "patch_drop_rate or bool_masked_pos, for example) can't be mapped to the grid: switch that off, "
                "or apply with keep_ratio=1, which samples nothing."
            )
        return drawn.sites[site]

    def of_this_call(self) -> Drawn:
        """What was drawn in the last forward; where backward repeats a block of an earlier one, what was drawn there.

        Autograd numbers its nodes: that of the node which runs now tells in which forward it was made.
        """
        if self.drawn is None or self.pending is not None:
            self.draw()
        assert self.drawn is not None
        node = None if torch.compiler.is_compiling() else torch._C._current_autograd_node()
        later = 0 if node is None else sum(call.nodes > node._sequence_nr() for call in self.calls)
        if later in (0, len(self.calls)):
            return self.drawn
        forward = self.calls[-1 - later].forward
        return self._draw(forward._replace(step=forward.step - later - 1))

    def positions_kept(self, drawn: Drawn, site: int, device: torch.device) -> Tensor:
        """What a site has kept in that forward, ``[B, k]``, ascending; prefix tokens come first."""
        batch, grids, sites = drawn
        rows, n = sites[site].rows, self.positions(grids[self.sites[site].stage])
        if rows is None:
            return torch.arange(n, device=device).repeat(batch, 1)
        return (rows.view(batch, -1) % n).sort(dim=1).values  # rows of windows come window after window


def keeps_all(forward: Forward) -> bool:
    return all(ratio == 1 for ratio in forward.ratios or ())


@constant
def _first_rows(samples: int, n: int, device: torch.device) -> Tensor:
    """Of samples of n rows each, ``[samples, 1]``."""
    return torch.arange(samples, device=device)[:, None] * n


def _rank() -> int:
    distributed = torch.distributed
    return distributed.get_rank() if distributed.is_available() and distributed.is_initialized() else 0
