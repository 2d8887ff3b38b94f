"""Bytes that a forward pass saves for backward."""

import torch
from torch import nn


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
