"""Blocks with attention in windows: known part by part, or run again; and what each library's attention computes.

Attention of kept rows is a function of the attention module, its input at kept rows ``x [windows, k, C]`` and at all
rows ``everything [windows, area, C]``, what is to be done to its position bias ``[heads, area, area]`` before that is
added to the scores (its kept rows are taken, and the mask is added), and the size of a window. A bias is a function of
the module and that size.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from operator import index
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..errors import UsageError
from ..sampling.windows import Grid, Partition
from .base import Bound, Description
from .lean import TransformerBlock, cosine_factor
from .names import find, missing
from .queries import attend, projections
from .rerun import Mixer, Residual

ScoreBias = Callable[[Tensor], Tensor]
KeptQueryAttention = Callable[[Any, Tensor, Tensor, ScoreBias, Grid], Tensor]
ScoreBiasOf = Callable[[Any, Grid], Tensor]
Sizes = Callable[[Any, Grid], tuple[Grid, Grid]]


def own_sizes(block: Any, grid: Grid) -> tuple[Grid, Grid]:
    """Window and shift as the block has them."""
    return in_each(block.window_size, grid), in_each(block.shift_size, grid)


def in_each(size: Any, grid: Grid) -> Grid:
    return (size,) * len(grid) if isinstance(size, int) else tuple(size)


def timm_bias(m: Any, window: Grid) -> Tensor:
    return m._get_rel_pos_bias()


def torchvision_bias(m: Any, window: Grid) -> Tensor:
    return m.get_relative_position_bias()


def torchvision_3d_bias(m: Any, window: Grid) -> Tensor:
    return m.get_relative_position_bias(list(window))


def transformers_bias(m: Any, window: Grid) -> Tensor:
    return m.relative_position_bias()


def maskformer_bias(m: Any, window: Grid) -> Tensor:
    return m.self.relative_position_bias_table[m.self.relative_position_index].permute(2, 0, 1)


def relative_bias(m: Any, window: Grid) -> Tensor:
    """timm's MaxViT, which may have none."""
    area = math.prod(window)
    return m.qkv.weight.new_zeros(m.num_heads, area, area) if m.rel_pos is None else m.rel_pos.get_bias()


def positional_bias(m: Any, window: Grid) -> Tensor:
    """torchvision's MaxViT."""
    return m.get_relative_positional_bias()


def is_grid(block: Any) -> bool:
    return not block.partition_block


def partition_sizes(block: Any, grid: Grid) -> tuple[Grid, Grid]:
    return whole_windows(block, grid, tuple(block.partition_size))


def whole_windows(block: Any, grid: Grid, window: Grid) -> tuple[Grid, Grid]:
    """MaxViT's: without padding, and never shifted."""
    if any(n % w for n, w in zip(grid, window, strict=True)):
        raise UsageError(
            f"{type(block).__name__} was given a map of {grid} positions, which its windows of {window} don't divide. "
            "Use an image size that the model was made for."
        )
    return window, (0,) * len(grid)


def relative_attention(m: Any, x: Tensor, everything: Tensor, added: ScoreBias, window: Grid) -> Tensor:
    """timm's Swin."""
    return attend(m, x, *projections(m, x, everything), added(timm_bias(m, window)))


@dataclass(frozen=True)
class InWindows(Description):
    """How a block cuts its grid.

    - ``sizes``: (block, grid) -> sizes of window and shift; ``pads_first``: pads the grid before rolling it.
    - ``pair``: the block returns a pair, its output and attention maps; none of these in training.
    - ``fixed``: an argument of the block that makes it take windows as they are, whatever ``sizes`` says.
    """

    sizes: Sizes = own_sizes
    pads_first: bool = False
    pair: bool = False
    fixed: str = ""

    def partition_of(self, block: nn.Module) -> Callable[[Grid], Partition] | None:
        return partial(self.partition, block)

    def partition(self, block: nn.Module, grid: Grid, fixed: bool = False) -> Partition:
        grid = tuple(index(n) for n in grid)  # constants under `torch.compile`, which unrolls what they count
        sizes = own_sizes if fixed else self.sizes
        return Partition(grid, *sizes(block, grid), self.pads_first)

    def check_call(self, block: nn.Module, grid: Grid, arguments: Mapping[str, Any]) -> None:
        """An error if the windows of this call are others than those in which rows are kept."""
        if arguments.get(self.fixed) and self.sizes(block, grid) != own_sizes(block, grid):
            raise UsageError(
                f"{type(block).__name__} was called with {self.fixed}=True for a grid {grid} no larger than its window "
                f"{block.window_size}: SBP supports that for larger grids only. Sample other blocks, with the option "
                "blocks, or use a larger image."
            )


