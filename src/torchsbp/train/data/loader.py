"""Loaders of batches, whose worker processes leave signals to the training loop."""

import os
import signal
import threading
from collections.abc import Callable
from multiprocessing import parent_process
from typing import Any

import torch
from torch.utils.data import DataLoader, Sampler

from .samples import Key, Samples, Unread

PREFETCH = 4
"""batches that each worker prepares ahead"""


def loader(
    samples: Samples, order: Sampler[list[Key]], collate: Callable[[list[Any]], Any], workers: int, pin: bool
) -> DataLoader[Any]:
    """Return a loader of (batch, [(place, message) for every sample that can't be read])."""
    return DataLoader(
        samples,
        batch_sampler=order,
        collate_fn=Readable(collate),
        num_workers=workers,
        pin_memory=pin,
        prefetch_factor=PREFETCH if workers else None,
        worker_init_fn=leave_signals_to_the_loop,
        generator=torch.Generator(),  # else making an iterator would draw from the run's random numbers
    )


class Readable:
    """Collates the samples that can be read, followed by replacements of the others that fill up the batch."""

    def __init__(self, collate: Callable[[list[Any]], Any]) -> None:
        self.collate = collate

    def __call__(self, samples: list[Any]) -> tuple[Any, list[tuple[int, str]]]:
        unread = [(place, its) for place, its in enumerate(samples) if isinstance(its, Unread)]
        good = [its for its in samples if not isinstance(its, Unread)]
        others = [its.instead for _, its in unread]
        return self.collate([*good, *others]), [(place, its.message) for place, its in unread]


def reader(items: Any, batch: int, workers: int) -> DataLoader[Any]:
    """Return a loader of lists of ``batch`` items, in their order."""
    return DataLoader(
        items,
        batch_size=batch,
        collate_fn=list,
        num_workers=workers,
        worker_init_fn=leave_signals_to_the_loop,
        generator=torch.Generator(),
    )


def leave_signals_to_the_loop(_: int) -> None:
    """Let a worker end only when its parent says so: Ctrl-C and job managers signal every process of a run."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if hasattr(signal, "sigwaitinfo"):  # not on macOS
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        threading.Thread(target=obey_parent, daemon=True).start()


def obey_parent() -> None:
    """End at a SIGTERM from the process that began this one (a "forkserver" is its parent, and does not); ignore those
    from others."""
    began = parent_process()
    assert began is not None
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != began.pid:
        pass
    os._exit(0)
