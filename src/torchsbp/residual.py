"""The sites of residual blocks that are run again on kept rows by their own forward.

While a block runs, its binding holds the ``Run``; its mixers and the parts that draw random numbers, which are sites
too, look there. Outside of a run they are the modules they were.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten
from torch.utils.checkpoint import checkpoint

from .adapters.mixers import answer_of
from .adapters.residual import Mixer, Residual, is_drop_path
from .ops import rows as R
from .ops.layers import autocast_dtype
from .ops.rerun import casts_anew, graft, inner, rerun
from .sites import Binding, SampledSite, Site

Draws = dict[str, list[Tensor]]


@dataclass
class Run:
    """One run of a block's own forward: the first, on all rows, or ``again``, on kept ones (None: all).

    ``x`` is the block's input, all rows. ``draws`` has the random factors by the name of the part that drew them.
    """

    x: Tensor
    draws: Draws
    again: bool = False
    rows: R.Rows = None
    shared: bool = True

    @property
    def positions(self) -> Tensor:
        """Kept positions, ``[B, k]``, or ``[1, k]`` where samples share them."""
        assert self.rows is not None
        positions = self.rows.view(self.x.shape[0], -1) % self.x.shape[1]
        return positions[:1] if self.shared else positions


@dataclass
class ResidualBinding(Binding):
    run: Run | None = None

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
        everything = mixer.input_of(self.sbp.block, R.apart(run.x))
        answer = answer_of(self, kwargs)
        if answer is not None:
            return answer(self, x, everything, run.positions, *args, **kwargs)
        y = super().forward(everything, *(everything if arg is x else arg for arg in args), **kwargs)
        index = run.positions.unsqueeze(2 if mixer.dim == 1 else 1)
        if isinstance(y, tuple):
            return y[0].take_along_dim(index, mixer.dim), *y[1:]
        return y.take_along_dim(index, mixer.dim)


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


class ResidualSite(SampledSite):
    """A block whose value is that of its own forward and whose gradient comes from its own forward on kept rows."""

    takes_arguments = True

    def run(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        b: ResidualBinding = self.sbp
        batch, n = x.shape[0], x.shape[1:-1].numel()
        rows = b.kept(batch, n).rows
        how = b.how(rows, batch, n)
        if rows is None and not how.recompute:
            return self.own(x, None, *args, **kwargs)
        if rows is None and torch.compiler.is_compiling():
            return checkpoint(self.own, x, None, *args, use_reentrant=False, **kwargs)
        draws: Draws = {}
        with torch.no_grad(), casts_anew(x, autocast_dtype(x)), b.running(Run(x, draws)):
            y = self.own(x, None, *args, **kwargs)
        shared = not b.masks.config.per_sample
        if how.recompute and not torch.compiler.is_compiling():
            again, tensors = Again.of(self, shared, draws, args, kwargs)
            return rerun(again, y, x, rows, tensors, how)
        x_inner = inner(x, how)
        with b.running(Run(x_inner, draws, True, rows, shared)):
            if how.recompute and self.repeatable(draws):
                kept = checkpoint(
                    self.own, x_inner, rows, *args, use_reentrant=False, preserve_rng_state=False, **kwargs
                )
            else:
                kept = self.own(x_inner, rows, *args, **kwargs)
        return graft(y, kept, x, rows, how)

    def repeatable(self, draws: Draws) -> bool:
        """A part that draws twice counts its calls, which a checkpointed region of a compiled graph must not."""
        return all(len(drawn) == 1 for drawn in draws.values())

    def own(self, x: Tensor, rows: R.Rows, *args: Any, **kwargs: Any) -> Tensor:
        """The block's own forward, ``[B, k, C]`` for kept rows."""
        parts: Residual = self.sbp.parts
        forward = super(Site, self).forward
        if rows is None:
            return forward(x, *args, **kwargs)
        if parts.mixers:
            return forward(by_sample(R.take(x, rows), x), *args, **kwargs)
        return by_sample(R.take(forward(R.apart(x), *args, **kwargs), rows), x)


def by_sample(rows: Tensor, x: Tensor) -> Tensor:
    return rows.view(x.shape[0], -1, x.shape[-1])


@dataclass(frozen=True)
class Again:
    """The second run of a block as a function of its input, the kept rows, and its draws, arguments and parameters."""

    block: ResidualSite
    shared: bool
    draws: tuple[str, ...]
    arguments: tuple[Any, ...]
    spec: TreeSpec
    parameters: tuple[str, ...]

    @classmethod
    def of(
        cls, block: ResidualSite, shared: bool, draws: Draws, args: Any, kwargs: Any
    ) -> tuple["Again", list[Tensor]]:
        """The function, and the tensors to call it with."""
        leaves, spec = tree_flatten((args, kwargs))
        parameters = dict(block.named_parameters(remove_duplicate=False))
        drawn = [(name, factor) for name, factors in draws.items() for factor in factors]
        arguments = tuple(None if isinstance(leaf, Tensor) else (leaf,) for leaf in leaves)
        again = cls(block, shared, tuple(name for name, _ in drawn), arguments, spec, tuple(parameters))
        given = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        return again, [*(factor for _, factor in drawn), *given, *parameters.values()]

    def __call__(self, x: Tensor, rows: R.Rows, *tensors: Tensor) -> Tensor:
        left = iter(tensors)
        draws: Draws = {}
        for name in self.draws:
            draws.setdefault(name, []).append(next(left))
        leaves = [next(left) if constant is None else constant[0] for constant in self.arguments]
        args, kwargs = tree_unflatten(leaves, self.spec)
        run = Run(x, draws, True, rows, self.shared)
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
