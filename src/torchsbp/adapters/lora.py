"""peft's LoRA layers, known by class name: ``y = W x + b + Σ s·B·A·dropout(x)`` over the active adapters.

Without dropout that is a linear layer whose weight is ``W + Σ s·B·A``. The weight is formed under autograd, so that A
and B get their exact gradients through any op that takes a weight. As in full fine-tuning, this takes memory for one
weight and its gradient per layer, and autocast rounds the sum as one weight.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ..ops.layers import HALF

LAYERS = ("peft.tuners.lora.layer.Linear", "peft.tuners.lora.layer.Conv2d")


def is_lora(layer: Any) -> bool:
    return f"{type(layer).__module__}.{type(layer).__qualname__}" in LAYERS


def active(layer: Any) -> list[str]:
    """Return the names of peft's adapters that take part in the layer's forward."""
    return [] if layer.disable_adapters else [name for name in layer.active_adapters if name in layer.lora_A]


def problems(name: str, layer: Any) -> Iterator[str]:
    """Yield why a LoRA layer differs from a linear layer with ``weight``, one sentence each."""
    if type(layer.base_layer) not in (nn.Linear, nn.Conv2d):
        yield f"{name} adapts a {type(layer.base_layer).__name__}; supported under LoRA: Linear, Conv2d"
    elif layer.base_layer.weight.dtype in HALF:
        yield (
            f"{name} has a {layer.base_layer.weight.dtype} weight, in whose rounding small adapters vanish; keep the "
            "model in float32 and train under autocast"
        )
    if layer.merged:
        yield f"{name} has its adapters merged into the weight, where they can't be trained; unmerge them first"
    for adapter in active(layer):
        dropout = layer.lora_dropout[adapter]
        if not isinstance(dropout, nn.Identity) and dropout.p > 0:
            yield f"{name} has LoRA dropout {dropout.p}; supported: lora_dropout=0"
        if adapter in layer.lora_variant:
            yield f"{name} is a {type(layer.lora_variant[adapter]).__name__}; supported: LoRA without variants"
        if layer.lora_B[adapter].bias is not None:
            yield f"{name} has a LoRA bias; supported: lora_bias=False"


def weight(layer: Any) -> Tensor:
    """Return ``W + Σ s·B·A`` as a matrix, in the precision of the parameters even under autocast."""
    total = layer.base_layer.weight.flatten(1)
    with torch.autocast(total.device.type, enabled=False):
        for name in active(layer):
            a, b = layer.lora_A[name].weight.flatten(1), layer.lora_B[name].weight.flatten(1)
            total = total + layer.scaling[name] * (b @ a)
    return total