@dataclass(frozen=True)
class WindowBlock(InWindows, TransformerBlock):
    """A ``TransformerBlock`` with attention in windows, known part by part.

    ``attention`` is the module whose position bias ``score_bias`` gives; ``last`` is a norm behind the second sum: a
    layer of its own, which is not sampled. ``dim``: where rows are in its input, 2 in ``[B, C, H, W]``.
    """

    called: ClassVar[tuple[str, ...]] = ("drop1", "drop2", "last")

    attention: str = "attn"
    score_bias: ScoreBiasOf = timm_bias
    fused: str = ""
    q_norm: str = ""
    k_norm: str = ""
    scale1: str = ""
    scale2: str = ""
    last: str = ""
    dim: int = 1


@dataclass(frozen=True)
class PartitionBlock(WindowBlock):
    """The same in windows, or in grids across all windows, that take turns: what is kept would be equally many in each
    of one kind, or the same for both. It is the same, as drawn for blocks without windows.

    ``strided``: block -> whether its windows are grids.
    """

    rules: tuple[str, ...] = ("query", "head", "exact")  # the op has kept keys where they are equally many
    strided: Callable[[Any], bool] = is_grid

    def partition_of(self, block: nn.Module) -> None:
        return None

    def partition(self, block: nn.Module, grid: Grid, fixed: bool = False) -> Partition:
        return replace(super().partition(block, grid), strided=self.strided(block))


@dataclass(frozen=True)
class Last:
    """A norm behind a block's last sum."""


@dataclass(frozen=True)
class Windowed(InWindows, Residual):
    """``x + drop(attention(norm(x)))``, then ``x + drop(mlp(norm(x)))``, with attention in windows of a grid.

    - ``attention_*``, ``mlp_*``: names of the branches' parts; "" for those that it does not have. ``mlp`` may be
      several modules, one after the other, with spaces between.
    - ``post_norm``: the norms come behind attention and the MLP, ``x + drop(norm(f(x)))``.
    - ``last``: a norm behind the second sum: a layer of its own, which is not sampled.
    - ``kept_query_attention``: attention of kept rows.
    """

    rules: tuple[str, ...] = ("query",)
    mixers: tuple[Mixer, ...] = ()
    attention: str = "attn"
    attention_norm: str = "norm1"
    attention_drop: str = "drop_path1"
    mlp: str = "mlp"
    mlp_norm: str = "norm2"
    mlp_drop: str = "drop_path2"
    post_norm: bool = False
    last: str = ""
    kept_query_attention: KeptQueryAttention = relative_attention

    def bindings(self, block: nn.Module) -> Iterator[Bound]:
        yield from super().bindings(block)
        last = find(block, self.last)
        if last is not None and not isinstance(last, nn.Identity):
            yield last, Last()

    def problems(self, block: nn.Module) -> Iterator[str]:
        yield from super().problems(block)
        yield from missing(block, self.attention, self.attention_norm, *self.mlp.split(), self.mlp_norm)


def cosine_attention(m: Any, x: Tensor, everything: Tensor, bias: Tensor, qkv_bias: Tensor | None = None) -> Tensor:
    """Swin v2: the scores are cosines, times a learned scale for every head."""
    q, k, v = projections(m, x, everything, bias=qkv_bias)
    return attend(m, x, *cosines(q, k, m.logit_scale), v, bias, scale=1.0)


