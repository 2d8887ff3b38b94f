"""The memory-bound steps of backward, each one pass over its rows.

Written plainly here, which is the definition and what runs on CPU or in float64; on a CUDA device the Triton kernels of
``kernels.py`` run instead. ``dtype`` is the precision of matrix products, ``rows`` the kept rows (None: all, in order).
"""

from collections.abc import Sequence
from functools import cache
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor

from . import rows as R
from .layers import Grad, Norm, Normed, activation, activation_backward, cast, norm_again
from .layers import norm_backward as plain_norm_backward

SINGLE_OR_HALF = (torch.float32, torch.bfloat16, torch.float16)
WIDEST = 8192  # a kernel holds one row at a time


class Cotangent(NamedTuple):
    """Of a branch's last layer ``γ ∘ (x Wᵀ + b)``, on kept rows: as it is, times γ, and summed over rows."""

    dy: Tensor
    dz: Tensor
    total: Tensor


@cache
def _kernels() -> ModuleType | None:
    try:
        from . import kernels
    except ImportError:  # no Triton: the plain steps run
        return None
    return kernels


def kernels_for(x: Tensor) -> ModuleType | None:
    """The Triton kernels where they apply to x, else None."""
    if not x.is_cuda or x.dtype not in SINGLE_OR_HALF or x.shape[-1] > WIDEST or x.numel() == 0:
        return None
    return _kernels()


def cotangent(
    dy: Tensor, rows: R.Rows, factor: Tensor | None, scale: Grad, samples: int, dtype: torch.dtype
) -> Cotangent:
    """From ``dy [R, C]``: kept rows times the factor of their sample, in ``dtype``."""
    if kernels := kernels_for(dy):
        return Cotangent(*kernels.cotangent(dy, rows, factor, scale, samples, dtype))
    kept = R.per_sample(R.take(dy, rows), factor)
    half = cast(kept, dtype)
    return Cotangent(half, half if scale is None else cast(kept * scale, dtype), kept.sum(0))


def normalise(
    x: Tensor,
    weight: Grad,
    bias: Grad,
    static: Norm,
    dtype: torch.dtype | None,
    *,
    rows: R.Rows = None,
    branch: Grad = None,
    scale: Grad = None,
    factor: Tensor | None = None,
    samples: int = 1,
) -> Normed:
    """The norm of ``x[rows] + factor · scale ∘ branch``, with what its backward needs; x ``[R, C]``."""
    if kernels := kernels_for(x):
        return Normed(*kernels.normalise(x, weight, bias, static, dtype, rows, branch, scale, factor, samples))
    x = R.take(x, rows)
    if branch is not None:
        x = x + R.per_sample(branch if scale is None else branch * scale, factor)
    return norm_again(x, weight, bias, static, dtype)


def activation_step(h: Tensor, dg: Tensor, name: str, own: bool) -> tuple[Tensor, Tensor, Tensor]:
    """For ``g = act(h)``: g, dh and Σ dh over rows. dg is overwritten, and h too if it is our own."""
    if kernels := kernels_for(h):
        return kernels.activation_step(h, dg, name, own)
    g, dh = activation(h, name), activation_backward(dg, h, name)
    return g, dh, dh.sum(0)


def norm_backward(
    dn: Tensor,
    n: Normed,
    weight: Grad,
    bias: Grad,
    static: Norm,
    needs: Sequence[bool],
    residual: Grad = None,
    rows: R.Rows = None,
) -> tuple[Tensor, Grad, Grad]:
    """Gradients of (x, weight, bias); ``residual[rows]`` is added to the first and gives its precision."""
    dtype = n.x.dtype if residual is None else residual.dtype
    if kernels := kernels_for(dn):
        return kernels.norm_backward(dn, n, weight, bias, static, needs, dtype, base=residual, base_rows=rows)
    dx, dw, db = plain_norm_backward(dn, n, weight, bias, static, needs)
    return (dx if residual is None else R.take(residual, rows) + dx).to(dtype), dw, db


def norm_backward_spread(
    dn: Tensor,
    n: Normed,
    weight: Grad,
    bias: Grad,
    static: Norm,
    needs: Sequence[bool],
    rows: Tensor,
    size: int,
    dtype: torch.dtype,
    *,
    dn_kept: Grad = None,
    kept: Grad = None,
    base: Grad = None,
    gated: bool = False,
) -> tuple[Tensor, Grad, Grad]:
    """``norm_backward`` with a result of all ``size`` rows, and the residual path added to it.

    ``dn`` and ``n`` have the kept rows alone; or, if ``dn_kept`` is given, which is added to dn at the kept rows, all
    rows. The residual path brings ``kept`` at kept rows, or ``base`` if that is None; ``base`` elsewhere, unless gated.
    """
    if kernels := kernels_for(dn):
        return kernels.norm_backward(
            dn, n, weight, bias, static, needs, dtype,
            rows=rows, size=size, dn_kept=dn_kept, kept=kept, base=base, gated=gated,
        )  # fmt: skip
    if dn_kept is not None:
        dn = dn.index_add(0, rows, dn_kept.to(dn.dtype))
    dx, dw, db = plain_norm_backward(dn, n, weight, bias, static, needs)
    elsewhere = None if gated else base
    out = dx.new_zeros(size, dx.shape[1], dtype=dtype) if elsewhere is None else elsewhere.to(dtype)
    kept = R.take(base, rows) if kept is None and base is not None else kept
    if dn_kept is None:
        return out.index_copy(0, rows, (dx if kept is None else kept + dx).to(dtype)), dw, db
    assert kept is not None
    return out.index_copy(0, rows, kept.to(dtype)) + dx.to(dtype), dw, db
