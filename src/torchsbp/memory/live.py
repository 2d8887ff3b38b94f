"""What is alive in memory while a step runs on fake tensors."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch.utils._python_dispatch import _get_current_dispatch_mode

from ..ops.alive import Alive

Workspace = Callable[[Any, tuple[Any, ...], Any], int]


def no_workspace(func: Any, args: tuple[Any, ...], result: Any) -> int:
    return 0


class Live(Alive):
    """Follows every storage and takes a note at the peak.

    ``workspace(operator, arguments, result)`` returns the bytes that an operator needs only while it runs. ``at_peak``
    is what ``note()`` returned at the peak. ``pool`` is the most that was alive at once of what is made inside CUDA
    graphs, which hold it all the time; ``now`` does not count that.
    """

    def __init__(self, workspace: Workspace, note: Callable[[], Any]) -> None:
        super().__init__()
        self.workspace, self.note = workspace, note
        self.in_graph = self.pool = 0
        self.graph = False
        self.at_peak: Any = None

    def counter(self) -> Callable[[int], None]:
        return self.count_in_graph if self.graph else super().counter()

    def count_in_graph(self, size: int) -> None:
        self.in_graph += size

    def made(self, func: Any, args: tuple[Any, ...], result: Any) -> None:
        workspace = self.workspace(func, args, result)
        if self.graph:
            self.pool = max(self.pool, self.in_graph + workspace)
        elif self.now + workspace > self.peak:
            self.peak, self.at_peak = self.now + workspace, self.note()


def capturing() -> bool:
    """Return whether what is made at this point is in the memory of CUDA graphs."""
    live = _get_current_dispatch_mode()
    return isinstance(live, Live) and live.graph


@contextmanager
def in_graph() -> Iterator[None]:
    """Count what is made inside as memory of CUDA graphs."""
    live = _get_current_dispatch_mode()
    assert isinstance(live, Live)
    live.graph = True
    try:
        yield
    finally:
        live.graph = False