def cosines(q: Tensor, k: Tensor, logit_scale: Tensor) -> tuple[Tensor, Tensor]:
    """Queries and keys whose products are cosines times exp(logit_scale)."""
    return F.normalize(q, dim=-1) * cosine_factor(logit_scale), F.normalize(k, dim=-1)


def continuous_bias(mlp: nn.Module, m: Any, window: Grid) -> Tensor:
    """Swin v2: ``16 σ(mlp(coordinates))`` for all pairs of positions in a window.

    σ is that of the table: autograd would save as much again for σ of what is read from it.
    """
    table, area = 16 * mlp(m.relative_coords_table).flatten(0, -2).sigmoid(), math.prod(window)
    return table[m.relative_position_index.flatten()].view(area, area, -1).permute(2, 0, 1).contiguous()


def v2_bias(m: Any, window: Grid) -> Tensor:
    """timm's and torchvision's."""
    return continuous_bias(m.cpb_mlp, m, window)


def timm_v2_attention(m: Any, x: Tensor, everything: Tensor, added: ScoreBias, window: Grid) -> Tensor:
    return cosine_attention(m, x, everything, added(v2_bias(m, window)))


def timm_cr_bias(m: Any, window: Grid) -> Tensor:
    return m._relative_positional_encodings()


def timm_cr_attention(m: Any, x: Tensor, everything: Tensor, added: ScoreBias, window: Grid) -> Tensor:
    return cosine_attention(m, x, everything, added(timm_cr_bias(m, window)))


def torchvision_attention(m: Any, x: Tensor, everything: Tensor, added: ScoreBias, window: Grid) -> Tensor:
    return attend(m, x, *projections(m, x, everything), added(torchvision_bias(m, window)))


def torchvision_v2_attention(m: Any, x: Tensor, everything: Tensor, added: ScoreBias, window: Grid) -> Tensor:
    """Its keys have a bias that is not used."""
    bias = m.qkv.bias
    if bias is not None:
        q, k, v = bias.chunk(3)
        bias = torch.cat([q, torch.zeros_like(k), v])
    return cosine_attention(m, x, everything, added(v2_bias(m, window)), bias)


def torchvision_3d_attention(m: Any, x: Tensor, everything: Tensor, added: ScoreBias, window: Grid) -> Tensor:
    return attend(m, x, *projections(m, x, everything), added(torchvision_3d_bias(m, window)))


def transformers_attention(m: Any, x: Tensor, everything: Tensor, added: ScoreBias, window: Grid) -> Tensor:
    projected = m.q_proj(x), m.k_proj(everything), m.v_proj(everything)
    q, k, v = (t.unflatten(-1, (-1, m.head_dim)).transpose(1, 2) for t in projected)
    o = F.scaled_dot_product_attention(q, k, v, attn_mask=added(transformers_bias(m, window)), scale=m.scaling)
    return m.o_proj(o.transpose(1, 2).flatten(2))


def transformers_v2_bias(m: Any, window: Grid) -> Tensor:
    return continuous_bias(m.self.continuous_position_bias_mlp, m.self, window)


def transformers_v2_attention(m: Any, x: Tensor, everything: Tensor, added: ScoreBias, window: Grid) -> Tensor:
    a = m.self
    projected = a.query(x), a.key(everything), a.value(everything)
    q, k, v = (t.unflatten(-1, (-1, a.attention_head_size)).transpose(1, 2) for t in projected)
    bias = added(transformers_v2_bias(m, window))
    o = F.scaled_dot_product_attention(*cosines(q, k, a.logit_scale), v, attn_mask=bias, scale=1.0)
    return m.output(o.transpose(1, 2).flatten(2), x)


def maskformer_attention(m: Any, x: Tensor, everything: Tensor, added: ScoreBias, window: Grid) -> Tensor:
    a = m.self
    projected = a.query(x), a.key(everything), a.value(everything)
    q, k, v = (t.unflatten(-1, (-1, a.attention_head_size)).transpose(1, 2) for t in projected)
    o = F.scaled_dot_product_attention(q, k, v, attn_mask=added(maskformer_bias(m, window)))
    return m.output(o.transpose(1, 2).flatten(2), x)
