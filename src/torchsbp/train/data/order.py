"""The order of samples: a pure function of (seed, epoch), so that a run can resume at any step.

Batches are numbered through the whole run. What a process reads at step t does not depend on the steps before.
"""

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.utils.data import Sampler

from ...errors import DataError
from .samples import Key
from .seeds import mixed


class TrainOrder(Sampler[list[Key]]):
    """Batches ``start, start + 1, …`` of one process, through all epochs.

    An epoch's permutation is cut into ``batches_per_epoch · world`` batches, and the remainder is left out. Consecutive
    batches go to consecutive processes, so that an update sees the same samples however many processes share it
    (``multiple``: batches of an update in each).
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
            order = self.permutation(epoch)
            for number in range(skip, self.batches_per_epoch):
                begin = (number * self.world + self.rank) * self.batch
                yield [(epoch, int(i)) for i in order[begin : begin + self.batch]]
            skip = 0

    def permutation(self, epoch: int) -> Tensor:
        """Return the order of samples in an epoch. A task may override it by any function of (seed, epoch)."""
        return torch.randperm(self.samples, generator=torch.Generator().manual_seed(mixed(self.seed, epoch)))


class EvalOrder(Sampler[list[Key]]):
    """Every sample once, divided among processes; all have the same number of batches, filled up with sample 0."""

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
        """Return how many samples of batch ``number`` count; the others only fill it."""
        return max(0, min(self.batch, self.own - number * self.batch))
