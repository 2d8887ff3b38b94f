"""Which positions are kept: (shape, ratios, key) -> an order of all positions, most important first.

The kept set at ratio r is the first `count(r)` positions of the order, so counts are exact and the sets of
unequal ratios are nested. The order is a pure function of (seed, step, rank) in integer tensor arithmetic: it
is the same on every device, and `torch.compile` traces it without recompiling from step to step.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import index

import torch
from torch import Tensor

from ..errors import UsageError, UsageTypeError, shown
from ..ops.constants import constant, known, range_of
from ..ops.wrap import looks
from .keys import MASK, fold, hashes, mixed, signed
from .strata import stratified

Shape = tuple[int, ...]
Sampler = Callable[[Shape, Sequence[float], Tensor], Tensor]
"""(shape, ratios, key [samples]) -> order [samples, n] int64, a permutation of the positions per sample."""


def enlarge(order: Tensor, coarse: Shape, fine: Shape) -> Tensor:
    """The order on a finer grid: position i lies in cell min(i // f, h − 1), f = H // h, in each dimension.

    Where every H is a multiple of h, the first k·Πf positions are exactly the first k cells enlarged. Where
    not, the last cell of a dimension is larger: counts stay exact, frequencies are equal up to edge cells.
    """
    if coarse == fine:
        return order
    if len(coarse) != len(fine) or any(h > H for h, H in zip(coarse, fine, strict=True)):
        raise UsageError(
            f"cannot enlarge a mask from grid {coarse} to grid {fine}: "
            "no dimension may shrink or be added; draw the mask on the smallest grid"
        )
    if all(H % h == 0 for h, H in zip(coarse, fine, strict=True)):
        return _positions_of_cells(coarse, fine, order.device)[order].flatten(1)
    rank = order.argsort(dim=1)  # the inverse permutation: cell -> its place in the order
    return rank[:, _cells(coarse, fine, order.device)].argsort(dim=1, stable=True)


@constant
def _cells(coarse: Shape, fine: Shape, device: torch.device) -> Tensor:
    """Return the cell of every position, ``[n]``."""
    cell = torch.zeros((), dtype=torch.int64, device=device)
    for h, H in zip(coarse, fine, strict=True):
        steps = torch.arange(H, device=device) // (H // h)
        cell = cell.unsqueeze(-1) * h + steps.clamp(max=h - 1)
    return cell.flatten()


@constant
def _positions_of_cells(coarse: Shape, fine: Shape, device: torch.device) -> Tensor:
    """Return the positions of every cell, ``[cells, Πf]``, if all cells have the same size."""
    return _cells(coarse, fine, device).argsort(stable=True).view(math.prod(coarse), -1)


def enlarged_count(k: int, coarse: Shape, fine: Shape) -> int:
    """round(k · n_fine / n_coarse): the number of positions that go with k cells of the coarser grid."""
    return round(index(k * math.prod(fine)) / index(math.prod(coarse)))


def shuffle(order: Tensor, counts: Sequence[int], key: Tensor) -> Tensor:
    """Shuffle an order between these counts: for each count k, the set of the first k positions stays the same."""
    n = order.shape[1]
    at_random = mixed(key[:, None] ^ hashes(n, order.device)[order])
    return order.gather(1, (_stretches(n, tuple(counts), order.device) + at_random).argsort(dim=1))


@constant
def _stretches(n: int, counts: tuple[int, ...], device: torch.device) -> Tensor:
    """Return for every place in an order how many counts do not exceed it, in the upper 32 bits, ``[n]``."""
    found = torch.zeros(n, dtype=torch.int64, device=device)
    for k in set(counts):
        found += torch.arange(n, device=device) >= k
    return found << 32


def balanced(order: Tensor, counts: Sequence[int], samples: int) -> Tensor:
    """Read each order of ``[m, n]`` cyclically, from another start for every sample: ``[m * samples, n]``.

    With g = gcd(n, k₁, k₂, …) the starts are g·⌊b·(n/g) / samples⌋: every position is among the first k of
    ⌊samples·k/n⌋ samples, or of one more.
    """
    n = index(order.shape[1])
    g = math.gcd(n, *counts)
    start = range_of(samples, order.device) * (n // g) // samples * g
    return order[:, (start[:, None] + range_of(n, order.device)) % n].flatten(0, 1)


def _count(shape: Shape, ratio: float) -> int:
    n = math.prod(shape)
    k = index(round(ratio * n))  # `index`: a constant under `torch.compile`, also after the ratio has changed
    if k == 0:
        raise UsageError(
            f"image too small for the mask: ratio {ratio} keeps none of the {n} cells of grid {shape}; "
            f"use a larger image, or a ratio above 1/{2 * n} ({0.5 / n:.4g}), which keeps one"
        )
    return k


def _generators(shape: Shape, ratios: Sequence[float]) -> tuple[list[int], int]:
    """Multipliers a and modulus m of the lattice v(x) = Σ aᵢxᵢ mod m, whose windows are the kept sets."""
    n, d = math.prod(shape), len(shape)
    ratio_of = {_count(shape, r): r for r in ratios}
    ratio_of.pop(n, None)  # keeping everything nests with any pattern
    if len(ratio_of) == 1:
        ((k, r),) = ratio_of.items()
        if d == 1:  # steps of n / k, as even as integers allow
            return [k], n
        q = min(r, 1 - r)
        s = index(round(1 / q))
        if abs(q * s - 1) < 1e-6:  # r = 1/s or 1 − 1/s: the classes (i + j) mod s
            return [1] * d, s
    # Windows of every length are evenly spread on the lattice aᵢ = φ⁻ⁱ with φ^(d+1) = φ + 1 (golden ratio for
    # d = 1, plastic number for d = 2), here in units of 2^-32.
    phi = 2.0
    for _ in range(64):
        phi = (1 + phi) ** (1 / (d + 1))
    return [signed(round(2**32 / phi**i)) for i in range(1, d + 1)], 2**32


def _lattice(shape: Shape, ratios: Sequence[float], key: Tensor) -> Tensor:
    """Positions sorted by v(x), read cyclically from a random start: the first k are a window of the lattice.

    Starts are u·g with g = gcd(n, k₁, k₂, …), u = key mod n / g. Every window is a union of blocks of g, so
    over all starts each position is kept equally often, exactly. Where all classes of v have one size, every
    window is a union of whole classes.
    """
    shape = tuple(index(size) for size in shape if size > 1) or (1,)  # a 1 × n image is a line, not a plane
    n = math.prod(shape)
    a, m = _generators(shape, ratios)
    g = math.gcd(n, *[_count(shape, r) for r in ratios])
    start = key % (n // g) * g
    turned = (start[:, None] + range_of(n, key.device)) % n
    return _sorted_lattice(shape, tuple(a), m, key.device)[turned]


@known
def _sorted_lattice(shape: Shape, a: Shape, m: int, device: torch.device) -> Tensor:
    """Positions sorted by v(x), ``[n]``."""
    v = torch.zeros((), dtype=torch.int64, device=device)
    for multiplier, size in zip(a, shape, strict=True):
        v = v.unsqueeze(-1) + multiplier * torch.arange(size, device=device)
    return ((v.flatten() & MASK) % m).argsort(stable=True)


def _random(shape: Shape, ratios: Sequence[float], key: Tensor) -> Tensor:
    """Positions sorted by a hash: a uniform subset for every k."""
    return mixed(key[:, None] ^ hashes(math.prod(shape), key.device)).argsort(dim=1, stable=True)


def _stratified(shape: Shape, ratios: Sequence[float], key: Tensor) -> Tensor:
    """Random positions that are spread evenly at every scale, whatever part of the order is kept."""
    return stratified(shape, key)


def _jitter(shape: Shape, ratios: Sequence[float], key: Tensor) -> Tensor:
    """One random position in each stretch [⌊mn/k⌋, ⌊(m+1)n/k⌋), m < k; smaller k choose among the chosen."""
    n = math.prod(shape)
    chosen = torch.arange(n, device=key.device).expand(len(key), n)
    rank = torch.full_like(chosen, n)  # the smallest k for which a position is chosen
    for k in sorted({_count(shape, r) for r in ratios}, reverse=True):
        m = torch.arange(k + 1, device=key.device)
        draws = fold(key[:, None], m + (k << 16))  # values that no other k uses: choices must be independent
        edges = m * n // k
        picks = edges[:-1] + draws[:, :-1] % edges.diff()
        if n % k:  # unequal stretches: a uniform rotation makes the frequencies equal again
            picks = (picks + draws[:, -1:]) % n
        chosen, n = chosen.gather(1, picks), k
        rank = rank.scatter(1, chosen, k)
    return rank.argsort(dim=1, stable=True)


def _positions(shape: Shape) -> Shape:
    return shape


def _columns(shape: Shape) -> Shape:
    """(t, h, w) -> (1, h, w): all frames share one spatial pattern."""
    return (1,) * (len(shape) - 2) + shape[-2:]


def _frames(shape: Shape) -> Shape:
    """(t, h, w) -> (t, 1, 1): whole frames."""
    if len(shape) != 3:
        names = [name for name, sampler in SAMPLERS.items() if getattr(sampler, "units", None) is not _frames]
        raise UsageError(
            f"samplers of frames need a video grid (t, h, w), found {shape}; for images use one of {names}"
        )
    return (shape[0], 1, 1)


@dataclass(frozen=True)
class UnitSampler:
    """Order the units of a grid (positions, columns or frames: a coarser grid), and enlarge them to positions.

    ``cyclic``: the order is as good if it is read cyclically from any start.
    """

    units: Callable[[Shape], Shape]
    order: Sampler
    cyclic: bool = True

    def __call__(self, shape: Shape, ratios: Sequence[float], key: Tensor) -> Tensor:
        units = self.units(shape)
        return enlarge(self.order(units, ratios, key), units, shape)


SAMPLERS: dict[str, Sampler] = {
    "grid": UnitSampler(_columns, _lattice),
    "random": UnitSampler(_positions, _random),
    "stratified": UnitSampler(_positions, _stratified),
    "frames": UnitSampler(_frames, _lattice),
    "frames_jitter": UnitSampler(_frames, _jitter, cyclic=False),
    "checkerboard": UnitSampler(_positions, _lattice),
}
IN_BACKWARD = ("norm",)
"""Samplers without an order: positions are chosen in backward, when cotangents are known (``ops/chosen.py``)."""


def resolve(sampler: str | Sampler, others: Sequence[str] = ()) -> Sampler:
    """Return the sampler of that name, or a callable as it is; ``others`` are names that the error lists too."""
    if callable(sampler):
        return sampler
    if not isinstance(sampler, str) or sampler not in SAMPLERS:
        raise UsageError(
            f"unknown sampler {sampler!r}; use one of {[*SAMPLERS, *others]} "
            "or a callable (shape, ratios, key [samples]) -> order [samples, n]"
        )
    return SAMPLERS[sampler]


def cyclic(sampler: str | Sampler) -> bool:
    """Whether the sampler's orders may be read cyclically from any start, as balanced masks are."""
    return sampler not in IN_BACKWARD and bool(getattr(resolve(sampler), "cyclic", False))


_LOOKED: set[tuple[object, ...]] = set()


def ordered(sampler: str | Sampler, shape: Shape, ratios: Sequence[float], key: Tensor) -> Tensor:
    """Return the sampler's order of all positions of a grid, those to keep first; raise UsageError if it is no order.

    Whether a user's sampler gives every position once is checked always on the CPU, and once per shape on a GPU, whose
    values have to be waited for.
    """
    samples, n = key.shape[0], math.prod(shape)
    order = called(sampler, shape, ratios, key)
    if not isinstance(order, Tensor):
        raise UsageTypeError(no_order(shape, samples, f"{shown(order)} of type {type(order).__name__}"))
    if tuple(order.shape) != (samples, n) or order.dtype != torch.int64:
        raise UsageError(no_order(shape, samples, f"{order.dtype} of shape {tuple(order.shape)}"))
    if order.device != key.device:
        raise UsageError(no_order(shape, samples, f"one on {order.device}, its key is on {key.device}"))
    if callable(sampler) and looks(order, (samples, n, order.device), _LOOKED):
        once = torch.arange(n, device=order.device).expand(samples, n)
        if not torch.equal(order.sort(dim=1).values, once):
            raise UsageError(no_order(shape, samples, f"some more than once, or others than 0 … {n - 1}"))
    return order


def called(sampler: str | Sampler, shape: Shape, ratios: Sequence[float], key: Tensor) -> Tensor:
    """Call the sampler; raise UsageError for whatever fails in a user's own."""
    if not callable(sampler) or torch.compiler.is_compiling():
        return resolve(sampler)(shape, ratios, key)
    try:
        return sampler(shape, ratios, key)
    except UsageError:
        raise
    except Exception as error:
        raise UsageError(f"the sampler fails for the grid {shape}: {type(error).__name__}: {error}") from error


def no_order(shape: Shape, samples: int, found: str) -> str:
    return (
        f"the sampler must give an int64 order of shape {(samples, math.prod(shape))}, all positions of the grid "
        f"{shape} for each sample, each once; it gave {found}"
    )


def count(sampler: str | Sampler, shape: Shape, ratio: float) -> int:
    """round(r · units) · positions per unit: the number kept. The units of a custom sampler are positions."""
    units = shape if sampler in IN_BACKWARD else getattr(resolve(sampler), "units", _positions)(shape)
    return enlarged_count(_count(units, ratio), units, shape)


def first(order: Tensor, k: int) -> Tensor:
    """The kept set: the first k positions of each order, ascending, [samples, k]."""
    return order[:, :k].sort(dim=1).values
