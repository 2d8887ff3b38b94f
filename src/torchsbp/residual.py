"""The sites of blocks that are run again on kept rows by their own modules.

While a block runs, its binding holds the ``Run``; its mixers and the parts that draw random numbers, which are sites
too, look there. Outside of a run they are the modules they were.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten
from torch.utils.checkpoint import checkpoint

from .adapters.mixers import answer_of
from .adapters.residual import Mixer, Residual, is_drop_path
from .ops import rows as R
from .ops.layers import BackwardOptions, autocast_dtype
from .ops.rerun import casts_anew, graft, inner, rerun
from .sites import Binding, SampledSite, Site

Draws = dict[str, list[Tensor]]


class Positions(NamedTuple):
    """The positions of a block's output: their number, where they begin in it (``dim``, as in ``rows.channels_last``),
    and whether samples share those that are kept."""

    n: int
    dim: int
    shared: bool


@dataclass
class Run:
    """One run of a block's own forward: the first, on all rows, or ``again``, on kept ones (None: all).

    ``x`` is the block's input, all rows. ``draws`` has what the first run leaves for the second, by the name of the
    part: random factors, statistics of all rows. ``shortcut`` is what the residual path has made of x before.
    """

    x: Tensor
    where: Positions
    draws: Draws = field(default_factory=dict)
    again: bool = False
    rows: R.Rows = None
    shortcut: Tensor | None = None

    @property
    def positions(self) -> Tensor:
        """Kept positions, ``[B, k]``, or ``[1, k]`` where samples share them."""
        assert self.rows is not None
        rows = self.rows.view(self.x.shape[0], -1)
        return (rows[:1] if self.where.shared else rows) % self.where.n


@dataclass
class ResidualBinding(Binding):
    run: Run | None = None

    def positions(self, n: int, dim: int) -> Positions:
        return Positions(n, dim, shared=not self.masks.config.per_sample)

    @contextmanager
    def running(self, run: Run) -> Iterator[None]:
        self.run = run
        try:
            yield
        finally:
            self.run = None


@dataclass
class Inside:
    """What a site inside a block knows: the block, and what it is there (a mixer; the name of what draws)."""

    block: nn.Module
    part: Any

    @property
    def run(self) -> Run | None:
        binding: ResidualBinding = self.block.sbp  # type: ignore[assignment]
        return binding.run


class MixerSite(Site):
    """A part in which rows meet: in a run on kept rows, it answers for these with keys and values from all rows."""

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        run = self.sbp.run
        if run is None or run.rows is None:
            return super().forward(x, *args, **kwargs)
        mixer: Mixer = self.sbp.part
        everything = x if mixer.whole else mixer.input_of(self.sbp.block, R.new_value(run.x))
        answer = answer_of(self, kwargs)
        if answer is not None:
            kept = R.take_map(x, run.rows, mixer.dim) if mixer.whole else x
            return answer(self, kept, everything, run.positions, *args, **kwargs)
        y = super().forward(everything, *(everything if arg is x else arg for arg in args), **kwargs)
        if isinstance(y, tuple):
            return R.take_map(y[0], run.rows, mixer.dim), *y[1:]
        return R.take_map(y, run.rows, mixer.dim)


class SourceSite(Site):
    """The module from which a mixer is given all rows, also in a run on kept ones."""

    def forward(self, x: Tensor) -> Tensor:
        run = self.sbp.run
        return super().forward(x if run is None or run.rows is None else R.new_value(run.x))


class ShortcutSite(Site):
    """The module on the residual path, which has run before the block: all of its rows, or the kept ones."""

    def forward(self, x: Tensor) -> Any:
        run = self.sbp.run
        if run is None or self.sbp.part not in run.draws:
            return super().forward(x)
        return run.draws[self.sbp.part][0] if run.again else run.shortcut


class DrawSite(Site):
    """Stochastic depth, or dropout that sees no rows: its factor is drawn in the first run and used in both."""

    def forward(self, x: Tensor) -> Tensor:
        run = self.sbp.run
        if run is None:
            return super().forward(x)
        name: str = self.sbp.part
        if run.again:
            left = run.draws[name]
            return x * (left[0] if len(left) == 1 else left.pop(0))
        shape = (x.shape[0], *[1] * (x.dim() - 1)) if is_drop_path(self) else x.shape
        factor = super().forward(torch.ones(shape, dtype=x.dtype, device=x.device))
        run.draws.setdefault(name, []).append(factor)
        return x * factor


class RerunSite(SampledSite):
    """A module whose value is that of its own parts on all rows and whose gradient comes from a run on kept rows."""

    binding = ResidualBinding

    def twice(
        self,
        first: Run,
        seen: Tensor,
        residual: Tensor | None,
        rows: R.Rows,
        options: BackwardOptions,
        *args: Any,
        **kwargs: Any,
    ) -> Tensor:
        """The first run, with the gradient of a second one on kept rows: ``seen`` is what that needs of the input, and
        ``residual``, on the residual path, has its gradient from dropped rows."""
        b: ResidualBinding = self.sbp
        x, dim, draws = first.x, first.where.dim, first.draws
        if rows is None and not options.recompute:
            return self.own(x, None, *args, **kwargs)
        if rows is None and torch.compiler.is_compiling():
            return checkpoint(self.own, x, None, *args, use_reentrant=False, **kwargs)
        with torch.no_grad(), casts_anew(x, autocast_dtype(x)), b.running(first):
            y = self.own(x, None, *args, **kwargs)
        if options.recompute and not torch.compiler.is_compiling():
            again, tensors = Again.of(self, first.where, draws, args, kwargs)
            return rerun(again, y, seen, residual, rows, tensors, options, dim)
        seen = inner(seen, options)
        with b.running(Run(seen, first.where, draws, True, rows)):
            if options.recompute and self.repeatable(draws):
                kept = checkpoint(self.own, seen, rows, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)
            else:
                kept = self.own(seen, rows, *args, **kwargs)
        return graft(y, kept, residual, rows, options, dim)

    def repeatable(self, draws: Draws) -> bool:
        """A part that draws twice counts its calls, which a checkpointed region of a compiled graph must not."""
        return all(len(drawn) == 1 for drawn in draws.values())

    def own(self, x: Tensor, rows: R.Rows, *args: Any, **kwargs: Any) -> Tensor:
        """What the module's own parts give: in its own layout for all rows, ``[B, k, C]`` for kept ones."""
        raise NotImplementedError


