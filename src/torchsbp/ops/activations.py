"""Activations: each with its derivative and the modules that compute it. To add one, this is the only file to change.

The Triton kernel knows some of them (``kernel_steps.ACTIVATION_CODES``); the others run as written here on a GPU too.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .compiling import compiling

aten = torch.ops.aten


class Activation(NamedTuple):
    """``y = forward(x)``, ``dx = backward(dy, x)``; ``modules`` names the module classes that compute it. ``over`` is a
    forward in less memory, which may overwrite x and return y in its place."""

    name: str
    forward: Callable[[Tensor], Tensor]
    backward: Callable[[Tensor, Tensor], Tensor]
    modules: tuple[str, ...]
    over: Callable[[Tensor], Tensor] | None = None


def gelu_tanh(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


def gelu_tanh_over(x: Tensor) -> Tensor:
    return aten.gelu_(x, approximate="tanh")


def gelu_tanh_backward(dy: Tensor, x: Tensor) -> Tensor:
    return aten.gelu_backward(dy, x, approximate="tanh")


def quick_gelu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(1.702 * x)


def quick_gelu_over(x: Tensor) -> Tensor:
    return x.mul_((1.702 * x).sigmoid_())


def quick_gelu_backward(dy: Tensor, x: Tensor) -> Tensor:
    s = torch.sigmoid(1.702 * x)
    return dy * s * (1 + 1.702 * x * (1 - s))


def relu_backward(dy: Tensor, x: Tensor) -> Tensor:
    return aten.threshold_backward(dy, x, 0)


ACTIVATIONS = {
    activation.name: activation
    for activation in (
        Activation(
            "gelu",
            F.gelu,
            aten.gelu_backward,
            (
                "torch.nn.modules.activation.GELU",
                "timm.layers.activations.GELU",
                "transformers.activations.GELUActivation",
            ),
            aten.gelu_,
        ),
        Activation(
            "gelu_tanh",
            gelu_tanh,
            gelu_tanh_backward,
            ("timm.layers.activations.GELUTanh", "transformers.activations.GELUTanh"),
            gelu_tanh_over,
        ),
        Activation(
            "quick_gelu",
            quick_gelu,
            quick_gelu_backward,
            ("timm.layers.activations.QuickGELU", "transformers.activations.QuickGELUActivation"),
            quick_gelu_over,
        ),
        Activation(
            "silu",
            F.silu,
            aten.silu_backward,
            ("torch.nn.modules.activation.SiLU", "transformers.activations.SiLUActivation"),
            aten.silu_,
        ),
        Activation("relu", F.relu, relu_backward, ("torch.nn.modules.activation.ReLU",), torch.relu_),
    )
}


GATED = "gated "
"""Prefix of an activation's name: ``g = act(a) ∘ b`` for a hidden layer (a, b), which is twice as wide as g."""


def activation_named(name: str) -> Activation:
    """Return the activation of that name from the registry; with the prefix ``GATED``, as a gate."""
    return gated(ACTIVATIONS[name.removeprefix(GATED)]) if name.startswith(GATED) else ACTIVATIONS[name]


def activate(h: Tensor, name: str, overwrite: bool) -> Tensor:
    """Apply the activation of that name, in less memory if h may be overwritten."""
    act = activation_named(name)
    return act.forward(h) if act.over is None or not overwrite or compiling() else act.over(h)


def gated(act: Activation) -> Activation:
    def forward(x: Tensor) -> Tensor:
        a, b = x.chunk(2, -1)
        return act.forward(a) * b

    def over(x: Tensor) -> Tensor:
        a, b = x.chunk(2, -1)
        return act.forward(a).mul_(b)

    def backward(dy: Tensor, x: Tensor) -> Tensor:
        a, b = x.chunk(2, -1)
        return torch.cat([act.backward(dy * b, a), dy * act.forward(a)], -1)

    return Activation(GATED + act.name, forward, backward, (), over)


def activation_of(module: nn.Module) -> str | None:
    """Return the name of the activation that a module computes, or None if the registry has none for it."""
    cls = type(module)
    qualified = f"{cls.__module__}.{cls.__qualname__}"
    for name, activation in ACTIVATIONS.items():
        if qualified in activation.modules:
            tanh = name == "gelu" and getattr(module, "approximate", "none") == "tanh"
            return "gelu_tanh" if tanh else name
    return None
