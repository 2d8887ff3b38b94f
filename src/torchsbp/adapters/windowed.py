"""Descriptions of blocks with attention in windows, known part by part or run again, and each library's attention.

A ``KeptQueryAttention`` computes attention of kept rows. It takes the attention module, its input at kept rows
``x [windows, k, C]`` and at all rows ``everything [windows, area, C]``, a function ``added`` and the size of a window.
It calls ``added`` on its position bias ``[heads, area, area]``, and adds what that returns to the scores: the bias of
kept rows, with the mask. A ``ScoreBiasOf`` computes the position bias from the attention module and the window's size.
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
    """Return the block's own window and shift."""
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
    """Return the bias of timm's MaxViT, zeros if it has none."""
    area = math.prod(window)
    return m.qkv.weight.new_zeros(m.num_heads, area, area) if m.rel_pos is None else m.rel_pos.get_bias()


def positional_bias(m: Any, window: Grid) -> Tensor:
    """Return the bias of torchvision's MaxViT."""
    return m.get_relative_positional_bias()


def is_grid(block: Any) -> bool:
    return not block.partition_block


def partition_sizes(block: Any, grid: Grid) -> tuple[Grid, Grid]:
    return whole_windows(block, grid, tuple(block.partition_size))


def whole_windows(block: Any, grid: Grid, window: Grid) -> tuple[Grid, Grid]:
    """Return MaxViT's windows, which are never shifted; raise if they don't divide the grid."""
    if any(n % w for n, w in zip(grid, window, strict=True)):
        raise UsageError(
            f"{type(block).__name__} was given a map of {grid} positions, which its windows of {window} don't divide. "
            "Use an image size that the model was made for."
        )
    return window, (0,) * len(grid)


def relative_attention(m: Any, x: Tensor, everything: Tensor, added: ScoreBias, window: Grid) -> Tensor:
    """Attention of timm's Swin."""
    return attend(m, x, *projections(m, x, everything), added(timm_bias(m, window)))


@dataclass(frozen=True)
class InWindows(Description):
    """How a block cuts its grid into windows.

    - ``sizes``: (block, grid) -> sizes of window and shift. ``pads_first``: the grid is padded before it is rolled.
    - ``pair``: the block returns its output and its attention maps. In training, the maps are None.
    - ``fixed``: an argument of the block's call that makes it use its own window and shift, whatever ``sizes`` says.
    """

    sizes: Sizes = own_sizes
    pads_first: bool = False
    pair: bool = False
    fixed: str = ""

    def partition_of(self, block: nn.Module) -> Callable[[Grid], Partition] | None:
        return partial(self.partition, block)

    def partition(self, block: nn.Module, grid: Grid, fixed: bool = False) -> Partition:
        grid = tuple(index(n) for n in grid)  # constants under `torch.compile`, as loops over them are unrolled
        sizes = own_sizes if fixed else self.sizes
        return Partition(grid, *sizes(block, grid), self.pads_first)

    def check_call(self, block: nn.Module, grid: Grid, arguments: Mapping[str, Any]) -> None:
        """Raise if this call has other windows than those in which kept rows are drawn."""
        if arguments.get(self.fixed) and self.sizes(block, grid) != own_sizes(block, grid):
            raise UsageError(
                f"{type(block).__name__} was called with {self.fixed}=True for a grid {grid} no larger than its window "
                f"{block.window_size}: SBP supports that for larger grids only. Sample other blocks, with the option "
                "blocks, or use a larger image."
            )


@dataclass(frozen=True)
class WindowBlock(InWindows, TransformerBlock):
    """A ``TransformerBlock`` with attention in windows, known part by part.

    - ``attention``: the module whose position bias ``score_bias`` computes.
    - ``last``: a norm after the second sum, which is not sampled.
    - ``dim``: where rows begin in the block's input: 1 in ``[B, N, C]`` and ``[B, H, W, C]``, 2 in ``[B, C, H, W]``.
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
    """A ``WindowBlock`` of a model in which windows and grids across all windows take turns, as in MaxViT.

    Rows could be kept equally many in each window of one kind, or the same for both kinds. They are the same, drawn as
    for blocks without windows. ``strided``: block -> whether its windows are such grids.
    """

    rules: tuple[str, ...] = ("query", "head", "exact")  # "qkv" needs equally many kept keys in each window
    strided: Callable[[Any], bool] = is_grid

    def partition_of(self, block: nn.Module) -> None:
        return None

    def partition(self, block: nn.Module, grid: Grid, fixed: bool = False) -> Partition:
        return replace(super().partition(block, grid), strided=self.strided(block))


@dataclass(frozen=True)
class Last:
    """A norm after a block's last sum."""


@dataclass(frozen=True)
class Windowed(InWindows, Residual):
    """``x + drop(attention(norm(x)))``, then ``x + drop(mlp(norm(x)))``, with attention in windows, run again.

    - ``attention_*``, ``mlp_*``: names of the branches' parts; "" if there is none. ``mlp`` may be several modules, one
      after the other, separated by spaces.
    - ``post_norm``: the norms come after attention and the MLP, ``x + drop(norm(f(x)))``.
    - ``last``: a norm after the second sum, which is not sampled.
    - ``kept_query_attention``: attention of kept rows (see the module's docstring).
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
    """Swin v2's attention: scores are cosines times a learned scale per head. ``qkv_bias`` replaces the module's."""
    q, k, v = projections(m, x, everything, bias=qkv_bias)
    return attend(m, x, *cosines(q, k, m.logit_scale), v, bias, scale=1.0)


def cosines(q: Tensor, k: Tensor, logit_scale: Tensor) -> tuple[Tensor, Tensor]:
    """Return queries and keys whose products are cosines times ``cosine_factor(logit_scale)``."""
    return F.normalize(q, dim=-1) * cosine_factor(logit_scale), F.normalize(k, dim=-1)


def continuous_bias(mlp: nn.Module, m: Any, window: Grid) -> Tensor:
    """Return Swin v2's bias, ``16 σ(mlp(coordinates))`` for all pairs of positions in a window.

    σ is applied to the table, not to what is read from it, for which autograd would save as much again.
    """
    table, area = 16 * mlp(m.relative_coords_table).flatten(0, -2).sigmoid(), math.prod(window)
    return table[m.relative_position_index.flatten()].view(area, area, -1).permute(2, 0, 1).contiguous()


def v2_bias(m: Any, window: Grid) -> Tensor:
    """Return Swin v2's bias in timm and torchvision."""
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
    """Attention of torchvision's Swin v2, which does not use the bias of its keys."""
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
