"""What is alive in memory while a step runs on fake tensors."""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch.utils._python_dispatch import _get_current_dispatch_mode

from ..ops.alive import Alive

Workspace = Callable[[Any, tuple[Any, ...], Any], int]


def no_workspace(func: Any, args: tuple[Any, ...], result: Any) -> int:
    return 0


class Live(Alive):
    """Follows every storage and takes a note at the peak.

    ``workspace(operator, arguments, result)`` returns the bytes that an operator needs only while it runs. ``at_peak``
    is what ``note()`` returned at the peak. ``pools`` has the most that was alive at once of what is made inside CUDA
    graphs, by the memory that these share. They hold it all the time; ``now`` does not count it.
    """

    def __init__(self, workspace: Workspace, note: Callable[[], Any]) -> None:
        super().__init__()
        self.workspace, self.note = workspace, note
        self.pools: Counter[str] = Counter()
        self.in_pool: Counter[str] = Counter()
        self.pool = ""
        self.at_peak: Any = None

    def counter(self) -> Callable[[int], None]:
        return partial(self.count_in_pool, self.pool) if self.pool else super().counter()

    def count_in_pool(self, pool: str, size: int) -> None:
        self.in_pool[pool] += size

    def made(self, func: Any, args: tuple[Any, ...], result: Any) -> None:
        workspace = self.workspace(func, args, result)
        if self.pool:
            self.pools[self.pool] = max(self.pools[self.pool], self.in_pool[self.pool] + workspace)
        elif self.now + workspace > self.peak:
            self.peak, self.at_peak = self.now + workspace, self.note()


def capturing() -> bool:
    """Return whether what is made at this point is in the memory of CUDA graphs."""
    live = _get_current_dispatch_mode()
    return isinstance(live, Live) and live.pool != ""


@contextmanager
def in_graph(pool: str) -> Iterator[None]:
    """Count what is made inside as memory that CUDA graphs share."""
    live = _get_current_dispatch_mode()
    assert isinstance(live, Live)
    live.pool = pool
    try:
        yield
    finally:
        live.pool = ""
