"""The memory-bound steps of a backward pass, between its matrix products: each is one pass over its rows.

``Steps`` writes them in plain PyTorch: that is their definition, and what runs on CPU and in float64. On a CUDA device
``kernel_steps.KernelSteps`` stands in for them. Matrices are ``[rows, channels]``; ``rows`` are the kept rows (None:
all, in order); ``dtype`` is the precision of matrix products. Some steps also sum over their rows, for the gradient of
a bias or a norm: ``total`` is the name under which ``totals()`` returns that sum.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import rows as R
from .activations import activation_named
from .layers import Grad, Norm, Normed, cast, norm_again, norm_backward


class Affine(NamedTuple):
    """A normalisation layer: its parameters and its static part."""

    weight: Grad
    bias: Grad
    static: Norm


class Cotangent(NamedTuple):
    """The cotangent of a branch's last layer ``y = γ ∘ z``, ``z = x Wᵀ + b``, on kept rows: dy, and ``dz = γ ∘ dy``."""

    dy: Tensor
    dz: Tensor


class PostNormGradients(NamedTuple):
    """Gradients of the weight and bias of a norm behind a branch. ``total`` is its input's gradient summed over rows:
    the gradient of the last layer's bias."""

    weight: Grad = None
    bias: Grad = None
    total: Grad = None


def before_norm(dy: Cotangent, z: Tensor, norm: Affine) -> tuple[Cotangent, PostNormGradients]:
    """Backpropagate through a norm behind a branch to the branch's last layer, whose output is z."""
    n = norm_again(z, *norm, None)
    dz, dw, db = norm_backward(dy.dy, n, *norm, norm.weight is not None, norm.bias is not None)
    half = cast(dz, dy.dy.dtype)
    return Cotangent(half, half), PostNormGradients(dw, db, dz.sum(0))


