"""The layers that a branch is made of, in pairs: forward, and backward from what forward was given.

Backward functions return ``None`` for gradients nobody needs. ``dtype`` is the precision of matrix products (``None``:
that of the operands): an op reads it from autocast in forward and passes it on, as backward runs outside of autocast.
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
HALF = (torch.float16, torch.bfloat16)
PART = 2**24
"""A large tensor that is taken in parts has at least so many elements in each, so that a GPU stays busy."""


class Norm(NamedTuple):
    """The static part of a normalisation over the last dimension. ``kind`` is "layer", "rms", "none", or "unit": x
    divided by its length, times a weight of any shape that broadcasts to x."""

    eps: float = 1e-6
    kind: str = "layer"


NO_NORM = Norm(kind="none")
COSINE = Norm(1e-12, "unit")  # of queries and keys: their products are cosines


class BackwardOptions(NamedTuple):
    """How an op runs its backward pass. ``scope`` is what is gated: a "branch", or a "block" with its residual path.
    ``recompute``: activations are recomputed instead of saved. ``row_weight`` multiplies the cotangent of the branch's
    kept rows, not that of the residual path; ``weight_scale`` the gradients of parameters. ``capture``: small passes
    may become CUDA graphs. ``spare``: memory comes first, so compiled steps take large hidden layers in halves."""

    scope: str = "branch"
    recompute: bool = True
    weight_scale: float = 1.0
    row_weight: RowWeight | None = None
    capture: bool = True
    spare: bool = True


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """Return the precision that autocast gives to matrix products of ``x``, or ``None`` outside of autocast."""
    device = x.device.type
    if x.dtype == torch.float64 or not torch.is_autocast_enabled(device):
        return None
    return torch.get_autocast_dtype(device)


def saved_dtype(x: Tensor, dtype: torch.dtype | None, recompute: bool) -> torch.dtype:
    """Return the dtype in which x is saved. With ``recompute``, where memory comes first, a float32 residual stream
    under bfloat16 autocast is rounded to bfloat16."""
    rounds = recompute and dtype == torch.bfloat16 and x.dtype == torch.float32
    return torch.bfloat16 if rounds else x.dtype


def cast(x: Tensor, dtype: torch.dtype | None) -> Tensor:
    return x if dtype is None or x.dtype == dtype else x.to(dtype)  # x.to(x.dtype) takes longer than this test


def wide(x: Tensor) -> Tensor:
    """Half precision as float32."""
    return x.float() if x.dtype in HALF else x


def linear(x: Tensor, weight: Tensor, bias: Grad, dtype: torch.dtype | None) -> Tensor:
    """``x Wᵀ + b``."""
    if dtype is None:
        return F.linear(x, weight, bias)
    return F.linear(cast(x, dtype), cast(weight, dtype), None if bias is None else cast(bias, dtype))


def stacked(weights: Sequence[Tensor]) -> Tensor:
    """Return the weights of several layers with the same input as the weight of one layer."""
    return weights[0] if len(weights) == 1 else torch.cat(list(weights))


def apart(gradient: Any, weights: Sequence[Tensor]) -> Sequence[Any]:
    """Undo ``stacked`` for gradients: split that of the one layer into those of ``weights``."""
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

    γ does not need the output of the linear layer: ``dγ = rowsum(W ∘ (dyᵀ x)) + b ∘ Σ dy`` takes the product that
    ``dW = γ ∘ (dyᵀ x)`` needs anyway.
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
    """Count the columns of a norm's totals, those of its weight and bias."""
    return 0 if static.kind == "none" else 2 * channels


def parameter_gradients(
    grads: Sequence[Grad], params: Sequence[Grad], needs: Sequence[bool], weight_scale: float
) -> list[Grad]:
    """Return the gradients that are needed (None for the others), in the precision of their parameters and times
    ``weight_scale``: 1/r if ``scale="weight"``, else 1."""
    return [
        None
        if not need or grad is None or param is None
        else cast(grad if weight_scale == 1 else grad * weight_scale, param.dtype)
        for grad, param, need in zip(grads, params, needs, strict=True)
    ]


def norm(x: Tensor, weight: Grad, bias: Grad, static: Norm, dtype: torch.dtype | None = None) -> Tensor:
    """Normalise over the last dimension in the precision of the weight, and return the result in ``dtype``."""
    if static.kind == "none":
        return cast(x, dtype)
    x = x if weight is None else cast(x, weight.dtype)
    if static.kind == "unit":
        return _unit(x, weight, static.eps, dtype).y
    if static.kind == "rms":
        return cast(F.rms_norm(x, x.shape[-1:], weight, static.eps), dtype)
    return cast(F.layer_norm(x, x.shape[-1:], weight, bias, static.eps), dtype)


