"""Samples by number, and their order: pure functions of (seed, epoch), so that a run continues anywhere.

A sample's augmentation is seeded by (seed, epoch, index), not by the state of a worker; batches are numbered through
the whole run. What a process reads at step t needs no memory of the steps before.
"""

import hashlib
import os
import random
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, Protocol

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, Sampler, get_worker_info

from .errors import DataError

Key = tuple[int, int]
"""(epoch, index)"""

PREFETCH = 4
"""batches that each worker prepares ahead"""


class Images(Protocol):
    """A source of labelled images. ``where(i)`` says in an error message which one it is."""

    classes: int

    def __len__(self) -> int: ...
    def __getitem__(self, index: int) -> tuple[Any, int]: ...
    def where(self, index: int) -> str: ...


def mixed(*numbers: int) -> int:
    """One seed from several numbers."""
    digest = hashlib.blake2b(repr(numbers).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def seed_cpu(seed: int) -> None:
    """Python's, numpy's and torch's CPU generators begin at this seed."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.default_generator.manual_seed(seed)


@contextmanager
def generators_kept() -> Iterator[None]:
    """Afterwards these generators are as before."""
    before = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])
        torch.set_rng_state(before[2])


class Samples(Dataset[Any]):
    """Source and transform: ``samples[epoch, index]`` is always the same."""

    def __init__(self, images: Images, transform: Callable[[Any], Any], seed: int) -> None:
        self.images, self.transform, self.seed = images, transform, seed

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, key: Key) -> Any:
        epoch, index = key
        try:
            image, label = self.images[index]
        except Exception as error:  # whatever a decoder raises
            raise DataError(f"{self.images.where(index)} can't be read: {error}") from error
        in_worker = get_worker_info() is not None  # whose generators are nobody else's
        with nullcontext() if in_worker else generators_kept():
            seed_cpu(mixed(self.seed, epoch, index))
            return self.transform(image), label


class TrainOrder(Sampler[list[Key]]):
    """Batches ``start, start + 1, …`` of one process, through all epochs.

    An epoch's permutation is cut into ``batches_per_epoch · processes`` parts, the remainder is left out. Neighbouring
    parts go to neighbouring processes, so that an update sees the same samples with any number of processes.
    """

    def __init__(self, samples: int, batch: int, seed: int, rank: int = 0, world: int = 1, multiple: int = 1) -> None:
        self.samples, self.batch, self.seed, self.rank, self.world = samples, batch, seed, rank, world
        self.batches_per_epoch = samples // (batch * world * multiple) * multiple
        if self.batches_per_epoch == 0:
            raise DataError(f"{samples} training samples are fewer than one batch of {batch * world * multiple}")
        self.start = 0
        self.epochs = 1

    def __len__(self) -> int:
        return self.epochs * self.batches_per_epoch - self.start

    def __iter__(self) -> Iterator[list[Key]]:
        first, skip = divmod(self.start, self.batches_per_epoch)
        for epoch in range(first, self.epochs):
            generator = torch.Generator().manual_seed(mixed(self.seed, epoch))
            order = torch.randperm(self.samples, generator=generator)
            for number in range(skip, self.batches_per_epoch):
                begin = (number * self.world + self.rank) * self.batch
                yield [(epoch, int(i)) for i in order[begin : begin + self.batch]]
            skip = 0


class EvalOrder(Sampler[list[Key]]):
    """Every sample once, over the processes; all have the same number of batches, filled up with sample 0."""

    def __init__(self, samples: int, batch: int, rank: int = 0, world: int = 1) -> None:
        share = -(-samples // world)
        own = range(min(rank * share, samples), min((rank + 1) * share, samples))
        self.keys = [(0, i) for i in own] + [(0, 0)] * (share - len(own))
        self.own, self.batch = len(own), batch

    def __len__(self) -> int:
        return -(-len(self.keys) // self.batch)

    def __iter__(self) -> Iterator[list[Key]]:
        for begin in range(0, len(self.keys), self.batch):
            yield self.keys[begin : begin + self.batch]

    def valid(self, number: int) -> int:
        """How many samples of that batch count."""
        return max(0, min(self.batch, self.own - number * self.batch))


def loader(
    samples: Samples, order: Sampler[list[Key]], collate: Callable[[list[Any]], Any], workers: int, pin: bool
) -> DataLoader[Any]:
    return DataLoader(
        samples,
        batch_sampler=order,
        collate_fn=collate,
        num_workers=workers,
        pin_memory=pin,
        prefetch_factor=PREFETCH if workers else None,
        worker_init_fn=leave_signals_to_the_loop,
        generator=torch.Generator(),  # else making an iterator would draw from the run's random numbers
    )


def leave_signals_to_the_loop(_: int) -> None:
    """Ctrl-C and job managers signal every process of a run; workers end when the process that started them says so."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if hasattr(signal, "sigwaitinfo"):  # not on macOS
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        threading.Thread(target=obey_parent, daemon=True).start()


def obey_parent() -> None:
    """End at a SIGTERM of the parent process, let those of others pass."""
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != os.getppid():
        pass
    os._exit(0)
