"""A patched module: one mixin before its own class, and a strategy that says what it does in training.

In eval mode, under ``no_grad`` and in everything else the module does what its own class does. Parameters are read at
every call, so copies and sharding are followed. Whenever the module enters training mode, its strategy checks that the
module's parts are still those that it knows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from inspect import signature
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..errors import UsageError

if TYPE_CHECKING:
    from typing_extensions import Self


class Strategy:
    """What a patched module does: here, what its own class does. It is the module's attribute ``sbp``."""

    arguments: tuple[str, ...] = ("",)
    """The names of what the module's own forward takes. A strategy always gets the first one by position."""

    def forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return original(module)(*args, **kwargs)

    def named(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """Return by name what the module was given besides its first argument."""
        return dict(zip(self.arguments[1:], args, strict=False)) | kwargs

    def check(self, module: nn.Module) -> None:
        """Raise UsageError if the module is no longer as it was described."""


class Site(nn.Module):
    """The mixin before the class of a patched module. A name that is defined here hides the same name in the module's
    own class, so there are only three: forward, train and sbp."""

    sbp: Strategy = Strategy()  # for modules made by calling a patched module's class, as peft does for LoRA

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if not args and self.sbp.arguments[0] in kwargs:
            args = (kwargs.pop(self.sbp.arguments[0]),)
        return self.sbp.forward(self, *args, **kwargs)

    def train(self, mode: bool = True) -> Self:
        if mode:
            self.sbp.check(self)
        return super().train(mode)

    def __reduce_ex__(self, protocol: Any) -> Any:
        # The class is made at run time: pickle and deepcopy make it again instead of looking it up by name.
        if "sbp_origin" not in type(self).__dict__:
            return super().__reduce_ex__(protocol)
        return _rebuild, (type(self).__dict__["sbp_origin"],), self.__dict__.copy()


def original(module: nn.Module) -> Callable[..., Any]:
    """Return the forward of the module's own class."""
    return super(Site, module).forward  # type: ignore[misc]


_CLASSES: dict[type[nn.Module], type[nn.Module]] = {}


def bound_class(base: type[nn.Module]) -> type[nn.Module]:
    """Return the class of patched modules whose own class is ``base``."""
    if base not in _CLASSES:
        body = {"sbp_origin": base, "__module__": base.__module__, "__doc__": base.__doc__}
        _CLASSES[base] = type(f"SBP{base.__name__}", (Site, base), body)
    return _CLASSES[base]


def _rebuild(base: type[nn.Module]) -> nn.Module:
    cls = bound_class(base)
    return cls.__new__(cls)


def bind(module: nn.Module, strategy: Strategy) -> None:
    strategy.arguments = tuple(signature(module.forward).parameters) or Strategy.arguments
    module.__class__ = bound_class(type(module))
    module.sbp = strategy  # type: ignore[assignment]


def unbind(module: nn.Module) -> None:
    module.__class__ = type(module).__dict__["sbp_origin"]
    vars(module).pop("sbp", None)


def patched_modules(model: nn.Module) -> Iterator[tuple[str, Site]]:
    return ((name, module) for name, module in model.named_modules() if isinstance(module, Site))


def recomputing() -> bool:
    """Whether a backward pass is running. Activation checkpointing repeats forwards there, which keep their masks."""
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1


def refuse(module: nn.Module, problems: list[str]) -> None:
    """Raise UsageError if there are any problems."""
    if problems:
        raise UsageError(
            f"{type(module).__name__} was changed after torchsbp.apply: {'; '.join(problems)}. Call "
            "torchsbp.remove(model) before such changes, and torchsbp.apply after them."
        )
