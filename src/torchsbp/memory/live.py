"""What is alive in memory while a step runs on fake tensors."""

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode
from torch.utils._pytree import tree_leaves

ROUND = 512  # bytes: what the CUDA allocator rounds up to
Workspace = Callable[[Any, tuple[Any, ...], Any], int]


def rounded(size: int) -> int:
    return -(-size // ROUND) * ROUND


def no_workspace(func: Any, args: tuple[Any, ...], result: Any) -> int:
    return 0


class Live(TorchDispatchMode):
    """Follows every storage that operators make, from its first output to its end.

    ``now`` and ``peak`` are bytes, each storage rounded as the CUDA allocator does; ``workspace(operator, arguments,
    result)`` gives bytes that an operator needs only while it runs. ``at_peak`` is what ``note`` gives at the peak.
    ``pool`` is the most that was alive at once of what is made in graphs: they hold it all the time.
    """

    def __init__(self, workspace: Workspace, note: Callable[[], Any]) -> None:
        super().__init__()
        self.workspace, self.note = workspace, note
        self.now = self.peak = self.in_graph = self.pool = 0
        self.graph = False
        self.at_peak: Any = None
        self.storages: dict[int, Any] = {}

    def ignore(self, *tensors: Tensor) -> None:
        """Storages that are counted elsewhere."""
        for tensor in tensors:
            self.storages[tensor.untyped_storage()._cdata] = tensor

    def add(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key, size = storage._cdata, rounded(storage.nbytes())
        if key in self.storages:
            return

        graph = self.graph

        def count(size: int) -> None:
            if graph:
                self.in_graph += size
            else:
                self.now += size

        def end(_: object) -> None:
            count(-size)
            del self.storages[key]

        self.storages[key] = weakref.ref(storage, end)
        count(size)

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self.add(leaf)
        workspace = self.workspace(func, args, result)
        if self.graph:
            self.pool = max(self.pool, self.in_graph + workspace)
        elif self.now + workspace > self.peak:
            self.peak, self.at_peak = self.now + workspace, self.note()
        return result


def capturing() -> bool:
    """Whether what is made now is in the memory of CUDA graphs."""
    live = _get_current_dispatch_mode()
    return isinstance(live, Live) and live.graph


@contextmanager
def in_graph() -> Iterator[None]:
    """What is made inside is in the memory of CUDA graphs."""
    live = _get_current_dispatch_mode()
    assert isinstance(live, Live)
    live.graph = True
    try:
        yield
    finally:
        live.graph = False
