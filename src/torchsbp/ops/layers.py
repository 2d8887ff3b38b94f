"""The layers a branch is made of, as pairs: forward, and backward from what forward was given.

Backward functions return ``None`` for gradients nobody needs. ``dtype`` is the precision of matrix products
(``None``: that of the operands), which is how autocast is spelled inside an autograd function.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .compiling import compiling
from .rows import RowWeight

aten = torch.ops.aten

Grad = Tensor | None
PART = 2**24
"""elements at least of one part of a large tensor, so that a GPU stays busy with it"""


class Norm(NamedTuple):
    """Static part of a normalisation over the last dimension: its epsilon and kind, "layer", "rms", "unit" (divided by
    its length, times a weight, whose shape may be any that fits) or "none"."""

    eps: float = 1e-6
    kind: str = "layer"


NO_NORM = Norm(kind="none")
COSINE = Norm(1e-12, "unit")  # products of such are cosines


class BackwardOptions(NamedTuple):
    """How the backward pass of a branch is taken. ``row_weight`` multiplies the cotangent of its kept rows, not that of
    the residual path; ``weight_scale`` the gradients of its parameters. ``capture``: small passes may be graphs;
    ``spare``: memory comes first, so that compiled steps have large hidden layers in halves."""

    scope: str = "branch"
    recompute: bool = True
    weight_scale: float = 1.0
    row_weight: RowWeight | None = None
    capture: bool = True
    spare: bool = True


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
    return x if dtype is None or x.dtype == dtype else x.to(dtype)  # to itself takes longer than the question


def linear(x: Tensor, weight: Tensor, bias: Grad, dtype: torch.dtype | None) -> Tensor:
    """``x Wᵀ + b``."""
    if dtype is None:
        return F.linear(x, weight, bias)
    return F.linear(cast(x, dtype), cast(weight, dtype), None if bias is None else cast(bias, dtype))


def stacked(weights: Sequence[Tensor]) -> Tensor:
    """Weights of layers on one input as that of one layer."""
    return weights[0] if len(weights) == 1 else torch.cat(list(weights))


def apart(gradient: Any, weights: Sequence[Tensor]) -> Sequence[Any]:
    """The gradients of such weights from that of the one."""
    if gradient is None or len(weights) == 1:
        return [gradient] * len(weights)
    return gradient.split_with_sizes([weight.shape[0] for weight in weights])


class LastLayer(NamedTuple):
    """Gradients of a branch's last layer ``γ ∘ (x Wᵀ + b)``."""

    weight: Any
    bias: Grad
    scale: Grad


def last_layer_gradients(product: Grad, total: Tensor, weight: Tensor, bias: Grad, scale: Grad) -> LastLayer:
    """Gradients of (W, b, γ) from ``product = dyᵀ x`` (None where neither W nor γ is trained) and ``total = Σ dy``.

    The output of the linear layer is not needed for γ: ``dγ = rowsum(W ∘ (dyᵀ x)) + b ∘ Σ dy``, from the product that
    ``dW = γ ∘ (dyᵀ x)`` takes anyway.
    """
    if scale is None:
        return LastLayer(product, total, None)
    total = total.to(weight.dtype)
    if product is None:
        return LastLayer(None, scale * total, None)
    dscale = torch.linalg.vecdot(weight, product)
    dscale = dscale if bias is None else dscale + bias * total
    return LastLayer(scale[:, None] * product, scale * total, dscale)


def norm_columns(static: Norm, channels: int) -> int:
    """Of a norm's totals, weight and bias."""
    return 0 if static.kind == "none" else 2 * channels


def parameter_gradients(
    grads: Sequence[Grad], params: Sequence[Grad], needs: Sequence[bool], weight_scale: float
) -> list[Grad]:
    """Those that are needed, in the precision of their parameters and times 1/r if ``scale="weight"``."""
    return [
        None
        if not need or grad is None or param is None
        else cast(grad if weight_scale == 1 else grad * weight_scale, param.dtype)
        for grad, param, need in zip(grads, params, needs, strict=True)
    ]