class Steps:
    """The steps of one backward pass over rows like those of x; all its totals together have ``columns`` columns."""

    def __init__(self, x: Tensor, columns: int) -> None:
        self._totals: dict[str, Tensor] = {}

    def parts(self, count: int) -> list[Any]:
        """Return steps for each of ``count`` parts of the rows. Every part must leave the same totals."""
        return [Steps(torch.empty(0), 0) for _ in range(count)]

    def join(self, parts: Sequence[Any]) -> None:
        """Add up the totals of all parts."""
        for name in parts[0]._totals:
            self._totals[name] = sum(part._totals[name] for part in parts)

    def totals(self) -> dict[str, Tensor]:
        """Return the sums over rows that the steps have left, by name. A norm leaves ``<name>_weight`` and
        ``<name>_bias``, or nothing if its kind is "none"."""
        return self._totals

    def cotangent(
        self,
        dy: Tensor,
        rows: R.Rows,
        factor: Grad,
        scale: Grad,
        samples: int,
        dtype: torch.dtype,
        *,
        total: str,
        weight: R.Weight = None,
    ) -> Cotangent:
        """Return ``dy[rows]`` times row weights and the factor of their sample, and that times γ (``scale``). Total: Σ
        over rows without γ."""
        return self._cotangent(R.weighted(R.take(dy, rows), weight, samples), factor, scale, dtype, total)

    def _cotangent(self, kept: Tensor, factor: Grad, scale: Grad, dtype: torch.dtype, total: str) -> Cotangent:
        kept = R.per_sample(kept, factor)
        self._totals[total] = kept.sum(0)
        half = cast(kept, dtype)
        return Cotangent(half, half if scale is None else cast(kept * scale, dtype))

    def normalise(
        self,
        x: Tensor,
        norm: Affine,
        dtype: torch.dtype | None,
        *,
        after: Tensor,
        rows: R.Rows = None,
        branch: Grad = None,
        scale: Grad = None,
        factor: Grad = None,
        samples: int = 1,
        kept: R.Rows = None,
        inverse: Grad = None,
    ) -> Normed:
        """Normalise ``x[rows] + factor · scale ∘ branch`` and return the result with what its backward needs. It is
        made to depend on the cotangent ``after`` (``rows.after``). ``y_kept`` has the rows ``kept`` of the result,
        whose ``inverse`` may be given."""
        x = R.take(R.after(after, x), rows)
        if branch is None:
            n = norm_again(x, *norm, dtype)
            return n._replace(y_kept=R.take(n.y, kept))
        wide = x if norm.weight is None else x.to(norm.weight.dtype)
        wide = wide + R.per_sample(branch if scale is None else branch * scale, factor)
        n = norm_again(wide, *norm, dtype)
        return n._replace(x=wide.to(x.dtype), y_kept=R.take(n.y, kept))

    def activation(self, h: Tensor, dg: Tensor, name: str, overwrite: bool, *, total: str) -> tuple[Tensor, Tensor]:
        """Return ``g = act(h)`` and dh. dg may be overwritten; h too, if ``overwrite``. Total: Σ dh."""
        act = activation_named(name)
        g, dh = act.forward(h), act.backward(dg, h)
        self._totals[total] = dh.sum(0)
        return g, dh

    def stack(self, *parts: Tensor, apart: Grad = None, total: str) -> Tensor:
        """Put the columns of several matrices side by side. Total: Σ over their rows, preceded by Σ over the rows of
        ``apart``, a matrix that is not stacked."""
        stacked = torch.cat(parts, 1)
        found = stacked.sum(0)
        self._totals[total] = found if apart is None else torch.cat([apart.sum(0), found])
        return stacked

    def norm_backward_middle(
        self,
        dn: Tensor,
        n: Normed,
        norm: Affine,
        dy: Tensor,
        rows: R.Rows,
        factor: Grad,
        scale: Grad,
        samples: int,
        dtype: torch.dtype,
        *,
        norm_total: str,
        total: str,
        weight: R.Weight = None,
    ) -> tuple[Tensor, Cotangent]:
        """Return the gradient of the rows between two branches, ``dy[rows]`` + the norm's, and the cotangent of the
        branch below.

        In the cotangent, ``dy[rows]`` is multiplied by the row weight; the norm's gradient contains it already, from
        the branch above. Totals: gradients of the norm's weight and bias, Σ of the cotangent without γ.
        """
        kept, dx = R.take(dy, rows), self._norm_backward(dn, n, norm, norm_total)
        middle = kept + dx
        below = middle if weight is None else R.weighted(kept, weight, samples) + dx
        return middle, self._cotangent(below, factor, scale, dtype, total)

    def norm_backward_input(
        self,
        dn: Tensor,
        n: Normed,
        norm: Affine,
        dtype: torch.dtype,
        *,
        rows: R.Rows = None,
        inverse: Grad = None,
        size: int = 0,
        dn_kept: Grad = None,
        kept: Grad = None,
        base: Grad = None,
        gated: bool = False,
        norm_total: str,
        overwrite: bool = False,
    ) -> Tensor:
        """Return the gradient of an op's input on all ``size`` rows, in ``dtype``: the norm's plus the residual path's.

        ``dn`` and ``n`` hold the kept rows only; or, if ``dn_kept`` is given, all rows, and ``dn_kept`` is added to dn
        at the kept ones. The residual path contributes ``kept`` at kept rows (``base`` if that is None) and
        ``base`` at the others, or nothing there if ``gated``. ``inverse`` is that of ``rows`` if it is at hand. dn may
        be overwritten if ``overwrite``. Totals: gradients of the norm's weight and bias.
        """
        if rows is None:
            residual = base if kept is None else kept
            dx = self._norm_backward(dn, n, norm, norm_total)
            return (dx if residual is None else residual + dx).to(dtype)
        if dn_kept is not None:
            dn = dn.index_add(0, rows, dn_kept.to(dn.dtype))
        dx = self._norm_backward(dn, n, norm, norm_total)
        elsewhere = None if gated else base
        out = dx.new_zeros(size, dx.shape[1], dtype=dtype) if elsewhere is None else elsewhere.to(dtype)
        kept = R.take(base, rows) if kept is None and base is not None else kept
        if dn_kept is None:
            return out.index_copy(0, rows, (dx if kept is None else kept + dx).to(dtype))
        assert kept is not None
        return out.index_copy(0, rows, kept.to(dtype)) + dx.to(dtype)

    def _norm_backward(self, dn: Tensor, n: Normed, norm: Affine, total: str) -> Tensor:
        if norm.static.kind == "none":
            return dn
        dx, dw, db = norm_backward(dn, n, *norm, norm.weight is not None, norm.bias is not None)
        nothing = dx.new_zeros(dx.shape[1])
        self._totals[f"{total}_weight"] = nothing if dw is None else dw
        self._totals[f"{total}_bias"] = nothing if db is None else db
        return dx
