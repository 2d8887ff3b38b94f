"""Rows chosen in backward, when their cotangents are known (docs/method.md, section 4).

Row i of a sample is kept with probability ``p_i = min(1, c · |dy_i|)`` and counts 1/p_i; every sample has its own c,
such that Σ p_i = k. Sampling is systematic: the probabilities are laid end to end as intervals, k marks are put on this
line at distance one, the first at random, and a row is kept if a mark lies in its interval. So every sample keeps k
rows, in order, and rarely two neighbours. Forward draws the marks; the rest follows from the cotangents alone.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from .constants import constant, range_of
from .layers import BackwardOptions, Grad


class Chosen(NamedTuple):
    """The kept rows, their inverse (None on devices that do not use it), and how often each counts."""

    rows: Tensor
    inverse: Grad
    counts: Tensor


def marks(start: Tensor, k: int) -> Tensor:
    """Return the marks ``m − start``, m = 1 … k, of every sample, ``[B, k]``; ``start [B]`` is random in (0, 1)."""
    return 1 + range_of(k, start.device) - start[:, None]


def prefix_of(options: BackwardOptions) -> int:
    """Return how many first rows of a sample are always kept, and count once."""
    return 0 if options.row_weight is None else options.row_weight.prefix


def choose(dy: Tensor, marks: Tensor, prefix: int) -> Chosen:
    """Choose rows of ``dy [B * N, C]`` by ``marks [B, k]``: the first ``prefix`` of every sample and k of the others.
    The inverse is left out."""
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
    """Return ``p = min(1, c · norms)`` for ``norms [B, n]``, with a c for every sample such that its p add up to k."""
    norms = norms.clamp(min=1e-30)  # if all are zero, all rows are equally likely
    tails = norms.sort(1).values.cumsum(1, dtype=torch.float64).flip(1)[:, :k]  # sums of all but the m largest
    # Σ p is the least of m + c · tails[m] over m. So it is k for the greatest c that solves one m + c · tails[m] = k.
    c = ((k - range_of(k, norms.device)) / tails).amax(1, keepdim=True)
    return (c * norms).clamp(max=1)


@constant
def first_rows(samples: int, n: int, device: torch.device) -> Tensor:
    """Return the first row of every sample, ``[samples, 1]``, where each has n rows."""
    return torch.arange(samples, device=device)[:, None] * n
