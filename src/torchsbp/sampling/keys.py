"""Keys: random numbers as a pure function of (seed, step, rank), in integer tensor arithmetic.

They are the same on every device, and `torch.compile` traces them without recompiling from step to step. Compiled for a
GPU, sums and products of an `arange` and constants are computed in 32 bits, as indices are. So such constants are
signed 32-bit numbers: after `& MASK` the result is that of int64, even if it has wrapped.
"""

from typing import Any

import torch
from torch import Tensor

from ..ops.constants import constant

MASK = 0xFFFFFFFF


def signed(c: int) -> int:
    """Return the signed 32-bit number that equals c modulo 2^32."""
    return (c + 2**31) % 2**32 - 2**31


def mixed(x: Any) -> Any:
    """Apply a bijection of 32-bit integers in which every input bit flips every output bit half of the time."""
    # The multipliers are odd and below 2^31, so that a product with 32 bits never overflows int64.
    x = ((x ^ (x >> 16)) * 0x6D52A8A5) & MASK
    x = ((x ^ (x >> 15)) * 0x7EEC475B) & MASK
    return x ^ (x >> 16)


def fold(key: Any, value: Any) -> Any:
    """key' = mixed(key ^ hashed(value)): values are hashed first, since they are small and consecutive.

    Both may be tensors or numbers; numbers need no kernels.
    """
    return mixed(key ^ hashed(value))


def hashed(value: Any) -> Any:
    return mixed((value + signed(0x9E3779B9)) & MASK)


@constant
def hashes(n: int, device: torch.device) -> Tensor:
    """Return the hashes of 0 … n − 1, ``[n]``."""
    return hashed(torch.arange(n, device=device))


def draw_key(seed: int, step: Tensor, rank: int, samples: int) -> Tensor:
    """Return independent 32-bit keys [samples], one per mask to draw; `step` is a 0-d int64 tensor."""
    key: Tensor = fold(fold(fold(0, seed & MASK), rank), step)
    return mixed(key ^ hashes(samples, step.device))


def more_keys(key: Tensor, group: int, count: int) -> Tensor:
    """Return ``count`` sets of keys, one after the other, independent of each other and of those of other groups."""
    key = fold(key, torch.full_like(key, group))
    return mixed(key[None] ^ hashes(count, key.device)[:, None]).flatten()
