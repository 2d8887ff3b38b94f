"""Qualified names of classes, and parts of a module by their dotted names."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

_QUALIFIED: dict[type, str] = {}


def qualified(module: nn.Module | type) -> str:
    """Return the full name of a class or of a module's class, as it was before patching and sharding."""
    cls = module if isinstance(module, type) else type(module)
    if torch.compiler.is_compiling():
        return _qualified(cls)
    if cls not in _QUALIFIED:
        _QUALIFIED[cls] = _qualified(cls)
    return _QUALIFIED[cls]


def _qualified(cls: type) -> str:
    if cls.__bases__ and cls.__bases__[0].__name__ == "FSDPModule":  # made by fully_shard
        cls = cls.__bases__[1]
    cls = cls.__dict__.get("sbp_origin", cls)
    return f"{cls.__module__}.{cls.__qualname__}"


def bare_name(module: nn.Module | type | str) -> str:
    """Return the name of a class without its module, given a module, a class or a qualified name."""
    return (module if isinstance(module, str) else qualified(module)).rpartition(".")[2]


def class_name(cls: str | type) -> str:
    return cls if isinstance(cls, str) else qualified(cls)


def class_of(part: Any) -> str:
    """Return the full name of a part's class; "missing" if there is no such part."""
    return "missing" if part is None else qualified(part)


def find(module: Any, name: str) -> Any:
    """Return the part of that dotted name; None if there is none, or if the name is ``""``."""
    if not name:
        return None
    if torch.compiler.is_compiling():  # few instructions: the compiler traces them one by one
        for step in name.split("."):
            module = getattr(module, step, None)
        return module
    for step in name.split("."):
        # getattr also finds submodules, but last and by a method in Python, which takes five times as long.
        inner = module._modules.get(step) if isinstance(module, nn.Module) else None
        module = getattr(module, step, None) if inner is None else inner
        if module is None:
            return None
    return module


def parameter(module: nn.Module, name: str) -> Any:
    """Return ``getattr(module, name, None)``, faster for a parameter."""
    if torch.compiler.is_compiling() or name not in module._parameters:
        return getattr(module, name, None)
    return module._parameters[name]


def inside(name: str, part: str) -> bool:
    """Return whether the dotted name is that of the part, or of something in it."""
    return name == part or (part != "" and name.startswith(f"{part}."))


def missing(block: nn.Module, *names: str) -> Iterator[str]:
    """Yield a sentence for each of these names that is not a module of the block."""
    return (f"{name} is missing" for name in names if not isinstance(find(block, name), nn.Module))
