"""The entry of a backbone, its patch embedding or stem: every forward begins here, and with it new masks."""

from collections.abc import Iterator
from dataclasses import dataclass
from operator import index
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn

from ..adapters.base import Description
from ..adapters.layouts import Layout
from ..adapters.names import bare_name, find
from ..config import SBPConfig
from ..errors import UsageError, UsageTimeError
from ..sampling import schedules
from ..sampling.masks import Masks
from .patches import embed
from .sampled import SampledBlock
from .site import Site, Strategy, bind, recomputing, refuse

STEP = "sbp_step"
"""The step counter, a buffer of the entry: it follows the model to its device."""


@dataclass(frozen=True)
class SampledModule:
    """A sampled block or down-sampling layer: its name in the backbone, the module that holds it, its place over depth,
    its description."""

    name: str
    module: nn.Module
    home: nn.Module
    depth: int
    description: Description


class Backbone:
    """Which one an entry is of; None in a copy of the entry alone. Held weakly: a model that is let go gives its memory
    back at once."""

    def __init__(self, module: nn.Module | None = None) -> None:
        self.module = None if module is None else ref(module)

    def __call__(self) -> nn.Module | None:
        return None if self.module is None else self.module()

    def __deepcopy__(self, copies: dict[int, Any]) -> "Backbone":
        return Backbone(copies.get(id(self())))

    def __reduce__(self) -> Any:
        return Backbone, (self(),)


@dataclass
class Entry(Strategy):
    """``prefix`` is that of the backbone's names in the model. ``counts`` is False while the step counter may hold
    anything: it was made on the meta device, and memory came later. ``given`` is the input while it runs."""

    config: SBPConfig
    masks: Masks
    layout: Layout
    sampled: tuple[SampledModule, ...]
    prefix: str
    backbone: Backbone
    counts: bool = True
    given: Tensor | None = None

    def is_held(self, x: Tensor) -> bool:
        """Whether x is what a backbone that is the whole model was given: its caller holds that. What a larger model
        gives to its backbone, or the backbone has made of it, may end here."""
        return x is self.given and not self.prefix

    def forward(self, module: nn.Module, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        trains = any(sampled.module.training for sampled in self.sampled) and not recomputing()
        if trains and not torch.compiler.is_compiling() and 0 in x.shape[:1]:  # compiled, that would be a guard
            raise UsageError(f"the batch is empty (input of shape {tuple(x.shape)}): nothing to sample; skip it")
        for size in x.shape[1:] if trains else ():
            index(size)  # a constant under `torch.compile`: masks follow the grid, and so do all shapes behind it
        self.given = x
        try:
            y = embed(module, x, *args, held=self.is_held(x), **kwargs)
        finally:
            self.given = None
        if getattr(module, "_is_replica", False):
            raise UsageTimeError("nn.DataParallel shares one mask between threads; use DistributedDataParallel")
        if trains:
            if not self.counts:
                self.step(module).zero_()
                self.counts = True
            self.masks.begin(x.shape[0], self.layout.grid(module, x, y), self.step(module))
        return y

    def check(self, module: nn.Module) -> None:
        """An error if a sampled module was replaced by another one, which would train plainly: alone, or with what
        held it."""
        for sampled in self.sampled:
            self.refuse_plain(sampled, sampled.home, sampled.name.rpartition(".")[2])
        backbone = self.backbone()
        there = set() if backbone is None else set(backbone.modules())
        for sampled in self.sampled if backbone is not None else ():
            if sampled.module not in there:
                self.refuse_plain(sampled, backbone, sampled.name)

    def refuse_plain(self, sampled: SampledModule, home: Any, name: str) -> None:
        found = find(home, name)
        if found is not None and next(found.parameters(), None) is not None and not self.samples(found):
            refuse(home, [f"{sampled.name} is a {bare_name(found)} that was not patched"])

    def samples(self, module: nn.Module) -> bool:
        """Whether a module, or what it was wrapped around, reads the masks that are drawn here."""
        strategies = (its.sbp for its in module.modules() if isinstance(its, Site))
        return any(isinstance(its, SampledBlock) and its.sampling.masks is self.masks for its in strategies)

    def step(self, module: nn.Module) -> Tensor:
        """The counter of training forwards."""
        return module.get_buffer(STEP)

    def set_step(self, module: nn.Module, step: int) -> None:
        self.step(module).fill_(step)
        self.counts = True
        self.masks.ratios = self.ratios(step)
        self.masks.calls.clear()  # they count back from the step

    def ratios(self, step: int) -> tuple[float, ...]:
        """The ratio of every sampled module at this step; a down-sampling layer has that of the block after it."""
        ratio = self.config.keep_ratio
        if isinstance(ratio, schedules.Milestones):
            ratio = ratio.at(step)
        assert not isinstance(ratio, str)  # ``apply`` has resolved it
        over_depth = schedules.over_depth(ratio, max(sampled.depth for sampled in self.sampled) + 1)
        return tuple(over_depth[sampled.depth] for sampled in self.sampled)


def bind_entry(module: nn.Module, entry: Entry) -> None:
    bind(module, entry)
    device = next(module.parameters()).device
    entry.counts = device.type != "meta"
    module.register_buffer(STEP, torch.zeros((), dtype=torch.int64, device=device), persistent=False)


def unbind_entry(module: nn.Module) -> None:
    module._buffers.pop(STEP, None)
    module._non_persistent_buffers_set.discard(STEP)


def entries(model: nn.Module) -> Iterator[tuple[Entry, Site]]:
    """Of every patched backbone, with its module, in the model's order. Asked for in every step: ``model.modules()``
    takes many times as long."""
    seen: set[nn.Module] = set()
    rest: list[nn.Module | None] = [model]
    while rest:
        module = rest.pop()
        if module is None or module in seen:
            continue
        seen.add(module)
        rest += reversed(module._modules.values())
        if isinstance(module, Site) and isinstance(module.sbp, Entry):
            yield module.sbp, module
