"""Strategies of blocks that are run again on kept rows by their own modules.

A block's own forward runs twice: first on all rows, without autograd; again on the kept rows, for the gradient. While
it runs, its strategy holds a ``Replay``, in which the first run records what the second recalls. Parts of the block
that are sites too (mixers, stochastic depth, a shortcut) find it there; outside of a run they behave as if unpatched.

| rows | recompute | compiled | the block is |
|------|-----------|----------|--------------|
| all  | no        | any      | recorded by autograd, as it is |
| all  | yes       | yes      | checkpointed |
| any  | yes       | no       | replayed: the second run takes place in backward |
| kept | yes       | yes      | grafted: the second run is recorded by autograd now, checkpointed |
| kept | no        | any      | grafted: the second run is recorded by autograd now |
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten
from torch.utils.checkpoint import checkpoint

from ..adapters import rerun as A
from ..adapters.queries import kept_query_attention_of
from ..ops import rows as R
from ..ops.layers import BackwardOptions, autocast_dtype
from ..ops.once import differentiable_once
from ..ops.rerun import casts_anew, graft, inner, rerun
from .sampled import SampledBlock, Sampling, runs
from .site import Strategy, original


class Positions(NamedTuple):
    """The positions of a block's output: their number, the dimension at which they begin (``dim``, as in
    ``rows.channels_last``), and whether samples share the kept ones."""

    n: int
    dim: int
    shared: bool


@dataclass
class Replay:
    """One run of a block's own forward: the first, on all rows, or ``again``, on the kept ``rows`` (None: all).

    ``x`` is the block's input, all rows. ``records`` has what the first run leaves for the second, by the name of the
    part: random factors, statistics of all rows. ``shortcut`` is the output of the module on the residual path, which
    runs before the block.
    """

    x: Tensor
    where: Positions
    records: dict[str, list[Tensor]] = field(default_factory=dict)
    again: bool = False
    rows: R.Rows = None
    shortcut: Tensor | None = None

    def record(self, name: str, value: Tensor) -> None:
        self.records.setdefault(name, []).append(value)

    def recall(self, name: str) -> Tensor:
        """Return what the part recorded; if it recorded several times, one record after the other."""
        left = self.records[name]
        return left[0] if len(left) == 1 else left.pop(0)

    def second(self, x: Tensor, rows: R.Rows) -> "Replay":
        return Replay(x, self.where, self.records, True, rows)

    @property
    def on_kept_rows(self) -> bool:
        return self.rows is not None

    @property
    def positions(self) -> Tensor:
        """The kept positions, ``[B, k]``, or ``[1, k]`` where samples share them."""
        assert self.rows is not None
        rows = self.rows.view(self.x.shape[0], -1)
        return (rows[:1] if self.where.shared else rows) % self.where.n


class Call(NamedTuple):
    """One training forward of a replayed block: its first run, what the second one needs of the input (``seen``), the
    tensor on the residual path (which gets the gradient of dropped rows), the kept rows, and the block's other
    arguments."""

    first: Replay
    seen: Tensor
    residual: Tensor | None
    rows: R.Rows
    options: BackwardOptions
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


@dataclass
class Replayed(SampledBlock):
    """A module whose output comes from a run on all rows, and whose gradient comes from a run on kept rows."""

    replay: Replay | None = None

    def positions(self, n: int, dim: int) -> Positions:
        return Positions(n, dim, shared=not self.sampling.masks.per_sample)

    @contextmanager
    def running(self, replay: Replay) -> Iterator[None]:
        self.replay = replay
        try:
            yield
        finally:
            self.replay = None

    def compute(self, module: nn.Module, x: Tensor, rows: R.Rows, *args: Any, **kwargs: Any) -> Tensor:
        """Run the module's own parts. The output has the module's layout for all rows, ``[B, k, C]`` for kept ones."""
        raise NotImplementedError

    def repeatable(self, first: Replay) -> bool:
        """Whether the second run may be checkpointed in a compiled graph: not if a part recalls several records in
        turn, which changes state."""
        return all(len(recorded) == 1 for recorded in first.records.values())

    def execute(self, module: nn.Module, call: Call) -> Tensor:
        """Return the module's output, with the gradient of its second run, in one of the ways of the table above."""
        compiling, recompute = torch.compiler.is_compiling(), call.options.recompute
        if call.rows is None and not recompute:
            return recorded(self, module, call)
        if call.rows is None and compiling:
            return checkpointed(self, module, call)
        return grafted(self, module, call) if compiling or not recompute else replayed(self, module, call)


