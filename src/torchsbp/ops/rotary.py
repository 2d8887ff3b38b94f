"""Rotary embeddings: queries and keys turned by an angle of their position, ``y = x ∘ cos + rot(x) ∘ sin``.

``rot`` swaps the members of pairs, and one of them changes its sign: neighbours, or with ``half`` those half a head
apart. As ``rotᵀ = −rot``, ``dx = dy ∘ cos − rot(dy ∘ sin)``. Shapes: x ``[B, H, m, D]``, sine and cosine side by side
in ``rope [N, 2D]``, or ``[H, N, 2D]`` where heads differ; ``rows`` says at which rows x is (None: all, in order).
"""

import torch
from torch import Tensor

from . import rows as R


def rotate(x: Tensor, rope: Tensor, rows: R.Rows, half: bool) -> Tensor:
    sin, cos = at(rope, rows, x.shape[0]).chunk(2, -1)
    return (x * cos + turned(x, half) * sin).to(x.dtype)


def rotate_backward(dy: Tensor, rope: Tensor, rows: R.Rows, half: bool) -> Tensor:
    """Of x."""
    sin, cos = at(rope, rows, dy.shape[0]).chunk(2, -1)
    return (dy * cos - turned(dy * sin, half)).to(dy.dtype)


def rope_gradient(dy: Tensor, x: Tensor, rope: Tensor, rows: R.Rows, half: bool) -> Tensor:
    """Of sine and cosine: ``dy ∘ rot(x)`` and ``dy ∘ x``, summed over all that are turned by them."""
    dy, x = dy.to(rope.dtype), x.to(rope.dtype)
    found = torch.cat([dy * turned(x, half), dy * x], -1)
    found = found.sum(1) if rope.dim() == 2 else found.movedim(1, 0)  # [(H,) B, m, 2D]
    if rows is None:
        return found.sum(-3)
    return torch.zeros_like(rope).index_add(-2, rows % rope.shape[-2], found.flatten(-3, -2))


def at(rope: Tensor, rows: R.Rows, samples: int) -> Tensor:
    """For these rows, ``[B, H or 1, m, 2D]``, or all of them."""
    if rows is None:
        return rope
    kept = rope.index_select(-2, rows % rope.shape[-2]).unflatten(-2, (samples, -1))
    return kept.unsqueeze(1) if rope.dim() == 2 else kept.movedim(0, 1)


def turned(x: Tensor, half: bool) -> Tensor:
    """``rot(x)``: (a, b) becomes (−b, a)."""
    if half:
        a, b = x.chunk(2, -1)
        return torch.cat([-b, a], -1)
    return torch.stack([-x[..., 1::2], x[..., ::2]], -1).flatten(-2)
