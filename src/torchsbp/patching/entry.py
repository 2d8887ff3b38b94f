"""The entry of a backbone, its patch embedding or stem: every forward begins here, and draws its masks here."""

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
"""The name of the step counter, a buffer of the entry, so that it follows the model to its device."""


@dataclass(frozen=True)
class SampledModule:
    """A sampled block or down-sampling layer: its name in the backbone, its place over depth, by which its keep-ratio
    is found, and its description."""

    name: str
    module: nn.Module
    depth: int
    description: Description


class Backbone:
    """The backbone of an entry, or None for a copy of the entry alone. The reference is weak, as a strong one would
    make a cycle, and a model that is deleted would keep its memory until garbage is collected."""

    def __init__(self, module: nn.Module | None = None) -> None:
        self.module = None if module is None else ref(module)

    def __call__(self) -> nn.Module | None:
        return None if self.module is None else self.module()

    def __deepcopy__(self, copies: dict[int, Any]) -> "Backbone":
        return Backbone(copies.get(id(self())))

    def __reduce__(self) -> Any:
        module = self()  # a traced one is made of its parts, and can't be referred to by them
        return Backbone, (None if isinstance(module, torch.fx.GraphModule) else module,)


@dataclass
class Entry(Strategy):
    """The strategy of an entry: runs it and draws masks.

    ``prefix`` stands before the backbone's names in the model. ``counts`` is False while the step counter may hold
    arbitrary memory, as it was made on the meta device. ``given`` is the entry's input while it runs.
    """

    config: SBPConfig
    masks: Masks
    layout: Layout
    sampled: tuple[SampledModule, ...]
    prefix: str
    backbone: Backbone
    counts: bool = True
    given: Tensor | None = None

    def is_held(self, x: Tensor) -> bool:
        """Whether x is the input of the whole model, which the caller holds anyway. The input that a larger model
        makes for its backbone, or a tensor that the backbone makes of its input, may be freed after this call."""
        return x is self.given and not self.prefix

    def forward(self, module: nn.Module, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        trains = any(sampled.module.training for sampled in self.sampled) and not recomputing()
        if trains and not torch.compiler.is_compiling() and 0 in x.shape[:1]:  # compiled, this would add a guard
            raise UsageError(f"the batch is empty (input of shape {tuple(x.shape)}): nothing to sample; skip it")
        for size in x.shape[1:] if trains else ():
            index(size)  # a constant under `torch.compile`: masks follow from the grid, all shapes from masks
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
        """Raise UsageError if a sampled module was replaced, alone or with what holds it, by one that is not patched
        and would not be sampled."""
        backbone = self.backbone()
        if backbone is None:
            return
        there = set(backbone.modules())
        for name in (sampled.name for sampled in self.sampled if sampled.module not in there):
            found = find(backbone, name)
            if found is not None and next(found.parameters(), None) is not None and not self.samples(found):
                refuse(backbone, [f"{name} is a {bare_name(found)} that was not patched"])

    def samples(self, module: nn.Module) -> bool:
        """Whether a module, or one that it wraps, reads the masks that are drawn here."""
        strategies = (its.sbp for its in module.modules() if isinstance(its, Site))
        return any(isinstance(its, SampledBlock) and its.sampling.masks is self.masks for its in strategies)

    def step(self, module: nn.Module) -> Tensor:
        """The counter of training forwards."""
        return module.get_buffer(STEP)

    def set_step(self, module: nn.Module, step: int) -> None:
        self.step(module).fill_(step)
        self.counts = True
        self.masks.ratios = self.ratios(step)
        self.masks.calls.clear()  # their steps are counted back from the current one

    def ratios(self, step: int) -> tuple[float, ...]:
        """Return each sampled module's ratio at this step; a down-sampling layer has that of the block after it."""
        ratio = self.config.keep_ratio
        if isinstance(ratio, schedules.Milestones):
            ratio = ratio.at(step)
        assert not isinstance(ratio, str)  # ``apply`` has resolved it
        over_depth = schedules.over_depth(ratio, max(sampled.depth for sampled in self.sampled) + 1)
        return tuple(over_depth[sampled.depth] for sampled in self.sampled)

    def least_ratios(self) -> tuple[float, ...]:
        """Return the least ratio that each sampled module ever has."""
        ratio = self.config.keep_ratio
        steps = [step for step, _ in ratio.points] if isinstance(ratio, schedules.Milestones) else [0]
        return tuple(map(min, zip(*(self.ratios(step) for step in steps), strict=True)))


def bind_entry(module: nn.Module, entry: Entry) -> None:
    bind(module, entry)
    device = next(module.parameters()).device
    entry.counts = device.type != "meta"
    module.register_buffer(STEP, torch.zeros((), dtype=torch.int64, device=device), persistent=False)


def unbind_entry(module: nn.Module) -> None:
    module._buffers.pop(STEP, None)
    module._non_persistent_buffers_set.discard(STEP)


def entries(model: nn.Module) -> Iterator[tuple[Entry, Site]]:
    """Yield the entries of all patched backbones with their modules, in the model's order. This runs in every step, and
    ``model.modules()`` would take many times as long."""
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
