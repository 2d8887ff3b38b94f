"""The known model families, matched by the qualified names of classes: none of the libraries is imported."""

from collections.abc import Iterator

from torch import nn

from ..errors import UsageError, UsageTypeError
from . import (
    timm,
    timm_pyramids,
    timm_vits,
    torchvision,
    transformers,
    transformers_beit,
    transformers_dino,
    transformers_sam,
    transformers_swin,
    transformers_towers,
    transformers_video,
)
from .base import Adapter
from .layouts import Layout, Stage
from .rerun import Mixer, Residual
from .windowed import Windowed

__all__ = [
    "ADAPTERS", "Adapter", "Layout", "Mixer", "Residual", "Stage", "Windowed", "find_backbones", "match", "register",
    "registered",
]  # fmt: skip

ADAPTERS: list[Adapter] = [
    *timm.ADAPTERS, *timm_vits.ADAPTERS, *timm_pyramids.ADAPTERS, *torchvision.ADAPTERS, *transformers.ADAPTERS,
    *transformers_beit.ADAPTERS, *transformers_dino.ADAPTERS, *transformers_sam.ADAPTERS, *transformers_swin.ADAPTERS,
    *transformers_towers.ADAPTERS, *transformers_video.ADAPTERS,
]  # fmt: skip

Backbone = tuple[str, nn.Module, Adapter, Layout]
"""A backbone's name in the model, its module, and the adapter and layout that describe it."""


def match(module: nn.Module) -> tuple[Adapter, Layout] | None:
    """Return adapter and layout for a module's class or a base class of it; of several, those registered last."""
    for adapter in reversed(ADAPTERS):
        layout = adapter.layout_for(module)
        if layout is not None:
            return adapter, layout
    return None


def find_backbones(model: nn.Module) -> Iterator[Backbone]:
    """Yield the modules of a model, itself included, that an adapter knows, except those inside another backbone."""
    outer: list[str] = []
    for name, module in model.named_modules():
        if any(name.startswith(prefix) for prefix in outer):
            continue
        found = match(module)
        if found is not None:
            outer.append(f"{name}." if name else "")
            yield name, module, *found


def register(adapter: Adapter) -> None:
    """Make ``torchsbp.apply`` know a model family: your own, or your own description of a family that it knows already.

    The adapter replaces a registered one of the same name. If several adapters match a model class, the one registered
    last is used. Register an adapter before you unpickle a patched model of its family. docs/adapters.md has examples.
    """
    if not isinstance(adapter, Adapter):
        raise UsageTypeError(f"register takes a torchsbp.adapters.Adapter, got {type(adapter).__name__}")
    ADAPTERS[:] = [known for known in ADAPTERS if known.name != adapter.name] + [adapter]


def registered(family: str, model: str) -> Layout:
    """Return the layout of the class named ``model`` in the adapter ``family``; layouts are unpickled by it."""
    layouts = (layout for adapter in ADAPTERS if adapter.name == family for layout in adapter.every_layout)
    found = next((layout for layout in layouts if layout.model == model), None)
    if found is None:
        raise UsageError(f"no adapter for {model}: call torchsbp.register(adapter) before loading its patched model")
    return found