def norm_over(x: Tensor, weight: Grad, bias: Grad, static: Norm, dtype: torch.dtype | None) -> Tensor:
    """``norm`` of x, which may be overwritten. If the norm is wider than a half-precision x, it runs part by part, and
    each part of x is replaced by its result: no wide copy of all of x is made."""
    if weight is None or weight.dtype == x.dtype or dtype != x.dtype or compiling():
        return norm(x, weight, bias, static, dtype)
    for part in x.view(-1, x.shape[-1]).chunk(max(1, x.numel() // PART)):
        part.copy_(norm(part, weight, bias, static))
    return x


class Normed(NamedTuple):
    """A norm recomputed in backward: its output y, what its own backward needs (its input x, mean and one over the
    standard deviation), and some rows of the output, ``y_kept``."""

    y: Tensor
    x: Tensor
    mean: Grad
    rstd: Grad
    y_kept: Any = None

    def without_output(self) -> "Normed":
        """Drop the output, to free its memory: the norm's backward does not need it."""
        return self._replace(y=self.x, y_kept=None)


def norm_again(x: Tensor, weight: Grad, bias: Grad, static: Norm, dtype: torch.dtype | None) -> Normed:
    """Recompute ``norm`` in backward, with its statistics."""
    if static.kind == "none":
        return Normed(cast(x, dtype), x, None, None)
    x = x if weight is None else cast(x, weight.dtype)
    if static.kind == "unit":
        return _unit(x, weight, static.eps, dtype)
    if static.kind == "rms":
        eps = torch.finfo(x.dtype).eps if static.eps is None else static.eps
        y = norm(x, weight, bias, static, dtype)
        x = x.float() if x.dtype == torch.float16 else x  # squares overflow in half precision
        return Normed(y, x, None, torch.rsqrt(x.square().mean(-1, keepdim=True) + eps))
    y, mean, rstd = aten.native_layer_norm(x, [x.shape[-1]], weight, bias, static.eps)
    return Normed(cast(y, dtype), x, mean, rstd)


def _unit(x: Tensor, weight: Grad, eps: float, dtype: torch.dtype | None) -> Normed:
    """``w ∘ x / |x|``."""
    dtype, x = dtype or x.dtype, wide(x)
    rstd = x.norm(dim=-1, keepdim=True).clamp_min(eps).reciprocal()
    y = x * rstd
    return Normed(cast(y if weight is None else y * weight, dtype), x, None, rstd)


class NormGradients(NamedTuple):
    """Gradients of a norm's input and parameters."""

    x: Tensor
    weight: Grad
    bias: Grad


def norm_backward(
    dy: Tensor, n: Normed, weight: Grad, bias: Grad, static: Norm, needs_weight: bool, needs_bias: bool
) -> NormGradients:
    """Backward of ``norm``, from ``dy`` and the result of ``norm_again``."""
    if static.kind == "none":
        return NormGradients(dy, None, None)
    dy = dy.to(n.x.dtype)
    if static.kind != "layer":
        return _uncentred_norm_backward(dy, n, weight, static, needs_weight)
    mask, shape = [True, needs_weight, needs_bias], [n.x.shape[-1]]
    dx, dw, db = aten.native_layer_norm_backward(dy, n.x, shape, n.mean, n.rstd, weight, bias, mask)
    return NormGradients(dx, dw if needs_weight else None, db if needs_bias else None)


def _uncentred_norm_backward(dy: Tensor, n: Normed, weight: Grad, static: Norm, needs_weight: bool) -> NormGradients:
    """With x̂ = x / rms(x) and g = dy ∘ w: ``dx = (g − x̂ mean(g ∘ x̂)) / rms(x)``, ``dw = Σ dy ∘ x̂``. For kind "unit",
    |x| stands for rms(x) and the sum for the mean."""
    assert n.rstd is not None
    unit = n.x * n.rstd
    g = dy if weight is None else dy * weight
    along = (g * unit).mean(-1, keepdim=True) if static.kind == "rms" else torch.linalg.vecdot(g, unit).unsqueeze(-1)
    dw = (dy * unit).sum_to_size(weight.shape) if needs_weight and weight is not None else None
    return NormGradients((g - unit * along) * n.rstd, dw, None)
