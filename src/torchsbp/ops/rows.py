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
    """How often a kept row counts: one over its probability of being kept. The first ``prefix`` rows of every sample
    (class and register tokens) are always kept and count once."""

    weight: float
    prefix: int = 0


def flat(x: Tensor) -> Tensor:
    """``[B, ..., C] -> [B * N, C]``."""
    return x.reshape(-1, x.shape[-1])


def in_rows(x: Tensor) -> Tensor:
    """Return x with its rows one after the other in memory. A patch embedding may give a transposed view; every sum
    with it, and so the output of every block that follows, would keep that layout."""
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
    """Return x as ``[B, ..., C]``. ``dim`` is its first dimension of positions: 2 if x is ``[B, C, ...]``, else 1."""
    return x if dim == 1 else x.movedim(1, -1)


def channels_back(x: Tensor, dim: int = 1, given: Tensor | None = None) -> Tensor:
    """Undo ``channels_last``. If the map ``given`` is contiguous as ``[B, C, ...]``, so is the result: the model's own
    layers that follow expect that."""
    if dim == 1:
        return x
    x = x.movedim(-1, 1)
    return x.contiguous() if given is not None and given.is_contiguous() else x


def count(x: Tensor, dim: int = 1) -> int:
    """Positions per sample."""
    return math.prod(x.shape[dim : dim + x.dim() - 2])


def take_map(x: Tensor, rows: Tensor, dim: int = 1) -> Tensor:
    """Return the given rows in the layout of x: ``[B, k, C]``; for a map, whose kept rows form one column,
    ``[B, k, 1, C]`` or ``[B, C, k, 1]``."""
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
"""How often kept rows count: the same for all patches, or a tensor ``[B * k]`` with a number per row. None: once."""


def weighted(x: Tensor, weight: Weight, samples: int) -> Tensor:
    """Multiply kept rows ``[B * k, C]`` by how often they count."""
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
    """Return a zero that depends on the cotangent; it is exactly zero even if that is inf or NaN."""
    return (cotangent.flatten()[0] * 0).nan_to_num(0.0, 0.0, 0.0)


def new_value(x: Tensor) -> Tensor:
    """Return ``x``, when compiling as a new value: the compiler would merge our expressions of x with equal ones
    elsewhere."""
    return x.clone() if compiling() else x


def inverse(rows: Tensor, size: int) -> Tensor:
    """Return the inverse of ``rows``: for each of ``size`` rows its place among the kept ones, or -1."""
    none = torch.full((size,), -1, dtype=torch.int32, device=rows.device)
    return none.index_copy_(0, rows, torch.arange(rows.shape[0], dtype=torch.int32, device=rows.device))


def by_rows(x: Tensor) -> Tensor:
    """Return ``x [B, H, N, D]`` with the heads of a row side by side in memory and all rows at equal distances."""
    _, _, n, width = x.shape
    lies_so = x.stride(3) == 1 and x.stride(1) == width and x.stride(0) == n * x.stride(2)
    return x if lies_so else x.transpose(1, 2).contiguous().transpose(1, 2)
