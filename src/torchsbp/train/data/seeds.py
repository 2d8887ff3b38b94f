"""Seeds made from several numbers, and generators that are left as they were found."""

import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


def mixed(*numbers: int) -> int:
    """One seed from several numbers."""
    digest = hashlib.blake2b(repr(numbers).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def seed_cpu(seed: int) -> None:
    """Seed Python's, numpy's and torch's CPU generators."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.default_generator.manual_seed(seed)


@contextmanager
def generators_kept() -> Iterator[None]:
    """Restore Python's, numpy's and torch's CPU generators afterwards."""
    before = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])
        torch.set_rng_state(before[2])


def seed_everything(seed: int) -> None:
    seed_cpu(seed)
    torch.manual_seed(seed)
