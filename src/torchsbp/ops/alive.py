"""Alive: counts the memory of what operators make, while it is alive."""

import weakref
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

ROUND = 512  # bytes: what the CUDA allocator rounds up to


def rounded(size: int) -> int:
    return -(-size // ROUND) * ROUND


class Alive(TorchDispatchMode):
    """Counts every storage that an operator inside returns, until its end, but for those of the ``given`` tensors.
    ``now`` and ``peak`` are bytes, each storage rounded as the CUDA allocator does."""

    def __init__(self, *given: Tensor | None) -> None:
        super().__init__()
        self.now = self.peak = 0
        self.storages: dict[int, Any] = {}
        self.ignore(*given)

    def ignore(self, *tensors: Tensor | None) -> None:
        """Don't count the storages of these tensors, which are counted elsewhere."""
        for tensor in tensors:
            if tensor is not None:
                self.storages[tensor.untyped_storage()._cdata] = tensor

    def counter(self) -> Callable[[int], None]:
        """The function that counts a storage made now: called with its bytes, and with minus these when it ends."""

        def count(size: int) -> None:
            self.now += size

        return count

    def add(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key, size = storage._cdata, rounded(storage.nbytes())
        if key in self.storages:
            return
        count = self.counter()

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
        self.made(func, args, result)
        return result

    def made(self, func: Any, args: tuple[Any, ...], result: Any) -> None:
        """Called when an operator has run."""
        self.peak = max(self.peak, self.now)
