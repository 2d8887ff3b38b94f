"""The kept rows of one backbone in the current training forward: drawn once, read by every sampled module."""

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from operator import index
from typing import NamedTuple

import torch
from torch import Tensor

from ..errors import UsageError, UsageTimeError
from . import operators, samplers
from .area import Images
from .captures import Captures
from .drawing import Given, Kept, Plan, Sampled
from .windows import Grid, Partition


@dataclass(frozen=True)
class SiteSpec:
    """A sampled module: its name, its stage, its number of heads (0 if heads are not sampled), and how it cuts its grid
    into windows (None: not at all)."""

    name: str
    stage: int
    heads: int = 0
    cut: Callable[[Grid], Partition] | None = None


class Forward(NamedTuple):
    """A training forward: its batch size, the grid of every stage, the keep-ratio of every site, the step counter, and
    the sizes of its images (None: without padding)."""

    batch: int
    grids: tuple[Grid, ...]
    ratios: tuple[float, ...] | None
    step: Tensor
    images: Images | None = None


class Call(NamedTuple):
    """A training forward whose backward may still come, and how many nodes autograd had made when its blocks began."""

    nodes: int
    forward: Forward


class Drawn(NamedTuple):
    """What a training forward keeps, site by site, with its batch size and the grid of every stage."""

    batch: int
    grids: tuple[Grid, ...]
    sites: tuple[Kept, ...]


class Masks:
    """The masks of a backbone: one per training forward for all sites, drawn on the coarsest grid that is sampled, or,
    with ``per_block``, one for each site, on its own grid.

    ``shrinks`` says how the grid shrinks on the way into every stage; ``ratios`` has the keep-ratio of every site, None
    while a schedule has not been told the step. The step counter is a buffer of the entry module, so that it follows
    the model to its device. With ``capture`` masks may be drawn by CUDA graphs.
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
        capture: bool = True,
    ) -> None:
        self.sampler, self.seed, self.per_sample, self.per_block = sampler, seed, per_sample, per_block
        self.prefix, self.shrinks, self.sites, self.capture = prefix, shrinks, sites, capture
        self.ratios: tuple[float, ...] | None = None
        self.images: Images | None = None  # of the next forward
        self.pending: Forward | None = None  # a forward whose masks are not drawn yet
        self.drawn: Drawn | None = None  # what the last forward keeps
        self.captures = Captures()
        self.calls: deque[Call] = deque(maxlen=256)  # several before one backward: Siamese use, many crops

    def begin(self, batch: int, grid: Grid, step: Tensor) -> None:
        """Begin a forward with this first grid. Masks are drawn now, or under no_grad when they are first needed."""
        images, self.images = self.images, None
        if images is not None and len(images.sizes) != batch:
            raise UsageError(f"set_sizes was told of {len(images.sizes)} images, the model was given {batch}")
        grid = tuple([index(size) for size in grid])  # constants under `torch.compile`, and so all that follows
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
        else:  # drawn later, perhaps in a backward: node numbers do not tell which forward it was
            self.calls.clear()

    def draw(self) -> None:
        """Draw what every site keeps from (seed, step, rank), and count the step."""
        if self.pending is None:
            raise UsageTimeError(
                "a sampled block ran before the model's patch embedding or stem: SBP learns the image size there. "
                "Call the model (or its forward_features), not its blocks alone."
            )
        if self.pending.ratios is None:
            raise UsageTimeError(
                "keep_ratio is a schedule over training: call torchsbp.set_step(model, step) before each step"
            )
        self.drawn = None  # so that an error below leaves no rows of another grid behind
        self.drawn = self._replayed(self.pending)
        self.pending.step.add_(1)
        self.pending = None

    def _replayed(self, forward: Forward) -> Drawn:
        """Draw masks: if ``capture`` and the sampler allow it, by a graph, or by an operator in a compiled step."""
        if not self.capture or callable(self.sampler) or keeps_all(forward):
            return self._draw(forward)
        batch, grids, ratios, step, images = forward
        if torch.compiler.is_compiling():
            return Drawn(batch, grids, operators.drawn(self.plan(forward), Given(batch, step, images)))
        depends = batch, grids, ratios, None if images is None else images.padded

        def draw(sizes: Tensor | None) -> Drawn:
            its = None if images is None or sizes is None else images._replace(sizes=sizes)
            return self._draw(forward._replace(images=its))

        return self.captures.drawn(draw, None if images is None else images.sizes, step, depends)

    def _draw(self, forward: Forward) -> Drawn:
        if keeps_all(forward):
            sites = (Kept(),) * len(self.sites)
        else:
            sites = self.plan(forward).draw(Given(forward.batch, forward.step, forward.images))
        return Drawn(forward.batch, forward.grids, sites)

    def plan(self, forward: Forward) -> Plan:
        """Return how masks are drawn for these grids and ratios."""
        assert forward.ratios is not None
        sites = []
        for site, ratio in zip(self.sites, forward.ratios, strict=True):
            partition = None if site.cut is None else site.cut(forward.grids[site.stage])
            sites.append(Sampled(site.stage, site.heads, ratio, partition))
        return Plan(self.sampler, self.seed, self.per_sample, self.per_block, self.prefix, forward.grids, tuple(sites))

    def positions(self, grid: Grid) -> int:
        """Rows per sample."""
        return self.prefix + math.prod(grid)

    def kept(self, site: int, batch: int, positions: int) -> Kept:
        """Return what a site keeps; raise UsageError if its input does not have the expected samples and positions."""
        drawn = self.of_this_call()
        name, grid = self.sites[site].name, drawn.grids[self.sites[site].stage]
        expected = self.positions(grid)
        rows, *_, marks = drawn.sites[site]
        if (rows is not None or marks is not None) and (batch != drawn.batch or positions != expected):
            raise UsageError(
                f"{name} was given {batch} samples of {positions} positions, but the image gives "
                f"{drawn.batch} samples of {expected} ({self.prefix} prefix tokens and a grid {grid}). "
                "Tokens that were dropped, merged or added between the patch embedding and the blocks (by "
                "patch_drop_rate or bool_masked_pos, for example) can't be mapped to the grid: switch that off, "
                "or apply with keep_ratio=1, which samples nothing."
            )
        return drawn.sites[site]

    def of_this_call(self) -> Drawn:
        """Return what the last forward keeps, or, if backward repeats a block of an earlier forward, what that keeps.

        Autograd numbers its nodes: the number of the node that runs now tells which forward made it.
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
        """Return the positions that a site kept in that forward, ``[B, k]``, ascending; prefix tokens come first."""
        batch, grids, sites = drawn
        if sites[site].marks is not None:
            raise UsageError(
                f'{self.sites[site].name}: sampler="{self.sampler}" chooses positions in backward, in every block for '
                "itself, and does not hold them. Use another sampler to look at masks"
            )
        rows, n = sites[site].rows, self.positions(grids[self.sites[site].stage])
        if rows is None:
            return torch.arange(n, device=device).repeat(batch, 1)
        return (rows.view(batch, -1) % n).sort(dim=1).values  # rows of windows come window after window


def keeps_all(forward: Forward) -> bool:
    return all(ratio == 1 for ratio in forward.ratios or ())
