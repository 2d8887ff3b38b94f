"""Sampled blocks: what their strategies share, and which strategy runs which description."""

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from inspect import signature
from operator import index
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn

from ..adapters.lora import is_lora
from ..adapters.names import bare_name
from ..errors import UsageError, shown
from ..ops.layers import BackwardOptions
from ..ops.rows import RowWeight
from ..ops.rules import Rule
from ..sampling.masks import Kept, Masks
from .site import Site, Strategy, original, refuse


@dataclass(frozen=True)
class Sampling:
    """How a block is sampled: the masks of its backbone, its number among their sites (None: it is exact), the rule of
    its attention, and options of its backward pass, as in ``SBPConfig``."""

    masks: Masks
    site: int | None
    rule: Rule
    scope: str
    scale: str
    recompute: bool
    capture: bool
    spare: bool
    """Whether all blocks recompute, so that memory comes first."""

    def kept(self, batch: int, positions: int) -> Kept:
        return Kept() if self.site is None else self.masks.kept(self.site, batch, positions)

    def kept_and_options(self, batch: int, positions: int) -> tuple[Kept, BackwardOptions]:
        """What the block keeps of so many samples and positions, and how its backward pass is run."""
        kept = self.kept(batch, positions)
        return kept, self.options(kept, batch, positions)

    def options(self, kept: Kept, batch: int, positions: int) -> BackwardOptions:
        weight_scale, row_weight, prefix = 1.0, None, self.masks.prefix
        patches = None if kept.marks is None else kept.marks.shape[1]
        if kept.rows is not None:
            patches = index(kept.rows.shape[0] // batch) - prefix  # a constant, even if the batch size is not
            if self.scale == "weight":
                weight_scale = batch * positions / kept.rows.shape[0]
        if patches is not None and self.scale == "rows":
            row_weight = RowWeight((positions - prefix) / patches, prefix)
        return BackwardOptions(self.scope, self.recompute, weight_scale, row_weight, self.capture, self.spare)


STRATEGIES: dict[type, type[Any]] = {}
Runs = TypeVar("Runs", bound=type[Any])


def runs(kind: type) -> Callable[[Runs], Runs]:
    """Register a strategy for a kind of descriptions. It is made by its ``of(part, block, sampling)``."""

    def register(strategy: Runs) -> Runs:
        STRATEGIES[kind] = strategy
        return strategy

    return register


def strategy_for(part: Any, block: nn.Module, sampling: Sampling) -> Strategy:
    """Make the strategy that is registered for the class of a description, or for the nearest class it derives from."""
    strategy = next(STRATEGIES[kind] for kind in type(part).__mro__ if kind in STRATEGIES)
    return strategy.of(part, block, sampling)


@dataclass
class SampledBlock(Strategy):
    """The strategy of a module whose training forward runs one of the ops."""

    description: Any
    sampling: Sampling

    takes_arguments: ClassVar[bool] = False
    chooses: ClassVar[bool] = False
    """Whether its op can choose rows in backward."""

    @classmethod
    def of(cls, part: Any, block: nn.Module, sampling: Sampling) -> "SampledBlock":
        return cls(part, sampling)

    def forward(self, module: nn.Module, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        if not (module.training and torch.is_grad_enabled()):
            return original(module)(x, *args, **kwargs)
        refuse_attentions(module, args, kwargs)
        if self.takes_arguments:
            return self.run(module, x, *args, **kwargs)
        self.refuse_arguments(module, args, kwargs)
        return self.run(module, x)

    def refuse_arguments(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        extra = [value for name, value in kwargs.items() if name not in self.description.ignored]
        if any(value is not None and value is not False for value in (*args, *extra)):
            given = [*(shown(value) for value in args), *(f"{name}={shown(kwargs[name])}" for name in kwargs)]
            raise UsageError(
                f"{type(module).__name__} was called with extra arguments in training ({', '.join(given)}); SBP "
                "supports the plain call only. Call torchsbp.remove(model) to train with them."
            )

    def run(self, module: nn.Module, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError

    def check(self, module: nn.Module) -> None:
        """Raise UsageError if the block was changed since ``apply``, so that its description misreads it."""
        refuse(module, list(self.description.problems(module)) or list(unbound(self.description, module)))


def unbound(description: Any, block: nn.Module) -> Iterator[str]:
    """Yield a problem for parts that were put into the block after ``apply``: they would take kept rows for all."""
    names = {module: name for name, module in block.named_modules()}
    for part, _ in description.bindings(block):
        sites = [module.sbp for module in part.modules() if isinstance(module, Site)]  # a part may have been wrapped
        beside = is_lora(part)  # it calls the part, and computes from the same rows beside it
        if beside or not any(vars(strategy).get("block", block) is block for strategy in sites):
            yield f"{names[part]} is a {bare_name(part)} that was not patched with the block"


def refuse_attentions(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise UsageError if attention weights are asked for: a sampled block would give none, or constants."""
    if kwargs.get("output_attentions") or asked_by_position(module, args) or attentions_are_recorded():
        raise UsageError(
            f"output_attentions=True is not possible in training ({type(module).__name__} is patched by torchsbp: its "
            "training forward has no attention weights). Ask for them after model.eval() or under torch.no_grad(), or "
            "call torchsbp.remove(model) first."
        )


def asked_by_position(module: nn.Module, args: tuple[Any, ...]) -> bool:
    if not any(arg is True for arg in args):
        return False
    names = [*signature(original(module)).parameters][1:]
    return any(arg is True and name == "output_attentions" for name, arg in zip(names, args, strict=False))


def attentions_are_recorded() -> bool:
    """Whether transformers is collecting attention weights just now; ``torch.compile`` can't trace that question."""
    if torch.compiler.is_compiling():
        return False
    collector = getattr(sys.modules.get("transformers.utils.output_capturing"), "_active_collector", None)
    return any("attentions" in key for key in (collector.get() if collector is not None else None) or ())
