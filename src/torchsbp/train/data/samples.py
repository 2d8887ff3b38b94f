"""Samples by number: a source, and a transform that is seeded by (seed, epoch, index), not by the state of a worker."""

from collections.abc import Callable
from contextlib import nullcontext, suppress
from typing import Any, NamedTuple, Protocol

from torch.utils.data import Dataset, get_worker_info

from ...errors import DataError
from .seeds import generators_kept, mixed, seed_cpu

Key = tuple[int, int]
"""(epoch, index)"""

TRIES = 20
"""to find another sample for one that can't be read"""

Transform = Callable[[Any, Any], Any]
"""(input, target) -> what is collated"""


class Source(Protocol):
    """Inputs with their targets, by number. ``where(i)`` says in an error message which one it is."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int) -> tuple[Any, Any]: ...
    def where(self, index: int) -> str: ...


class Unread(NamedTuple):
    """In the place of a sample that can't be read."""

    message: str
    instead: Any
    """another sample"""


class Samples(Dataset[Any]):
    """Source and transform: ``samples[epoch, index]`` is always the same, whatever either of them draws.

    ``replace``: a sample that can't be read is an ``Unread``, not an error.
    """

    def __init__(self, source: Source, transform: Transform, seed: int, replace: bool = False) -> None:
        self.source, self.transform, self.seed, self.replace = source, transform, seed, replace

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, key: Key) -> Any:
        epoch, index = key
        in_worker = get_worker_info() is not None  # whose generators are nobody else's
        with nullcontext() if in_worker else generators_kept():
            try:
                return self.read(epoch, index)
            except DataError as error:
                if not self.replace:
                    raise
                return Unread(str(error), self.instead(epoch, index))

    def read(self, epoch: int, index: int) -> Any:
        seed_cpu(mixed(self.seed, epoch, index))
        try:
            found, target = self.source[index]
        except Exception as error:  # whatever a decoder raises
            raise DataError(f"{self.source.where(index)} can't be read: {error}") from error
        return self.transform(found, target)

    def instead(self, epoch: int, index: int) -> Any:
        """Another one, the same whenever the run comes here."""
        for attempt in range(TRIES):
            with suppress(DataError):
                return self.read(epoch, mixed(self.seed, epoch, index, attempt) % len(self))
        raise DataError(f"{self.source.where(index)} can't be read, nor can {TRIES} others")
