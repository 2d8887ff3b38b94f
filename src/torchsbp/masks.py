"""The kept rows of one backbone in the current training forward: drawn once, read by every sampled module."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from . import partitions, samplers
from .config import SBPConfig
from .ops.device import device_of
from .ops.windows import Windows
from .partitions import Partition

Grid = tuple[int, ...]
Site = tuple[int, float, Partition | None]
"""What decides which rows are kept: stage, ratio, windows."""


@dataclass(frozen=True)
class Shrink:
    """How a convolution or a pool changes the grid: its kernel, stride and padding."""

    kernel: Grid
    stride: Grid
    padding: Grid

    def __call__(self, grid: Grid) -> Grid:
        sizes = zip(grid, self.kernel, self.stride, self.padding, strict=True)
        return tuple((n + 2 * p - k) // s + 1 for n, k, s, p in sizes)


class Kept(NamedTuple):
    """Of one site: kept rows, their inverse (on a GPU), kept heads; None: all."""

    rows: Tensor | None = None
    inverse: Tensor | None = None
    heads: Tensor | None = None


class Masks:
    """One mask per training forward for all layers of a backbone, drawn on the coarsest grid that is sampled.

    ``shrinks`` has what every stage does to the grid at first. Sites are the sampled modules, in order: their names,
    stages, numbers of heads (0 where heads are not sampled), how they cut their grids into windows (None: not at all),
    and their ratios, None while a schedule has not been told the step. The step counter is a buffer of the entry
    module, so that it follows the model to its device.
    """

    def __init__(
        self,
        config: SBPConfig,
        prefix: int,
        shrinks: tuple[tuple[Callable[[Grid], Grid], ...], ...],
        names: tuple[str, ...],
        stages: tuple[int, ...],
        heads: tuple[int, ...],
        cuts: tuple[Callable[[Grid], Partition] | None, ...],
    ) -> None:
        self.config, self.prefix, self.shrinks = config, prefix, shrinks
        self.names, self.stages, self.heads, self.cuts = names, stages, heads, cuts
        self.ratios: tuple[float, ...] | None = None
        self.batch = 0
        self.grids: tuple[Grid, ...] | None = None
        self.pending: tuple[int, tuple[Grid, ...], Tensor] | None = None  # a forward whose masks are not drawn yet
        self.rows: tuple[Tensor | None, ...] | None = None
        self.inverse: tuple[Tensor | None, ...] | None = None
        self.kept_heads: tuple[Tensor | None, ...] | None = None
        self.windows: tuple[Windows | None, ...] | None = None

    def begin(self, batch: int, grid: Grid, step: Tensor) -> None:
        """A new forward has begun with this first grid. Masks are drawn now, or under no_grad when first needed."""
        grids = []
        for shrinks in self.shrinks:
            for shrink in shrinks:
                grid = shrink(grid)
            grids.append(grid)
        self.pending = (batch, tuple(grids), step)
        if torch.is_grad_enabled():
            self.draw()

    def draw(self) -> None:
        """Sample the kept rows of every site from (seed, step, rank), and count the step."""
        if self.pending is None:
            raise RuntimeError(
                "a sampled block ran before the model's patch embedding or stem: SBP learns the image size there. "
                "Call the model (or its forward_features), not its blocks alone."
            )
        if self.ratios is None:
            raise RuntimeError(
                "keep_ratio is a schedule over training: call torchsbp.set_step(model, step) before each step"
            )
        config = self.config
        self.batch, self.grids, step = self.pending
        self.rows = None  # an error below leaves no rows of another grid behind
        samples = self.batch if config.per_sample else 1
        key = samplers.draw_key(config.seed, step, _rank(), samples)
        coarse = self.grids[max(self.stages)]
        order = samplers.resolve(config.sampler)(coarse, self.ratios, key)
        if tuple(order.shape) != (samples, math.prod(coarse)) or order.dtype != torch.int64:
            raise ValueError(
                f"the sampler must give an int64 order of shape {(samples, math.prod(coarse))}, all positions of the "
                f"grid {coarse} for each sample; it gave {order.dtype} of shape {tuple(order.shape)}"
            )
        placed = zip(self.stages, self.cuts, strict=True)
        cuts = [None if cut is None else cut(self.grids[stage]) for stage, cut in placed]
        sites = tuple(zip(self.stages, self.ratios, cuts, strict=True))
        drawn: dict[Site, tuple[Tensor | None, Windows | None]] = {}
        for site in sites:
            if site not in drawn:
                drawn[site] = self._rows(order, key, coarse, *site)
        self.rows = tuple(drawn[site][0] for site in sites)
        self.windows = tuple(drawn[site][1] for site in sites)
        inverse = {site: self._inverse(rows, site[0]) for site, (rows, _) in drawn.items()}
        self.inverse = tuple(inverse[site] for site in sites)
        self.kept_heads = tuple(
            self._heads(heads, ratio, key) for heads, ratio in zip(self.heads, self.ratios, strict=True)
        )
        step.add_(1)
        self.pending = None

    def _rows(
        self, order: Tensor, key: Tensor, coarse: Grid, stage: int, ratio: float, partition: Partition | None
    ) -> tuple[Tensor | None, Windows | None]:
        assert self.grids is not None
        assert self.ratios is not None
        if ratio == 1:
            return None, None
        fine = self.grids[stage]
        order, windows = samplers.enlarge(order, coarse, fine), None
        sampler = self.config.sampler
        counts = {r: samplers.enlarged_count(samplers.count(sampler, coarse, r), coarse, fine) for r in self.ratios}
        if partition is None:
            positions = samplers.keep(order, counts[ratio])
        else:  # windows have a few positions more or less to keep than the order says: these differ from step to step
            order = samplers.shuffle(order, tuple(counts.values()), key)
            positions, windows = partitions.keep(order, partition, ratio)
        positions = self.prefix + positions
        if self.prefix:
            always = torch.arange(self.prefix, device=order.device).expand(positions.shape[0], -1)
            positions = torch.cat([always, positions], 1)
        first = torch.arange(self.batch, device=order.device) * self.positions(stage)
        return (first[:, None] + positions).flatten(), windows

    def _inverse(self, rows: Tensor | None, stage: int) -> Tensor | None:
        """The inverse of the rows, which the kernels of a GPU read: made once for all sites."""
        return None if rows is None else device_of(rows).inverse(rows, self.batch * self.positions(stage))

    def _heads(self, heads: int, ratio: float, key: Tensor) -> Tensor | None:
        """Kept heads of a site under rule "head": a random subset, at least one, the same for the batch."""
        if not heads or ratio == 1:
            return None
        order = samplers.SAMPLERS["random"]((heads,), (ratio,), key[:1])
        return samplers.keep(order, max(1, round(ratio * heads)))[0]

    def positions(self, stage: int) -> int:
        """Rows per sample."""
        assert self.grids is not None
        return self.prefix + math.prod(self.grids[stage])

    def rows_of(self, site: int, batch: int, positions: int) -> "Kept":
        """What a site keeps whose input has that many samples and rows per sample."""
        self._drawn()
        assert self.rows is not None
        assert self.inverse is not None
        assert self.kept_heads is not None
        assert self.grids is not None
        expected = self.positions(self.stages[site])
        if batch != self.batch or positions != expected:
            raise ValueError(
                f"{self.names[site]} was given {batch} samples of {positions} positions, but the image gives "
                f"{self.batch} samples of {expected} ({self.prefix} prefix tokens and a grid "
                f"{self.grids[self.stages[site]]}). Tokens that were dropped, merged or added between the patch "
                "embedding and the blocks (by patch_drop_rate or bool_masked_pos, for example) can't be mapped to the "
                "grid: switch that off."
            )
        return Kept(self.rows[site], self.inverse[site], self.kept_heads[site])

    def windows_of(self, site: int) -> Windows | None:
        """Where the rows of a site are in the windows of its attention; None if it has none or keeps everything."""
        self._drawn()
        assert self.windows is not None
        return self.windows[site]

    def _drawn(self) -> None:
        if self.rows is None or self.pending is not None:
            self.draw()


def _rank() -> int:
    distributed = torch.distributed
    return distributed.get_rank() if distributed.is_available() and distributed.is_initialized() else 0
