"""Names: of classes, and of the parts of a module by dotted path."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

_QUALIFIED: dict[type, str] = {}


def qualified(module: nn.Module | type) -> str:
    """The full name of a class, or of a module's own class, patched, sharded or neither."""
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
    """The name of its own class, without where that is from; of a qualified name, its last part."""
    return (module if isinstance(module, str) else qualified(module)).rpartition(".")[2]


def class_name(cls: str | type) -> str:
    return cls if isinstance(cls, str) else qualified(cls)


def class_of(part: Any) -> str:
    """For messages: the full name of its class, "missing" where there is no such part."""
    return "missing" if part is None else qualified(part)


def find(module: Any, name: str) -> Any:
    """The part of that dotted name, None where there is none. ``""`` means the block has no such part."""
    if not name:
        return None
    if torch.compiler.is_compiling():  # few instructions: it reads them one by one
        for step in name.split("."):
            module = getattr(module, step, None)
        return module
    for step in name.split("."):
        # getattr finds a module's parts in the end, by a method in Python: that takes five times as long.
        inner = module._modules.get(step) if isinstance(module, nn.Module) else None
        module = getattr(module, step, None) if inner is None else inner
        if module is None:
            return None
    return module


def parameter(module: nn.Module, name: str) -> Any:
    """``getattr(module, name, None)``, as quick for a parameter."""
    if torch.compiler.is_compiling() or name not in module._parameters:
        return getattr(module, name, None)
    return module._parameters[name]


def inside(name: str, part: str) -> bool:
    """Whether the module of that dotted name is the part, or in it."""
    return name == part or (part != "" and name.startswith(f"{part}."))


def missing(block: nn.Module, *names: str) -> Iterator[str]:
    """Of these, the modules that the block does not have, one sentence each."""
    return (f"{name} is missing" for name in names if not isinstance(find(block, name), nn.Module))
