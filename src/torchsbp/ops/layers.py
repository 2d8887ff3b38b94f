"""The layers a branch is made of, as pairs: forward, and backward from what forward was given.

Backward functions return ``None`` for gradients nobody needs. ``dtype`` is the precision of matrix products
(``None``: that of the operands), which is how autocast is spelled inside an autograd function.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

aten = torch.ops.aten

ACTIVATIONS = ("gelu", "gelu_tanh", "quick_gelu", "silu", "relu")

Grad = Tensor | None


class Norm(NamedTuple):
    """Static part of a normalisation over the last dimension: its kind and epsilon."""

    eps: float = 1e-6
    kind: str = "layer"


class Backward(NamedTuple):
    """How the backward pass of a branch is taken."""

    scope: str = "branch"
    recompute: bool = True
    weight_scale: float = 1.0


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """The precision autocast gives to matrix products of ``x``, ``None`` outside autocast."""
    device = x.device.type
    if x.dtype == torch.float64 or not torch.is_autocast_enabled(device):
        return None
    return torch.get_autocast_dtype(device)


def saved_dtype(x: Tensor, dtype: torch.dtype | None, recompute: bool) -> torch.dtype:
    """In which x is saved: where memory comes first, float32 residual streams of bfloat16 models are rounded."""
    rounds = recompute and dtype == torch.bfloat16 and x.dtype == torch.float32
    return torch.bfloat16 if rounds else x.dtype


def cast(x: Tensor, dtype: torch.dtype | None) -> Tensor:
    return x if dtype is None else x.to(dtype)


def linear(x: Tensor, weight: Tensor, bias: Grad, dtype: torch.dtype | None) -> Tensor:
    """``x Wᵀ + b``."""
    return F.linear(cast(x, dtype), cast(weight, dtype), None if bias is None else cast(bias, dtype))


def weight_gradient(dy: Tensor, x: Tensor, weight: Tensor, need: bool = True) -> Grad:
    """``dW = dyᵀ x`` (Eq. 3) for 2-D dy and x, in the precision of the weight.

    Half-precision products on a GPU are given in float32 as they are summed, without a rounding in between.
    """
    if not need:
        return None
    if dy.is_cuda and dy.dtype in (torch.float16, torch.bfloat16) and weight.dtype == torch.float32:
        return torch.mm(dy.t(), x, out_dtype=torch.float32)
    return (dy.t() @ x).to(weight.dtype)


def last_layer_gradients(
    product: Grad, total: Tensor, weight: Tensor, bias: Grad, scale: Grad, needs: Sequence[bool]
) -> tuple[Grad, Grad, Grad]:
    """Gradients of (W, b, γ) of ``y = γ ∘ (x Wᵀ + b)`` from ``dyᵀ x`` and ``Σ dy``; ``needs`` for them.

    The output of the linear layer is not needed for γ: ``dγ = rowsum(W ∘ (dyᵀ x)) + b ∘ Σ dy``, from the product that
    ``dW = γ ∘ (dyᵀ x)`` takes anyway.
    """
    if scale is None:
        return product, total, None
    total = total.to(weight.dtype)
    dscale = None
    if needs[2]:
        assert product is not None
        dscale = torch.linalg.vecdot(weight, product)
        dscale = dscale if bias is None else dscale + bias * total
    dw = scale[:, None] * product if needs[0] and product is not None else None
    return dw, scale * total, dscale


def parameter_gradients(
    grads: Sequence[Grad], params: Sequence[Grad], needs: Sequence[bool], weight_scale: float
) -> list[Grad]:
    """Those that are needed, in the precision of their parameters and times 1/r if ``scale="weight"``."""
    found: list[Grad] = []
    for grad, param, need in zip(grads, params, needs, strict=True):
        if not need or grad is None or param is None:
            found.append(None)
        else:
            found.append((grad if weight_scale == 1 else grad * weight_scale).to(param.dtype))
    return found


def norm(x: Tensor, weight: Grad, bias: Grad, static: Norm, dtype: torch.dtype | None = None) -> Tensor:
    """LayerNorm or RMSNorm over the last dimension, in the precision of its weight, given in ``dtype``."""
    x = x if weight is None else x.to(weight.dtype)
    if static.kind == "rms":
        return cast(F.rms_norm(x, x.shape[-1:], weight, static.eps), dtype)
    return cast(F.layer_norm(x, x.shape[-1:], weight, bias, static.eps), dtype)


class Normed(NamedTuple):
    """A norm computed for backward: its output, and what its own backward needs."""

    y: Tensor
    x: Tensor
    mean: Grad
    rstd: Tensor


def norm_again(x: Tensor, weight: Grad, bias: Grad, static: Norm, dtype: torch.dtype | None) -> Normed:
    """``norm`` once more in backward, with its statistics."""
    x = x if weight is None else x.to(weight.dtype)
    if static.kind == "rms":
        eps = torch.finfo(x.dtype).eps if static.eps is None else static.eps
        wide = x.float() if x.dtype == torch.float16 else x  # squares overflow in half precision
        rstd = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        return Normed(norm(x, weight, bias, static, dtype), wide, None, rstd)
    y, mean, rstd = aten.native_layer_norm(x, [x.shape[-1]], weight, bias, static.eps)
    return Normed(cast(y, dtype), x, mean, rstd)


def norm_backward(
    dy: Tensor, n: Normed, weight: Grad, bias: Grad, static: Norm, needs: Sequence[bool]
) -> tuple[Tensor, Grad, Grad]:
    """Gradients of (x, weight, bias); ``needs`` for (weight, bias)."""
    dy = dy.to(n.x.dtype)
    if static.kind == "rms":
        return (*_rms_norm_backward(dy, n, weight, needs[0]), None)
    mask = [True, needs[0], needs[1]]
    shape = [n.x.shape[-1]]
    dx, dw, db = aten.native_layer_norm_backward(dy, n.x, shape, n.mean, n.rstd, weight, bias, mask)
    return dx, dw if needs[0] else None, db if needs[1] else None


def _rms_norm_backward(dy: Tensor, n: Normed, weight: Grad, need: bool) -> tuple[Tensor, Grad]:
    """With x̂ = x / rms(x) and g = dy ∘ w: ``dx = (g − x̂ mean(g ∘ x̂)) / rms(x)``, ``dw = Σ dy ∘ x̂``."""
    unit = n.x * n.rstd
    g = dy if weight is None else dy * weight
    dx = (g - unit * (g * unit).mean(-1, keepdim=True)) * n.rstd
    return dx, (dy * unit).flatten(0, -2).sum(0) if need else None


def activation(x: Tensor, name: str) -> Tensor:
    if name == "gelu":
        return F.gelu(x)
    if name == "gelu_tanh":
        return F.gelu(x, approximate="tanh")
    if name == "quick_gelu":
        return x * torch.sigmoid(1.702 * x)
    if name == "silu":
        return F.silu(x)
    assert name == "relu", name
    return F.relu(x)


def activation_backward(dy: Tensor, x: Tensor, name: str) -> Tensor:
    if name == "gelu":
        return aten.gelu_backward(dy, x)
    if name == "gelu_tanh":
        return aten.gelu_backward(dy, x, approximate="tanh")
    if name == "quick_gelu":
        s = torch.sigmoid(1.702 * x)
        return dy * s * (1 + 1.702 * x * (1 - s))
    if name == "silu":
        return aten.silu_backward(dy, x)
    assert name == "relu", name
    return aten.threshold_backward(dy, x, 0)
