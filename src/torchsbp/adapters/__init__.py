"""Model families, found by class name: none of the libraries is imported."""

from torch import nn

from . import swin, timm, torchvision, transformers
from .base import Adapter
from .parts import qualified
from .residual import Mixer, Residual
from .windows import Windowed

__all__ = ["ADAPTERS", "Adapter", "Mixer", "Residual", "Windowed", "match", "register", "registered"]

ADAPTERS: list[Adapter] = [
    *(timm.VIT, timm.EVA, timm.BEIT, timm.RELATIVE_VIT, timm.MIXER, timm.CONVNEXT, timm.HYBRID),
    *(torchvision.VIT, torchvision.CONVNEXT),
    *transformers.ADAPTERS,
    *swin.ADAPTERS,
]


def match(module: nn.Module) -> Adapter | None:
    """The adapter of this module's class or of a class it derives from; of several, the one registered last."""
    names = {qualified(cls) for cls in type(module).__mro__}
    return next((adapter for adapter in reversed(ADAPTERS) if adapter.model in names), None)


def register(adapter: Adapter) -> None:
    """Make ``apply`` know a model family: yours, or your own description of one it knows already."""
    if not isinstance(adapter, Adapter):
        raise TypeError(f"register takes a torchsbp.adapters.Adapter, got {type(adapter).__name__}")
    ADAPTERS[:] = [known for known in ADAPTERS if known.model != adapter.model] + [adapter]


def registered(model: str) -> Adapter:
    """The adapter of that model class."""
    found = [adapter for adapter in ADAPTERS if adapter.model == model]
    if not found:
        raise ValueError(f"no adapter for {model}: call torchsbp.register(adapter) before loading its patched model")
    return found[0]
