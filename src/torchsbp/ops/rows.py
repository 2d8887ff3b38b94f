"""Rows: the positions of a feature map, flattened. For ``x [B, ..., C]``, row ``b * N + i`` is position i of sample b.

``rows`` is an index vector ``[B * k]``, sample after sample with the same count k in each, or ``None`` for all rows.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from .compiling import compiling

Rows = Tensor | None


class RowWeight(NamedTuple):
    """How often a kept row counts, one over its probability; the first ``prefix`` kept rows of a sample count once."""

    weight: float
    prefix: int = 0


def flat(x: Tensor) -> Tensor:
    """``[B, ..., C] -> [B * N, C]``."""
    return x.reshape(-1, x.shape[-1])


def in_rows(x: Tensor) -> Tensor:
    """x whose rows lie in memory one after the other. Behind an embedding of patches they may lie across it, and all
    sums with x, and so all blocks, would go on like that."""
    return x.contiguous()


def take(x: Tensor, rows: Rows) -> Tensor:
    """The given rows of x, ``[B * k, C]``."""
    return flat(x) if rows is None else flat(x).index_select(0, rows)


def put(base: Tensor, rows: Rows, values: Tensor) -> Tensor:
    """``base`` with the given rows replaced by ``values``; the shape and dtype of ``base``."""
    if rows is None:
        return values.to(base.dtype).view(base.shape)
    return flat(base).index_copy(0, rows, values.to(base.dtype)).view(base.shape)


def channels_last(x: Tensor, dim: int = 1) -> Tensor:
    """x as ``[B, ..., C]``; ``dim`` says where its positions begin: 1 if it is that, 2 if it is ``[B, C, ...]``."""
    return x if dim == 1 else x.movedim(1, -1)


def channels_back(x: Tensor, dim: int = 1, given: Tensor | None = None) -> Tensor:
    """The inverse of ``channels_last``. Where the map ``given`` lay in memory as ``[B, C, ...]``, so does this one: the
    model's own layers that follow are used to that."""
    if dim == 1:
        return x
    x = x.movedim(-1, 1)
    return x.contiguous() if given is not None and given.is_contiguous() else x


def count(x: Tensor, dim: int = 1) -> int:
    """Positions per sample."""
    return math.prod(x.shape[dim : dim + x.dim() - 2])


def take_map(x: Tensor, rows: Tensor, dim: int = 1) -> Tensor:
    """The given rows of x in its layout, of a map as one column: ``[B, k, C]``, ``[B, k, 1, C]``, ``[B, C, k, 1]``."""
    last = channels_last(x, dim)
    kept = take(last, rows).view(x.shape[0], -1, *[1] * (x.dim() - 3), last.shape[-1])
    return kept if dim == 1 else kept.movedim(-1, 1)


def per_sample(x: Tensor, factor: Tensor | None) -> Tensor:
    """Multiply the rows ``[B * k, C]`` of each sample by its factor ``[B]`` (stochastic depth)."""
    if factor is None:
        return x
    samples = factor.shape[0]
    return (x.view(samples, -1, x.shape[-1]) * factor.view(samples, 1, 1)).flatten(0, 1)


Weight = RowWeight | Tensor | None
"""How often kept rows count: patches all alike, or row by row ``[B * k]``. None: once."""


def weighted(x: Tensor, weight: Weight, samples: int) -> Tensor:
    """Kept rows ``[B * k, C]`` as often as they count."""
    if weight is None:
        return x
    if isinstance(weight, Tensor):
        return (x * weight[:, None]).to(x.dtype)
    rows, wide = x.view(samples, -1, x.shape[-1]), torch.promote_types(x.dtype, torch.float32)
    counts = torch.full((rows.shape[1], 1), weight.weight, dtype=wide, device=x.device)
    counts = counts.index_fill(0, torch.arange(weight.prefix, device=x.device), 1)
    return (rows * counts).to(x.dtype).flatten(0, 1)


def after(cotangent: Tensor, x: Tensor) -> Tensor:
    """``x``, made to depend on the cotangent when compiling.

    The compiler sees forward and backward as one graph. Without this it would merge what backward recomputes with the
    same expression in forward and save it, which undoes the saving.
    """
    return x + zero_of(cotangent).to(x.dtype) if compiling() else x


def zero_of(cotangent: Tensor) -> Tensor:
    """A zero that depends on it: exact, also for inf and NaN."""
    return (cotangent.flatten()[0] * 0).nan_to_num(0.0, 0.0, 0.0)


def new_value(x: Tensor) -> Tensor:
    """``x``, another value to the compiler, which would merge the same expressions of x elsewhere with ours."""
    return x.clone() if compiling() else x


def inverse(rows: Tensor, size: int) -> Tensor:
    """The inverse of ``rows``: the place of each of ``size`` rows among the kept ones, -1 for the rest."""
    none = torch.full((size,), -1, dtype=torch.int32, device=rows.device)
    return none.index_copy_(0, rows, torch.arange(rows.shape[0], dtype=torch.int32, device=rows.device))


def by_rows(x: Tensor) -> Tensor:
    """``[B, H, N, D]`` whose heads lie side by side in every row, and rows at equal distances."""
    _, _, n, width = x.shape
    lies_so = x.stride(3) == 1 and x.stride(1) == width and x.stride(0) == n * x.stride(2)
    return x if lies_so else x.transpose(1, 2).contiguous().transpose(1, 2)
