"""Rows chosen in backward, when their cotangents are known (docs/method.md, section 4).

Row i of a sample is kept with probability ``p_i = min(1, c · |dy_i|)``, with a c for every sample such that k rows are
kept, and counts 1/p_i. Rows are drawn systematically: their probabilities are laid end to end, and those are kept on
which one of k marks lies, a distance of one apart, the first at random. So neighbours are rarely kept together, every
sample keeps k rows, in order, and where forward drew the marks, what is kept follows from the cotangents alone.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from .constants import constant, range_of
from .layers import BackwardOptions, Grad


class Chosen(NamedTuple):
    """Kept rows, their inverse (where a device wants it), and how often each counts."""

    rows: Tensor
    inverse: Grad
    counts: Tensor


def marks(start: Tensor, k: int) -> Tensor:
    """Where rows are to be kept, ``[B, k]``, from ``start [B]`` in (0, 1)."""
    return 1 + range_of(k, start.device) - start[:, None]


def prefix_of(options: BackwardOptions) -> int:
    """The first rows of a sample that are kept always, and count once."""
    return 0 if options.row_weight is None else options.row_weight.prefix


def choose(dy: Tensor, marks: Tensor, prefix: int) -> Chosen:
    """Of ``dy [B * N, C]``, without the inverse."""
    (samples, k), size, wide = marks.shape, dy.shape[0], torch.promote_types(dy.dtype, torch.float32)
    n = size // samples
    norms = torch.linalg.vector_norm(dy.view(samples, n, -1)[:, prefix:], dim=2, dtype=wide)
    p = probabilities(norms, k)
    picks = torch.searchsorted(p.cumsum(1), marks).clamp(max=n - prefix - 1)
    counts = p.gather(1, picks).reciprocal().to(wide)
    if prefix:
        always = range_of(prefix, dy.device).expand(samples, -1)
        picks = torch.cat([always, prefix + picks], 1)
        counts = torch.cat([torch.ones_like(always, dtype=wide), counts], 1)
    rows = (first_rows(samples, n, dy.device) + picks).flatten()
    return Chosen(rows, None, counts.flatten())


def probabilities(norms: Tensor, k: int) -> Tensor:
    """min(1, c · norm), with a c for every sample (a line of ``norms [B, n]``) such that they add up to k."""
    norms = norms.clamp(min=1e-30)  # where all are zero all are alike
    tails = norms.sort(1).values.cumsum(1, dtype=torch.float64).flip(1)[:, :k]  # sums of all but the m largest
    # For any c the sum is the least of m + c · tails[m] over m: so c is the greatest that one of them asks for.
    c = ((k - range_of(k, norms.device)) / tails).amax(1, keepdim=True)
    return (c * norms).clamp(max=1)


@constant
def first_rows(samples: int, n: int, device: torch.device) -> Tensor:
    """Of samples of n rows each, ``[samples, 1]``."""
    return torch.arange(samples, device=device)[:, None] * n
