"""Strategies of blocks with attention in windows, known part by part or run again on kept rows, and of a norm behind
their last sum."""

from collections.abc import Mapping
from functools import partial
from typing import Any

from torch import Tensor, nn

from ..adapters import windowed as A
from ..adapters.names import find
from ..ops import rows as R
from ..ops.windows import Windows, cut, cut_kept, join_kept, kept_scores
from ..sampling.windows import Grid, cut_all
from .lean import TransformerBlock, through
from .replay import Inside, Replay, Residual
from .sampled import runs
from .site import Site, original


@runs(A.WindowBlock)
class WindowBlock(TransformerBlock):
    """A block with attention in windows that is known part by part."""

    takes_arguments = True

    def run(self, module: nn.Module, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        parts: A.WindowBlock = self.description
        given, x, arguments = x, R.channels_last(x, parts.dim), self.named(args, kwargs)
        kept, grid = self.sampling.kept(x.shape[0], R.count(x)), grid_of(x, arguments)
        if kept.windows is not None:
            parts.check_call(module, grid, arguments)
        partition = parts.partition(module, grid, bool(arguments.get(parts.fixed)))
        cut = cut_all(partition, x.device) if kept.windows is None else kept.windows.cut
        # Before stochastic depth is drawn, as in the block's own forward: the bias may be random.
        bias = parts.score_bias(find(module, parts.attention), partition.window).flatten(0, -3)
        block = self.parts(module, x)
        block = block._replace(attention=block.attention._replace(score_bias=bias))
        return self.returned(through(module, parts.last, R.channels_back(self.block(x, block, cut), parts.dim, given)))


def grid_of(x: Tensor, arguments: Mapping[str, Any]) -> Grid:
    """Return the grid of a map, or the one that transformers passes along with tokens."""
    return tuple(x.shape[1:-1] if x.dim() > 3 else arguments["input_dimensions"])


@runs(A.Last)
class Last(Inside):
    """A norm behind a block's last sum. In training it does nothing inside of the block, which is ``x + …`` then; the
    block's strategy applies it afterwards, to all rows, since it is not sampled."""

    def forward(self, module: nn.Module, x: Tensor) -> Tensor:
        return x if self.block.training or self.replay is not None else original(module)(x)


@runs(A.Windowed)
class Windowed(Residual):
    """A block with attention in windows: all rows go through its own forward, kept rows through the described parts."""

    def forward(self, module: nn.Module, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        y = super().forward(module, x, *args, **kwargs)
        last = find(module, self.description.last)
        return original(last)(y) if module.training and isinstance(last, Site) else y

    def run(self, module: nn.Module, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        parts: A.Windowed = self.description
        windows = self.windows(x)
        if windows is not None:
            parts.check_call(module, windows.grid, self.named(args, kwargs))
        y = super().run(module, x, *args, windows=windows, **kwargs)
        return (y, None) if parts.pair else y

    def windows(self, x: Tensor) -> Windows | None:
        """Return where the kept rows are in the windows, None if all are kept."""
        return self.sampling.kept(x.shape[0], R.count(x, self.description.dim)).windows

    def compute(
        self, module: nn.Module, x: Tensor, rows: R.Rows, *args: Any, windows: Windows | None = None, **kwargs: Any
    ) -> Tensor:
        if rows is None:
            return super().compute(module, x, None, *args, **kwargs)
        assert windows is not None
        return self.kept_rows(module, R.new_value(x.flatten(1, -2)), rows, windows)

    def kept_rows(self, module: nn.Module, x: Tensor, rows: Tensor, windows: Windows) -> Tensor:
        """Return the block's output at kept rows, given all rows ``[B, n, C]``."""
        parts: A.Windowed = self.description
        before, behind = self.around(module, parts.attention_norm)
        source = before(x)
        kept, queries = (R.take(t, rows).view(x.shape[0], -1, x.shape[-1]) for t in (x, source))
        scores = partial(kept_scores, w=windows, batch=x.shape[0])
        attention, everything = find(module, parts.attention), cut(source, windows)
        y = parts.kept_query_attention(attention, cut_kept(queries, windows), everything, scores, windows.window)
        kept = kept + self.dropped(behind(join_kept(y, windows)), parts.attention_drop, 0, windows)
        before, behind = self.around(module, parts.mlp_norm)
        y = before(kept)
        for name in parts.mlp.split():
            y = find(module, name)(y)
        return kept + self.dropped(behind(y), parts.mlp_drop, -1, windows)

    def around(self, module: nn.Module, norm: str) -> tuple[Any, Any]:
        """Return what stands before a branch and what behind it: one is the norm, the other does nothing."""
        return (nothing, find(module, norm)) if self.description.post_norm else (find(module, norm), nothing)

    def dropped(self, y: Tensor, name: str, call: int, windows: Windows) -> Tensor:
        """Multiply y by the factor that stochastic depth drew in the first run: in the given ``call`` of the module,
        which both branches may share; per sample, or per window in a block that drops before it joins windows."""
        assert self.replay is not None
        factors = self.replay.records.get(name)
        if factors is None:
            return y
        factor = factors[call].view(-1, 1, 1)
        if factor.shape[0] != y.shape[0]:
            factor = join_kept(factor.expand(-1, windows.slots.shape[2], 1), windows)
        return y * factor

    def repeatable(self, first: Replay) -> bool:
        return True


def nothing(x: Tensor) -> Tensor:
    return x
