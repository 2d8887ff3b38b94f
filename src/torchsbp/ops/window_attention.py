"""Softmax attention in windows of a grid, ``softmax(Q Kᵀ · scale + bias + mask) V``, and its backward from kept rows.

Rows stay where they are: a ``Cut`` says which of them meet in a window, so that a shifted or padded grid is neither
rolled nor copied. Backward recomputes ``P = exp(Q Kᵀ · scale + bias + mask − L)`` from the log-sum-exp L of the given
queries, as in ``sdpa``. Slots outside of the grid are padding: no queries, but keys and values.

``WindowAttention`` writes this plainly: that is its definition, and what runs on CPU and in float64. On a CUDA device
``window_launches.KernelWindowAttention`` stands in for it. Shapes: Q ``[B, H, k, D]``, K and V ``[B, H, m, D]``, L
``[B, H, k]``, bias ``[H, area, area]``, the key and value of padding ``[H, D]``.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from .layers import Grad, wide

MASKED = -100.0  # what every library adds to a score across regions


class Cut(NamedTuple):
    """How the n rows of every sample are cut into nW windows.

    - ``places``: the row in every slot, ``[nW, area]``; n, n + 1, … for padding. None: there are no windows.
    - ``regions``: numbers ``[nW, area]``; slots with unequal ones are masked for each other. None: all see each other.
    - ``slots``: the kept slots of every window, ``[B, nW, k]``, or ``[1, nW, k]`` where samples share them. None: all
      are kept, or windows keep unequal numbers of them.
    - ``kept``: the places of these slots among the kept rows of their sample, ``[nW, k]``; padding comes behind them.
    """

    places: Grad = None
    regions: Grad = None
    slots: Grad = None
    kept: Grad = None


NO_WINDOWS = Cut()


def all_slots(cut: Cut) -> Cut:
    """The same windows with all slots kept."""
    return Cut(cut.places, cut.regions)


def one_window(n: int, rows: Grad, samples: int, device: torch.device) -> Cut:
    """All n rows of every sample in one window, of which ``rows`` are kept."""
    places = torch.arange(n, device=device).unsqueeze(0)
    if rows is None:
        return Cut(places)
    slots = rows.view(samples, 1, -1) % n
    return Cut(places, None, slots, places[:, : slots.shape[2]])


class Padding(NamedTuple):
    """The key and the value of every slot of padding; or their gradients."""

    k: Tensor
    v: Tensor


class WindowGradients(NamedTuple):
    """Gradients of the given rows of Q, K and V, of the bias if it is needed, and of padding if there is any."""

    q: Tensor
    k: Tensor
    v: Tensor
    bias: Grad = None
    padding: Padding | None = None


class WindowAttention:
    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor, padding: Padding | None, cut: Cut, scale: float
    ) -> tuple[Tensor, Tensor]:
        """O and L of all rows."""
        places, n = cut.places, q.shape[2]
        assert places is not None
        q, k, v = gather(q, places), gather(k, places, padding and padding.k), gather(v, places, padding and padding.v)
        m = wide((q * scale) @ k.mT) + bias + mask(cut.regions, None, kept_keys=False)
        o, lse = m.softmax(-1).to(v.dtype) @ v, m.logsumexp(-1, keepdim=True)
        return scatter(o, places)[:, :, :n], scatter(lse, places)[:, :, :n, 0]

    def backward(
        self, do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor,
        bias: Tensor, padding: Padding | None, cut: Cut, scale: float, kept_keys: bool, needs_bias: bool,
    ) -> WindowGradients:  # fmt: skip
        """Gradients from kept queries, with the keys and values of all rows or (``kept_keys``) of kept ones."""
        kept_keys = kept_keys and cut.kept is not None
        queries = cut.places if cut.kept is None else cut.kept
        keys = cut.kept if kept_keys else cut.places
        padding = None if kept_keys else padding
        assert queries is not None
        assert keys is not None
        rows, columns = q.shape[2], k.shape[2]
        q, do, o = (gather(t, queries) for t in (q, do, o))
        k, v = gather(k, keys, padding and padding.k), gather(v, keys, padding and padding.v)
        lse = gather(lse.unsqueeze(-1), queries, lse.new_full((), torch.inf))  # no query, no probabilities
        m = wide((q * scale) @ k.mT) + bias_of_kept(bias, cut, kept_keys) + mask(cut.regions, cut.slots, kept_keys)
        p = torch.exp(m - lse)
        if kept_keys:
            p = p * (keys < columns)[:, None, None, :]
        p = p.to(q.dtype)
        ds = p * (do @ v.mT - (do * o).sum(-1, keepdim=True))
        dq, dk, dv = scatter(ds @ k * scale, queries), scatter(ds.mT @ q * scale, keys), scatter(p.mT @ do, keys)
        found = WindowGradients(dq[:, :, :rows], dk[:, :, :columns], dv[:, :, :columns])
        if needs_bias:
            found = found._replace(bias=bias_gradient(wide(ds), bias, cut, kept_keys))
        if padding is not None and keys.numel() > columns:
            found = found._replace(padding=Padding(*(d[:, :, columns:].sum((0, 2)) for d in (dk, dv))))
        return found


def gather(x: Tensor, table: Tensor, beyond: Grad = None) -> Tensor:
    """Rows of ``x [B, H, n, D]`` in windows, ``[B, nW, H, slots, D]``; ``beyond`` (default: zeros) from n on."""
    batch, heads, n, width = x.shape
    extra = table.numel() - n
    if extra:
        rest = x.new_zeros(()) if beyond is None else beyond.unsqueeze(-2) if beyond.dim() else beyond
        x = torch.cat([x, rest.to(x.dtype).expand(batch, heads, extra, width)], 2)
    return x.index_select(2, table.flatten()).unflatten(2, table.shape).transpose(1, 2)


def scatter(x: Tensor, table: Tensor) -> Tensor:
    """The inverse of ``gather``, with the rows from n on behind the others."""
    x = x.transpose(1, 2).flatten(2, 3)
    return torch.zeros_like(x).index_copy(2, table.flatten(), x)


def mask(regions: Grad, slots: Grad, kept_keys: bool) -> Tensor | float:
    """What is added to the scores of kept queries across regions, ``[1 or B, nW, 1, k, keys]``."""
    if regions is None:
        return 0.0
    keys = queries = regions.unsqueeze(0)
    if slots is not None:
        queries = keys.expand(slots.shape[0], -1, -1).gather(2, slots)
        keys = queries if kept_keys else keys
    return MASKED * (queries.unsqueeze(3) != keys.unsqueeze(2)).unsqueeze(2)


def pairs(slots: Tensor, area: int, kept_keys: bool) -> Tensor:
    """Where each (query, key) is in a flattened ``[area, area]`` map: ``[1 or B, nW, k, keys]``."""
    keys = slots if kept_keys else torch.arange(area, device=slots.device).expand(*slots.shape[:2], -1)
    return slots.unsqueeze(3) * area + keys.unsqueeze(2)


def bias_of_kept(bias: Tensor, cut: Cut, kept_keys: bool) -> Tensor:
    """The bias of kept queries, ``[1 or B, nW, H, k, keys]``."""
    if cut.slots is None:
        return bias
    index = pairs(cut.slots, bias.shape[-1], kept_keys)
    return bias.flatten(1).index_select(1, index.flatten()).unflatten(1, index.shape).movedim(0, 2)


def bias_gradient(ds: Tensor, bias: Tensor, cut: Cut, kept_keys: bool) -> Tensor:
    """The gradient of the bias from that of the scores, ``[B, nW, H, k, keys]``."""
    if cut.slots is None:
        return ds.sum((0, 1))
    index = pairs(cut.slots, bias.shape[-1], kept_keys)
    ds = ds.sum(0, keepdim=True) if index.shape[0] == 1 else ds
    total = ds.new_zeros(bias.shape[0], bias.shape[1] * bias.shape[2])
    return total.index_add(1, index.flatten(), ds.movedim(2, 0).flatten(1)).view(bias.shape)
