"""Bytes that a forward pass saves for backward, and operators of a compiled one."""

from typing import Any

import torch
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten
PRODUCTS = (aten.mm.default, aten.addmm.default, aten.bmm.default, aten.convolution.default)


class SavedBytes:
    """Counts the storages saved inside the context, each once; parameters and ``ignored`` tensors are excluded.

    ``with SavedBytes(model) as saved: model(x)`` and then ``saved.total``.
    """

    def __init__(self, model: nn.Module, *ignored: torch.Tensor) -> None:
        self.known = [t.untyped_storage() for t in (*model.parameters(), *model.buffers(), *ignored)]
        self.seen = {s._cdata for s in self.known}
        self.total = 0

    def pack(self, t: torch.Tensor) -> torch.Tensor:
        storage = t.untyped_storage()
        if storage._cdata not in self.seen:
            self.seen.add(storage._cdata)
            self.known.append(storage)  # alive, so that its address is not taken by another
            self.total += storage.nbytes()
        return t

    def __enter__(self) -> "SavedBytes":
        self.hooks = torch.autograd.graph.saved_tensors_hooks(self.pack, lambda t: t)
        self.hooks.__enter__()
        return self

    def __exit__(self, *exc: object) -> None:
        self.hooks.__exit__(*exc)


class Operators(TorchDispatchMode):
    """Notes the operators that run inside the context."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    @property
    def names(self) -> list[str]:
        return [str(func) for func in self.seen]

    def count(self, operators: tuple[Any, ...]) -> int:
        return sum(func in operators for func in self.seen)

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        self.seen.append(func)
        return func(*args, **(kwargs or {}))


def counting_backend(operators: tuple[Any, ...]) -> tuple[Any, list[int]]:
    """A backend that runs graphs as they are, partitioned as by inductor, and how many of the operators each forward
    graph has."""
    counts: list[int] = []

    def count(graph, inputs):
        counts.append(sum(node.target in operators for node in graph.graph.nodes))
        return make_boxed_func(graph)

    backend = aot_autograd(
        fw_compiler=count,
        bw_compiler=lambda graph, inputs: make_boxed_func(graph),
        partition_fn=min_cut_rematerialization_partition,
    )
    return backend, counts
