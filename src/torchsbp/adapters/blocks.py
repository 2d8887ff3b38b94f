"""Find the blocks of a model of any library, for SBP, memory, sharding, checkpointing and messages."""

from collections.abc import Iterator

from torch import nn

from . import Adapter, Layout, find_backbones
from .names import inside, qualified

CONTAINERS = (nn.Sequential, nn.ModuleList)


def blocks_of(model: nn.Module) -> list[str]:
    """Return the names of a model's residual blocks, in the order they run; no block is inside another.

    If an adapter knows the model, these are the blocks of its stages. If not, they are members of ``Sequential`` or
    ``ModuleList``: the outermost modules of a library's own class that do not hold a chain of blocks themselves.
    """
    described = {name: (adapter, layout) for name, _, adapter, layout in find_backbones(model)}
    return list(_blocks(model, "", described))


def block_classes(model: nn.Module) -> list[str]:
    """Return the full names of the blocks' classes, sorted."""
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
    """Return whether a module could be a block, not a layer or a chain: its class is not from ``torch.nn``, and its
    children have parameters."""
    own = not type(module).__module__.startswith("torch.nn.") and not isinstance(module, CONTAINERS)
    return own and any(next(child.parameters(), None) is not None for child in module.children())


def _is_stage(module: nn.Module) -> bool:
    chains = (m for m in module.modules() if isinstance(m, CONTAINERS) and len(m))
    return any(all(is_block(child) for child in chain) for chain in chains)
