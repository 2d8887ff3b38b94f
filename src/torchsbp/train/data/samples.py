"""Samples by number: a source and a transform, whose random numbers depend on (seed, epoch, index), not on workers."""

from collections.abc import Callable
from contextlib import nullcontext, suppress
from typing import Any, NamedTuple, Protocol

from torch.utils.data import Dataset, get_worker_info

from ...errors import DataError
from .seeds import generators_kept, mixed, seed_cpu

Key = tuple[int, int]
"""(epoch, index)"""

TRIES = 20
"""how many others are tried in the place of a sample that can't be read"""

Transform = Callable[[Any, Any], Any]
"""(input, target) -> what is collated"""


class OfInput:
    """Transforms the input alone; the target stays as it is."""

    def __init__(self, transform: Callable[[Any], Any]) -> None:
        self.transform = transform

    def __call__(self, found: Any, target: Any) -> tuple[Any, Any]:
        return self.transform(found), target


class Source(Protocol):
    """Inputs with their targets, by number. ``where(i)`` names sample i in error messages."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int) -> tuple[Any, Any]: ...
    def where(self, index: int) -> str: ...


class Unread(NamedTuple):
    """Stands in for a sample that can't be read."""

    message: str
    instead: Any
    """another sample, to fill the batch"""


class Samples(Dataset[Any]):
    """A source and a transform. ``samples[epoch, index]`` is always the same, whatever random numbers they draw.

    With ``replace``, a sample that can't be read becomes an ``Unread`` instead of an error.
    """

    def __init__(self, source: Source, transform: Transform, seed: int, replace: bool = False) -> None:
        self.source, self.transform, self.seed, self.replace = source, transform, seed, replace

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, key: Key) -> Any:
        epoch, index = key
        in_worker = get_worker_info() is not None  # a worker's generators are its own
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
        """Return another sample; for a given (epoch, index), always the same one."""
        for attempt in range(TRIES):
            with suppress(DataError):
                return self.read(epoch, mixed(self.seed, epoch, index, attempt) % len(self))
        raise DataError(f"{self.source.where(index)} can't be read, nor can {TRIES} others")
