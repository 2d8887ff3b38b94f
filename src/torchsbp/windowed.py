"""The site of blocks with attention in windows: their run on kept rows, and a norm behind their second sum."""

from functools import partial
from typing import Any

from torch import Tensor

from .adapters.mixers import same
from .adapters.parts import find
from .adapters.windows import Windowed
from .ops import rows as R
from .ops.windows import Windows, cut, cut_kept, join_kept, kept_scores
from .residual import Draws, ResidualBinding, ResidualSite
from .sites import Site


class LastSite(Site):
    """A norm behind a block's last sum. In training the block leaves it out and its site applies it: it is not
    sampled, and the block is ``x + …``."""

    def forward(self, x: Tensor) -> Tensor:
        return x if self.sbp.block.training else super().forward(x)

    def after(self, y: Tensor) -> Tensor:
        return super().forward(y)


class WindowSite(ResidualSite):
    """A block with attention in windows: its own forward for all rows, and for kept rows what is described."""

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        y = super().forward(x, *args, **kwargs)
        last = find(self, self.sbp.parts.last)
        return last.after(y) if self.training and isinstance(last, LastSite) else y

    def run(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        b: ResidualBinding = self.sbp
        windows = None if b.site is None else b.masks.windows_of(b.site)
        if windows is not None:
            b.parts.check_call(self, windows.grid, kwargs)
        y = super().run(x, *args, windows=windows, **kwargs)
        return (y, None) if b.parts.pair else y

    def own(self, x: Tensor, rows: R.Rows, *args: Any, windows: Windows | None = None, **kwargs: Any) -> Tensor:
        if rows is None:
            y = super().own(x, None, *args, **kwargs)
            return y[0] if isinstance(y, tuple) else y
        assert windows is not None
        return self.kept_rows(R.new_value(x.flatten(1, -2)), rows, windows)

    def kept_rows(self, x: Tensor, rows: Tensor, windows: Windows) -> Tensor:
        """The block for kept rows, given all rows ``[B, n, C]``."""
        parts: Windowed = self.sbp.parts
        before, behind = self.around(parts.attention_norm)
        source = before(x)
        kept, queries = (R.take(t, rows).view(x.shape[0], -1, x.shape[-1]) for t in (x, source))
        scores = partial(kept_scores, w=windows, batch=x.shape[0])
        attention = find(self, parts.attention)
        y = parts.answer(attention, cut_kept(queries, windows), cut(source, windows), scores, windows.window)
        kept = kept + self.dropped(behind(join_kept(y, windows)), parts.attention_drop, 0)
        before, behind = self.around(parts.mlp_norm)
        y = before(kept)
        for name in parts.mlp.split():
            y = find(self, name)(y)
        return kept + self.dropped(behind(y), parts.mlp_drop, -1)

    def around(self, norm: str) -> tuple[Any, Any]:
        """What stands before a branch and what behind it."""
        return (same, find(self, norm)) if self.sbp.parts.post_norm else (find(self, norm), same)

    def dropped(self, y: Tensor, name: str, call: int) -> Tensor:
        """Times the factor that stochastic depth drew in the first run, of one module's two calls the given one."""
        factors = self.sbp.run.draws.get(name)
        return y if factors is None else y * factors[call].view(-1, 1, 1)

    def repeatable(self, draws: Draws) -> bool:
        return True