def recorded(block: Replayed, module: nn.Module, call: Call) -> Tensor:
    return block.compute(module, call.first.x, None, *call.args, **call.kwargs)


def checkpointed(block: Replayed, module: nn.Module, call: Call) -> Tensor:
    return checkpoint(block.compute, module, call.first.x, None, *call.args, use_reentrant=False, **call.kwargs)


def replayed(block: Replayed, module: nn.Module, call: Call) -> Tensor:
    y = first_run(block, module, call)
    again, tensors = Again.of(block, module, call)
    return rerun(again, y, call.seen, call.residual, call.rows, tensors, call.options, call.first.where.dim)


def grafted(block: Replayed, module: nn.Module, call: Call) -> Tensor:
    y = first_run(block, module, call)
    kept = second_run(block, module, call, inner(call.seen, call.options))
    return graft(y, kept, call.residual, call.rows, call.options, call.first.where.dim)


def second_run(block: Replayed, module: nn.Module, call: Call, seen: Tensor) -> Tensor:
    """Run the block on kept rows, recorded by autograd. In eager mode a second derivative is refused; compiled graphs
    have none, and there the run may be checkpointed."""
    if not torch.compiler.is_compiling():
        again, tensors = Again.of(block, module, call)
        seen, *tensors = differentiable_once(seen, *tensors)
        return again(seen, call.rows, *tensors)
    with block.running(call.first.second(seen, call.rows)):
        if call.options.recompute and block.repeatable(call.first):
            return checkpoint(
                block.compute, module, seen, call.rows, *call.args,
                use_reentrant=False, preserve_rng_state=False, **call.kwargs,
            )  # fmt: skip
        return block.compute(module, seen, call.rows, *call.args, **call.kwargs)


def first_run(block: Replayed, module: nn.Module, call: Call) -> Tensor:
    x = call.first.x
    with torch.no_grad(), casts_anew(x, autocast_dtype(x)), block.running(call.first):
        return block.compute(module, x, None, *call.args, **call.kwargs)


@dataclass(frozen=True)
class Again:
    """The second run of a block as a function of its input, the kept rows, the records, arguments and parameters."""

    block: Replayed
    module: nn.Module
    where: Positions
    records: tuple[str, ...]
    arguments: tuple[Any, ...]
    spec: TreeSpec
    parameters: tuple[str, ...]

    @classmethod
    def of(cls, block: Replayed, module: nn.Module, call: Call) -> tuple["Again", list[Tensor]]:
        """Return the function, and the tensors to call it with."""
        leaves, spec = tree_flatten((call.args, call.kwargs))
        parameters = dict(module.named_parameters(remove_duplicate=False))
        records = [(name, value) for name, values in call.first.records.items() for value in values]
        arguments = tuple(None if isinstance(leaf, Tensor) else (leaf,) for leaf in leaves)
        names = tuple(name for name, _ in records)
        again = cls(block, module, call.first.where, names, arguments, spec, tuple(parameters))
        given = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        return again, [*(value for _, value in records), *given, *parameters.values()]

    def __call__(self, x: Tensor, rows: R.Rows, *tensors: Tensor) -> Tensor:
        left = iter(tensors)
        replay = Replay(x, self.where, again=True, rows=rows)
        for name in self.records:
            replay.record(name, next(left))
        leaves = [next(left) if constant is None else constant[0] for constant in self.arguments]
        args, kwargs = tree_unflatten(leaves, self.spec)
        with self.block.running(replay), replaced(self.module, self.parameters, tuple(left)):
            return self.block.compute(self.module, x, rows, *args, **kwargs)


@contextmanager
def replaced(module: nn.Module, names: Sequence[str], tensors: Sequence[Tensor]) -> Iterator[None]:
    """Put other tensors in the place of the module's parameters."""
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


