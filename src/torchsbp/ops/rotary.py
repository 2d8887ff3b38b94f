"""Rotary embeddings: queries and keys turned by angles of their position, ``y = x ∘ cos + rot(x) ∘ sin``.

``rot`` maps every pair of channels (a, b) to (−b, a); a pair is two neighbours, or with ``half`` two channels half a
head apart. As ``rotᵀ = −rot``, ``dx = dy ∘ cos − rot(dy ∘ sin)``. Shapes: ``x [B, H, m, D]`` at ``rows`` (None: all, in
order); ``rope`` has sine and cosine side by side, ``[N, 2D]``, or ``[H, N, 2D]`` where heads differ.
"""

import torch
from torch import Tensor

from . import rows as R


def rotate(x: Tensor, rope: Tensor, rows: R.Rows, half: bool) -> Tensor:
    sin, cos = at(rope, rows, x.shape[0]).chunk(2, -1)
    return (x * cos + turned(x, half) * sin).to(x.dtype)


def rotate_backward(dy: Tensor, rope: Tensor, rows: R.Rows, half: bool) -> Tensor:
    """Return the gradient of x."""
    sin, cos = at(rope, rows, dy.shape[0]).chunk(2, -1)
    return (dy * cos - turned(dy * sin, half)).to(dy.dtype)


def rope_gradient(dy: Tensor, x: Tensor, rope: Tensor, rows: R.Rows, half: bool) -> Tensor:
    """Return the gradient of rope: ``dy ∘ rot(x)`` for sines and ``dy ∘ x`` for cosines, each summed over all samples
    (and heads) that share the angle."""
    dy, x = dy.to(rope.dtype), x.to(rope.dtype)
    found = torch.cat([dy * turned(x, half), dy * x], -1)
    found = found.sum(1) if rope.dim() == 2 else found.movedim(1, 0)  # [(H,) B, m, 2D]
    if rows is None:
        return found.sum(-3)
    return torch.zeros_like(rope).index_add(-2, rows % rope.shape[-2], found.flatten(-3, -2))


def at(rope: Tensor, rows: R.Rows, samples: int) -> Tensor:
    """Return the sines and cosines at the given rows, ``[B, H or 1, m, 2D]``; for all rows, ``rope`` itself."""
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
