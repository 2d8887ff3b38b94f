"""What a model saves for backward, by module and by block."""

import weakref
from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as hooks

from ..patching.site import recomputing


class Running:
    """Follows which modules of a model are running, by global hooks, so that the model itself is not touched.

    ``where`` is the name of the innermost one; after an error, of the one that raised it. Forwards that are repeated in
    backward are not followed: checkpointing stops them by an error as soon as it has what it needs.
    """

    def __init__(self, model: nn.Module) -> None:
        self.names = {module: name for name, module in model.named_modules()}
        self.stack: list[str] = [""]

    @property
    def where(self) -> str:
        return self.stack[-1]

    def enter(self, module: nn.Module, args: Any) -> None:
        if self.follows(module):
            self.stack.append(self.names[module])

    def leave(self, module: nn.Module, args: Any, output: Any) -> None:
        if self.follows(module):
            self.stack.pop()

    def follows(self, module: nn.Module) -> bool:
        return module in self.names and not recomputing()

    def __enter__(self) -> "Running":
        self.handles = [
            hooks.register_module_forward_pre_hook(self.enter),
            hooks.register_module_forward_hook(self.leave, always_call=False),
        ]
        return self

    def __exit__(self, *exc: object) -> None:
        for handle in self.handles:
            handle.remove()


class Saved:
    """Counts the bytes saved for backward inside the context, by the module that saves them; each storage once.

    Not counted: parameters, buffers, ``ignored`` tensors, and what a backward pass saves when it computes something
    again. ``by_module`` counts by the innermost module, ``alive`` is what has not been freed yet. ``where`` is the
    module that runs; in backward, the one whose tensors were read last.
    """

    def __init__(self, model: nn.Module, *ignored: Tensor) -> None:
        self.running = Running(model)
        self.by_module: Counter[str] = Counter()
        self.alive = 0
        self.backward = ""
        self.seen: dict[int, Any] = {}
        for tensor in (*model.parameters(), *model.buffers(), *ignored):
            self.count(tensor.untyped_storage(), 0)

    @property
    def where(self) -> str:
        return self.running.where or self.backward

    @property
    def total(self) -> int:
        return self.by_module.total()

    def count(self, storage: torch.UntypedStorage, size: int) -> None:
        """Count a storage once, and forget it when it is freed: another storage may then have its address."""
        key = storage._cdata
        if key in self.seen:
            return

        def end(_: object) -> None:
            self.alive -= size
            self.seen.pop(key, None)

        self.seen[key] = weakref.ref(storage, end)
        self.alive += size
        self.by_module[self.running.where] += size

    def pack(self, tensor: Tensor) -> tuple[Tensor, str]:
        if not recomputing():
            storage = tensor.untyped_storage()
            self.count(storage, storage.nbytes())
        return tensor, self.where

    def unpack(self, packed: tuple[Tensor, str]) -> Tensor:
        tensor, self.backward = packed
        return tensor

    def __enter__(self) -> "Saved":
        self.running.__enter__()
        self.hooks = torch.autograd.graph.saved_tensors_hooks(self.pack, self.unpack)
        self.hooks.__enter__()
        return self

    def __exit__(self, *exc: object) -> None:
        self.hooks.__exit__(*exc)
        self.running.__exit__(*exc)


SavedByPart = dict[str, dict[str, int]]


def by_block(by_module: Mapping[str, int], blocks: list[str]) -> tuple[SavedByPart, int]:
    """Return block -> part (the child that saves; "" is the block itself) -> bytes, and what no block saves."""
    result: SavedByPart = {name: {} for name in blocks}
    elsewhere = 0
    for name, size in by_module.items():
        steps = name.split(".")
        prefixes = (".".join(steps[:i]) for i in range(1, len(steps) + 1))
        block = next((prefix for prefix in prefixes if prefix in result), None)
        if block is None:
            elsewhere += size
            continue
        part = name.removeprefix(block).lstrip(".").partition(".")[0]
        result[block][part] = result[block].get(part, 0) + size
    return result, elsewhere