@runs(A.Residual)
class Residual(Replayed):
    """A block whose own forward is run twice."""

    takes_arguments = True

    def run(self, module: nn.Module, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        parts: A.Residual = self.description
        shortcut = None if self.sampling.site is None else parts.path(module)
        residual = x if shortcut is None else shortcut(x)
        n = R.count(residual, parts.dim)
        drawn, options = self.sampling.kept_and_options(x.shape[0], n)
        rows = drawn.rows
        first = Replay(x, self.positions(n, parts.dim))
        if shortcut is not None:
            kept = residual if rows is None else R.take_map(residual, rows, parts.dim)
            first.shortcut = residual
            first.record(parts.shortcut, inner(kept, options))
        y = self.execute(module, Call(first, x, residual, rows, options, args, kwargs))
        if not parts.passes:
            return y
        given = self.named(args, kwargs)
        return y, *(given[name] for name in self.arguments if name in given)

    def compute(self, module: nn.Module, x: Tensor, rows: R.Rows, *args: Any, **kwargs: Any) -> Any:
        parts: A.Residual = self.description
        forward = original(module)
        if rows is None:
            return first_of(forward(x, *args, **kwargs))
        if not parts.mixers:
            return tokens(R.take_map(first_of(forward(R.new_value(x), *args, **kwargs)), rows, parts.dim), parts.dim)
        assert self.replay is not None
        given = x if parts.shortcut in self.replay.records else R.take_map(x, rows, parts.dim)
        return tokens(first_of(forward(given, *args, **kwargs)), parts.dim)


def first_of(y: Any) -> Any:
    """Return the output of a block that may return a tuple, with its output first."""
    return y[0] if isinstance(y, tuple) else y


def tokens(column: Tensor, dim: int) -> Tensor:
    """Return kept rows as ``[B, k, C]``; they may be given as a map of one column."""
    return R.channels_last(column, dim).flatten(1, -2)


@dataclass
class Inside(Strategy):
    """The strategy of a part of a replayed block; ``part`` describes it."""

    block: nn.Module
    part: Any

    @classmethod
    def of(cls, part: Any, block: nn.Module, sampling: Sampling) -> "Inside":
        return cls(block, part)

    @property
    def replay(self) -> Replay | None:
        strategy: Replayed = self.block.sbp  # type: ignore[assignment]
        return strategy.replay


@runs(A.Mixer)
class Mixer(Inside):
    """A part in which rows meet. In a run on kept rows, these attend to all rows."""

    def forward(self, module: nn.Module, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        replay, forward = self.replay, original(module)
        if replay is None or not replay.on_kept_rows:
            return forward(x, *args, **kwargs)
        mixer: A.Mixer = self.part
        assert replay.rows is not None
        everything = x if mixer.whole else mixer.input_of(self.block, R.new_value(replay.x))
        others = tuple(everything if arg is x else arg for arg in args)  # keys and values, if they are x as queries are
        named = {name: everything if arg is x else arg for name, arg in kwargs.items()}
        arguments = self.named(others, named)
        attention = kept_query_attention_of(module, arguments)
        if attention is not None:
            kept = R.take_map(x, replay.rows, mixer.dim) if mixer.whole else x
            return attention(module, kept, everything, replay.positions, **arguments)
        y = forward(everything, *others, **named)
        if isinstance(y, tuple):
            return R.take_map(y[0], replay.rows, mixer.dim), *y[1:]
        return R.take_map(y, replay.rows, mixer.dim)


@runs(A.Source)
class Source(Inside):
    """The module before a mixer, which gives it all rows, also in a run on kept ones."""

    def forward(self, module: nn.Module, x: Tensor) -> Tensor:
        replay = self.replay
        return original(module)(x if replay is None or not replay.on_kept_rows else R.new_value(replay.x))


@runs(A.Shortcut)
class Shortcut(Inside):
    """The module on the residual path. It has run before the block; inside of a run it returns that output, at all rows
    or at the kept ones."""

    def forward(self, module: nn.Module, x: Tensor) -> Any:
        replay = self.replay
        if replay is None or self.part.name not in replay.records:
            return original(module)(x)
        return replay.recall(self.part.name) if replay.again else replay.shortcut


@runs(A.Draw)
class Draw(Inside):
    """Stochastic depth, or dropout that does not see rows: its factor is drawn in the first run and used in both."""

    def forward(self, module: nn.Module, x: Tensor) -> Tensor:
        replay, forward = self.replay, original(module)
        if replay is None:
            return forward(x)
        if replay.again:
            return x * replay.recall(self.part.name)
        shape = (x.shape[0], *[1] * (x.dim() - 1)) if A.is_stochastic_depth(module) else x.shape
        factor = forward(torch.ones(shape, dtype=x.dtype, device=x.device))
        replay.record(self.part.name, factor)
        return x * factor
