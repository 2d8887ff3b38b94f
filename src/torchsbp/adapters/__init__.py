"""Model families, found by class name: none of the libraries is imported."""

from torch import nn

from . import timm, torchvision, transformers
from .base import Adapter
from .parts import qualified

ADAPTERS: tuple[Adapter, ...] = (
    *(timm.VIT, timm.CONVNEXT),
    *(torchvision.VIT, torchvision.CONVNEXT),
    *transformers.ADAPTERS,
)


def match(module: nn.Module) -> Adapter | None:
    """The adapter of this module's class or of a class it derives from."""
    names = {qualified(cls) for cls in type(module).__mro__}
    return next((adapter for adapter in ADAPTERS if adapter.model in names), None)