def norm(x: Tensor, weight: Grad, bias: Grad, static: Norm, dtype: torch.dtype | None = None) -> Tensor:
    """The normalisation over the last dimension, in the precision of its weight, given in ``dtype``."""
    if static.kind == "none":
        return cast(x, dtype)
    x = x if weight is None else cast(x, weight.dtype)
    if static.kind == "unit":
        return _unit(x, weight, static.eps, dtype).y
    if static.kind == "rms":
        return cast(F.rms_norm(x, x.shape[-1:], weight, static.eps), dtype)
    return cast(F.layer_norm(x, x.shape[-1:], weight, bias, static.eps), dtype)


def norm_over(x: Tensor, weight: Grad, bias: Grad, static: Norm, dtype: torch.dtype | None) -> Tensor:
    """``norm`` of x, which is lost. It is wider than a half-precision x: then part by part, in the place of x."""
    if weight is None or weight.dtype == x.dtype or dtype != x.dtype or compiling():
        return norm(x, weight, bias, static, dtype)
    for part in x.view(-1, x.shape[-1]).chunk(max(1, x.numel() // PART)):
        part.copy_(norm(part, weight, bias, static))
    return x


class Normed(NamedTuple):
    """A norm computed for backward: its output, what its own backward needs, and some rows of the output apart."""

    y: Tensor
    x: Tensor
    mean: Grad
    rstd: Grad
    y_kept: Any = None

    def without_output(self) -> "Normed":
        """What its backward needs."""
        return self._replace(y=self.x, y_kept=None)


def norm_again(x: Tensor, weight: Grad, bias: Grad, static: Norm, dtype: torch.dtype | None) -> Normed:
    """``norm`` once more in backward, with its statistics."""
    if static.kind == "none":
        return Normed(cast(x, dtype), x, None, None)
    x = x if weight is None else cast(x, weight.dtype)
    if static.kind == "unit":
        return _unit(x, weight, static.eps, dtype)
    if static.kind == "rms":
        eps = torch.finfo(x.dtype).eps if static.eps is None else static.eps
        wide = x.float() if x.dtype == torch.float16 else x  # squares overflow in half precision
        rstd = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        return Normed(norm(x, weight, bias, static, dtype), wide, None, rstd)
    y, mean, rstd = aten.native_layer_norm(x, [x.shape[-1]], weight, bias, static.eps)
    return Normed(cast(y, dtype), x, mean, rstd)


def _unit(x: Tensor, weight: Grad, eps: float, dtype: torch.dtype | None) -> Normed:
    """``w ∘ x / |x|``."""
    wide = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
    rstd = wide.norm(dim=-1, keepdim=True).clamp_min(eps).reciprocal()
    y = wide * rstd
    return Normed(cast(y if weight is None else y * weight, dtype or x.dtype), wide, None, rstd)


class NormGradients(NamedTuple):
    """Of a norm's input and its parameters."""

    x: Tensor
    weight: Grad
    bias: Grad


def norm_backward(
    dy: Tensor, n: Normed, weight: Grad, bias: Grad, static: Norm, needs_weight: bool, needs_bias: bool
) -> NormGradients:
    """From ``dy`` and what ``norm_again`` gave."""
    if static.kind == "none":
        return NormGradients(dy, None, None)
    dy = dy.to(n.x.dtype)
    if static.kind != "layer":
        return _uncentred_norm_backward(dy, n, weight, static, needs_weight)
    mask, shape = [True, needs_weight, needs_bias], [n.x.shape[-1]]
    dx, dw, db = aten.native_layer_norm_backward(dy, n.x, shape, n.mean, n.rstd, weight, bias, mask)
    return NormGradients(dx, dw if needs_weight else None, db if needs_bias else None)


def _uncentred_norm_backward(dy: Tensor, n: Normed, weight: Grad, static: Norm, needs_weight: bool) -> NormGradients:
    """With x̂ = x / rms(x) and g = dy ∘ w: ``dx = (g − x̂ mean(g ∘ x̂)) / rms(x)``, ``dw = Σ dy ∘ x̂``. Of a unit, whose
    x̂ is x / |x|, the sum instead of the mean."""
    assert n.rstd is not None
    unit = n.x * n.rstd
    g = dy if weight is None else dy * weight
    along = (g * unit).mean(-1, keepdim=True) if static.kind == "rms" else torch.linalg.vecdot(g, unit).unsqueeze(-1)
    dw = (dy * unit).sum_to_size(weight.shape) if needs_weight and weight is not None else None
    return NormGradients((g - unit * along) * n.rstd, dw, None)
