"""Stratified masks: as random as they can be while kept positions are spread evenly, at every scale.

A grid of d dimensions is cut into cells of 2^d positions, these into cells of 2^d cells, and so on. At each of the
first levels a position has d bits, which say in which corner of its cell it lies. Every bit is scrambled:

    bit of dimension i  xor  the bit of dimension i + 1, one level up  xor  a random bit of the cell

and each level makes a digit of its scrambled bits, corners with an even sum first. The digits make one number, that of
the finest level in front; sorted by it, positions are a random ordered dither (Bayer, 1973). Half of them are one
diagonal of every 2 × 2 cell. A quarter is one position of every 2 × 2 cell, and one in every row and column of a 4 × 4
cell. What lies close together is alike, so sums over such positions vary less than over random ones (docs/method.md,
section 4).
"""

from operator import index

import torch
from torch import Tensor

from ..ops.constants import constant
from .keys import fold, hashed, mixed

Shape = tuple[int, ...]
LEVELS = 3
"""The number of levels that have digits; the cells of 8 × 8 positions come in a random order."""


def stratified(shape: Shape, key: Tensor) -> Tensor:
    """Return orders of all positions, ``[samples, n]``."""
    sides = tuple(index(side) for side in shape if side > 1) or (1,)
    bits, of_bits, of_cells = _strata(sides, key.device)
    scrambled = (mixed(key[:, None, None, None] ^ of_bits) ^ bits) & 1
    digits = scrambled.sum(2) & 1
    for dim in range(len(sides) - 1):
        digits = digits << 1 | scrambled[:, :, dim]
    rank = torch.zeros((), dtype=torch.int64, device=key.device)
    for digit in digits.unbind(1):
        rank = rank << len(sides) | digit
    rank = rank << 32 | mixed(key[:, None] ^ of_cells)
    return _turned(rank, sides, key).argsort(dim=1, stable=True)


def _turned(rank: Tensor, sides: Shape, key: Tensor) -> Tensor:
    """Turn sides at random on which the last cells are cut off, so that every position is kept equally often. A side is
    turned by multiples of the largest cell that divides it."""
    largest = 2 ** (LEVELS + 1)  # bits of one level more are part of the last digit
    steps = [side if side % largest == 0 else side & -side for side in sides]
    if list(sides) == steps:
        return rank
    place = torch.zeros((), dtype=torch.int64, device=key.device)
    for dim, (side, step) in enumerate(zip(sides, steps, strict=True)):
        turn = fold(key, torch.full_like(key, dim)) % (side // step) * step
        along = (torch.arange(side, device=key.device) + turn[:, None]) % side
        place = place * side + along.view(-1, *(side if its == dim else 1 for its in range(len(sides))))
    return rank.gather(1, place.flatten(1))


@constant
def _strata(sides: Shape, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Return, for every position, its bits, each xor one of the level above, and the hashes of the cells whose random
    bits they get, ``[levels, d, n]``; and the hash of its largest cell, ``[n]``."""
    at = torch.meshgrid(*(torch.arange(side, device=device) for side in sides), indexing="ij")
    bits, hashes = [], []
    for level in range(LEVELS):
        for dim in range(len(sides)):
            other = (dim + 1) % len(sides)
            bits.append(at[dim] >> level ^ at[other] >> level + 1)
            hashes.append(hashed(_cells(at, sides, level * len(sides) + dim, level + 1, other)))
    shape = LEVELS, len(sides), -1
    largest = hashed(_cells(at, sides, LEVELS * len(sides), LEVELS))
    return torch.stack(bits).view(shape), torch.stack(hashes).view(shape), largest.flatten()


def _cells(at: tuple[Tensor, ...], sides: Shape, first: int, level: int, coarser: int | None = None) -> Tensor:
    """Return the number of every position's cell at a level. Cells are twice as long in the ``coarser`` dimension, and
    have other numbers for every ``first``."""
    cell = torch.full(sides, first, device=at[0].device)
    for dim, (along, side) in enumerate(zip(at, sides, strict=True)):
        cell = cell * side + (along >> level + (dim == coarser))
    return cell
