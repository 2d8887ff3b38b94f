"""Algorithm 1 for any position-wise function: gradients at kept positions, a forward without them at the rest."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ..errors import UsageError


def sbp(fn: Callable[[Tensor], Tensor], x: Tensor, keep: Tensor, dim: int = 1, *, recompute: bool = False) -> Tensor:
    """``gate(fn(x))`` for a function that treats the positions along ``dim`` independently.

    ``keep`` holds the kept positions, ``[k]``, each once. The forward is computed once, in two parts: kept positions
    with gradients, the rest without, as in the paper. ``recompute=True`` saves only the kept part of x.
    """
    if keep.dim() != 1 or keep.dtype not in (torch.int32, torch.int64):
        raise UsageError(
            f"keep must be a vector of position indices (int64); got {keep.dtype} with shape {tuple(keep.shape)}. "
            "From a boolean mask, use mask.nonzero().flatten()."
        )
    if not torch.is_grad_enabled():
        return fn(x)
    drop = complement(keep, x.shape[dim])
    kept_x = x.index_select(dim, keep)
    kept = checkpoint(fn, kept_x, use_reentrant=False) if recompute else fn(kept_x)
    with torch.no_grad():
        dropped = fn(x.index_select(dim, drop))
    return merge(kept, keep, dropped, drop, dim)


def complement(keep: Tensor, n: int) -> Tensor:
    """The positions of ``range(n)`` that are not in ``keep``, ascending, in a shape that does not depend on values."""
    taken = torch.zeros(n, dtype=torch.int8, device=keep.device).index_fill(0, keep.long(), 1)
    return taken.argsort(stable=True)[: n - keep.shape[0]]


def merge(a: Tensor, index_a: Tensor, b: Tensor, index_b: Tensor, dim: int) -> Tensor:
    """Both parts in their places along ``dim``."""
    order = torch.cat([index_a, index_b]).argsort()
    return torch.cat([a, b], dim).index_select(dim, order)
