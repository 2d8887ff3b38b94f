"""Convolutions before a backbone's blocks that cut images into patches. They are exact, and save less."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..adapters.base import NAME
from ..adapters.layouts import Stage
from ..adapters.names import inside, parameter, qualified
from ..ops.patches import patch_embedding
from .site import Strategy, original

CONVOLUTIONS = ("torch.nn.modules.conv.Conv2d", "torch.nn.modules.conv.Conv3d")


@dataclass
class PatchEmbedding(Strategy):
    """The strategy of such a convolution. The module itself is still called, so that its hooks run. If it is changed
    after ``apply`` and no longer cuts patches, its own forward runs.

    ``entry`` is that of the backbone, which knows whether the convolution's input is held elsewhere.
    """

    entry: Any

    def forward(self, module: nn.Module, input: Tensor) -> Tensor:
        return embed(module, input, held=self.entry.is_held(input))


def embed(module: nn.Module, x: Any, *args: Any, held: bool, **kwargs: Any) -> Any:
    """Run the module; if it cuts patches in training, by an op that saves less. ``held``: x is held elsewhere too."""
    if module.training and torch.is_grad_enabled() and cuts_patches(module):
        weight, bias = parameter(module, "weight"), parameter(module, "bias")
        trains = any(t is not None and t.requires_grad for t in (x, weight, bias))
        if trains and x.dim() == weight.dim():
            return patch_embedding(x, weight, bias, held)
    return original(module)(x, *args, **kwargs)


def cuts_patches(module: Any) -> bool:
    """Whether this is a plain convolution whose outputs see one patch each, side by side, in all channels."""
    if qualified(module) not in CONVOLUTIONS or module.kernel_size != module.stride or module.groups != 1:
        return False
    none, one = ((n,) * len(module.kernel_size) for n in (0, 1))
    return module.kernel_size != one and module.padding in (none, "valid") and module.dilation == one


def stem(model: nn.Module, stages: Iterable[Stage]) -> Iterator[nn.Module]:
    """Yield the convolutions of a backbone that cut patches and are in none of its stages."""
    parts = [name for stage in stages for name in (*stage.blocks, stage.downsample) if name]
    for name, module in model.named_modules():
        if cuts_patches(module) and not hasattr(module, NAME) and not any(inside(name, part) for part in parts):
            yield module