class ResidualSite(RerunSite):
    """A block whose own forward is run twice."""

    takes_arguments = True

    def run(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        b: ResidualBinding = self.sbp
        parts: Residual = b.parts
        shortcut = None if b.site is None else parts.path(self)
        residual = x if shortcut is None else shortcut(x)
        batch, n = x.shape[0], R.count(residual, parts.dim)
        rows = b.kept(batch, n).rows
        options = b.options(rows, batch, n)
        first = Run(x, b.positions(n, parts.dim))
        if shortcut is not None:
            kept = residual if rows is None else R.take_map(residual, rows, parts.dim)
            first.shortcut, first.draws[parts.shortcut] = residual, [inner(kept, options)]
        return self.twice(first, x, residual, rows, options, *args, **kwargs)

    def own(self, x: Tensor, rows: R.Rows, *args: Any, **kwargs: Any) -> Tensor:
        parts: Residual = self.sbp.parts
        forward = super(Site, self).forward
        if rows is None:
            return forward(x, *args, **kwargs)
        if not parts.mixers:
            return tokens(R.take_map(forward(R.new_value(x), *args, **kwargs), rows, parts.dim), parts.dim)
        given = x if parts.shortcut in self.sbp.run.draws else R.take_map(x, rows, parts.dim)
        return tokens(forward(given, *args, **kwargs), parts.dim)


def tokens(column: Tensor, dim: int) -> Tensor:
    """Kept rows as ``[B, k, C]``, from a map of one column or as they are."""
    return R.channels_last(column, dim).flatten(1, -2)


@dataclass(frozen=True)
class Again:
    """The second run of a block as a function of its input, the kept rows, and its draws, arguments and parameters."""

    block: RerunSite
    where: Positions
    draws: tuple[str, ...]
    arguments: tuple[Any, ...]
    spec: TreeSpec
    parameters: tuple[str, ...]

    @classmethod
    def of(
        cls, block: RerunSite, where: Positions, draws: Draws, args: Any, kwargs: Any
    ) -> tuple["Again", list[Tensor]]:
        """The function, and the tensors to call it with."""
        leaves, spec = tree_flatten((args, kwargs))
        parameters = dict(block.named_parameters(remove_duplicate=False))
        drawn = [(name, factor) for name, factors in draws.items() for factor in factors]
        arguments = tuple(None if isinstance(leaf, Tensor) else (leaf,) for leaf in leaves)
        again = cls(block, where, tuple(name for name, _ in drawn), arguments, spec, tuple(parameters))
        given = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        return again, [*(factor for _, factor in drawn), *given, *parameters.values()]

    def __call__(self, x: Tensor, rows: R.Rows, *tensors: Tensor) -> Tensor:
        left = iter(tensors)
        draws: Draws = {}
        for name in self.draws:
            draws.setdefault(name, []).append(next(left))
        leaves = [next(left) if constant is None else constant[0] for constant in self.arguments]
        args, kwargs = tree_unflatten(leaves, self.spec)
        run = Run(x, self.where, draws, True, rows)
        with self.block.sbp.running(run), replaced(self.block, self.parameters, tuple(left)):
            return self.block.own(x, rows, *args, **kwargs)


@contextmanager
def replaced(module: nn.Module, names: Sequence[str], tensors: Sequence[Tensor]) -> Iterator[None]:
    """The module with other tensors in the place of its parameters."""
    paths = [name.rpartition(".") for name in names]
    homes = [(module.get_submodule(path)._parameters, name) for path, _, name in paths]
    before = [home[name] for home, name in homes]
    try:
        for (home, name), tensor in zip(homes, tensors, strict=True):
            home[name] = tensor  # type: ignore[assignment]
        yield
    finally:
        for (home, name), parameter in zip(homes, before, strict=True):
            home[name] = parameter
