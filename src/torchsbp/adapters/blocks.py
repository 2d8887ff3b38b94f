"""The blocks of a model, whatever its library: for SBP, memory, sharding, checkpointing and messages."""

from collections.abc import Iterator

from torch import nn

from . import Adapter, Layout, find_backbones
from .names import inside, qualified

CONTAINERS = (nn.Sequential, nn.ModuleList)


def blocks_of(model: nn.Module) -> list[str]:
    """The names of its residual blocks, in the order they run; none is inside of another.

    Where an adapter knows the model, they are the described ones. Elsewhere they are the members of a chain: the
    outermost modules of a library's own class that are not themselves made of a chain of blocks.
    """
    described = {name: (adapter, layout) for name, _, adapter, layout in find_backbones(model)}
    return list(_blocks(model, "", described))


def block_classes(model: nn.Module) -> list[str]:
    """The full names of their classes."""
    return sorted({qualified(model.get_submodule(name)) for name in blocks_of(model)})


def _blocks(module: nn.Module, name: str, described: dict[str, tuple[Adapter, Layout]]) -> Iterator[str]:
    prefix = f"{name}." if name else ""
    if name in described:
        _, layout = described[name]
        yield from (prefix + block for stage in layout.stages_of(module) for block in stage.blocks)
        return
    for key, child in module.named_children():
        known = any(inside(backbone, prefix + key) for backbone in described)
        if isinstance(module, CONTAINERS) and is_block(child) and not known and not _is_stage(child):
            yield prefix + key
        else:
            yield from _blocks(child, prefix + key, described)


def is_block(module: nn.Module) -> bool:
    """Of a library's own class, made of modules with parameters: neither a layer nor a chain."""
    own = not type(module).__module__.startswith("torch.nn.") and not isinstance(module, CONTAINERS)
    return own and any(next(child.parameters(), None) is not None for child in module.children())


def _is_stage(module: nn.Module) -> bool:
    chains = (m for m in module.modules() if isinstance(m, CONTAINERS) and len(m))
    return any(all(is_block(child) for child in chain) for chain in chains)
