"""Triton kernels for the steps of ``fused.py``: the same functions, one launch each (plus a small sum over programs).

Every kernel walks over tiles of ``ROWS`` whole rows; sums over rows stay in registers until a program's last tile.
Arithmetic is in float32 whatever is stored.
"""

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .layers import ACTIVATIONS, Grad, Norm, Normed

ELEMENTS = 2048  # in one tile
PROGRAMS_PER_PROCESSOR = 8


@triton.jit
def _cotangent(
    dy, rows, factor, scale, half, scaled, sums, count, per_sample, C,
    HAS_ROWS: tl.constexpr, HAS_FACTOR: tl.constexpr, HAS_SCALE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    c = tl.arange(0, BLOCK)
    inside = c < C
    total = tl.zeros([ROWS, BLOCK], tl.float32)
    for start in range(tl.program_id(0) * ROWS, count, tl.num_programs(0) * ROWS):
        r = start + tl.arange(0, ROWS)
        here = (r < count)[:, None] & inside[None, :]
        source = tl.load(rows + r, r < count, 0) if HAS_ROWS else r.to(tl.int64)
        d = tl.load(dy + source[:, None] * C + c[None, :], here, 0.0).to(tl.float32)
        if HAS_FACTOR:
            d *= tl.load(factor + r // per_sample, r < count, 0.0).to(tl.float32)[:, None]
        total += d
        at = r.to(tl.int64)[:, None] * C + c[None, :]
        tl.store(half + at, d.to(half.dtype.element_ty), here)
        if HAS_SCALE:
            gamma = tl.load(scale + c, inside, 0.0).to(tl.float32)
            tl.store(scaled + at, (d * gamma[None, :]).to(scaled.dtype.element_ty), here)
    tl.store(sums + tl.program_id(0) * C + c, tl.sum(total, 0), inside)


def cotangent(
    dy: Tensor, rows: Grad, factor: Grad, scale: Grad, samples: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    dy = dy.contiguous()
    count, C = dy.shape[0] if rows is None else rows.shape[0], dy.shape[1]
    half = torch.empty(count, C, dtype=dtype, device=dy.device)
    scaled = half if scale is None else torch.empty_like(half)
    tile = Tiles(count, C, dy.device)
    sums = torch.empty(tile.programs, C, dtype=torch.float32, device=dy.device)
    _cotangent[(tile.programs,)](
        dy, rows, factor, scale, half, scaled, sums, count, count // samples, C,
        rows is not None, factor is not None, scale is not None, tile.rows, tile.block, num_warps=tile.warps,
    )  # fmt: skip
    return half, scaled, sums.sum(0)


@triton.jit
def _normalise(
    x, rows, branch, scale, factor, weight, bias, mid, y, mean, rstd, count, per_sample, C, eps,
    HAS_ROWS: tl.constexpr, HAS_BRANCH: tl.constexpr, HAS_SCALE: tl.constexpr, HAS_FACTOR: tl.constexpr,
    HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr, CENTRE: tl.constexpr, KEEP: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    c = tl.arange(0, BLOCK)
    inside = c < C
    for start in range(tl.program_id(0) * ROWS, count, tl.num_programs(0) * ROWS):
        r = start + tl.arange(0, ROWS)
        here = (r < count)[:, None] & inside[None, :]
        at = r.to(tl.int64)[:, None] * C + c[None, :]
        source = tl.load(rows + r, r < count, 0) if HAS_ROWS else r.to(tl.int64)
        value = tl.load(x + source[:, None] * C + c[None, :], here, 0.0).to(tl.float32)
        if HAS_BRANCH:
            b = tl.load(branch + at, here, 0.0).to(tl.float32)
            if HAS_SCALE:
                b *= tl.load(scale + c, inside, 0.0).to(tl.float32)[None, :]
            if HAS_FACTOR:
                b *= tl.load(factor + r // per_sample, r < count, 0.0).to(tl.float32)[:, None]
            value += b
        if KEEP:
            tl.store(mid + at, value.to(mid.dtype.element_ty), here)
        centred = value
        if CENTRE:
            average = tl.sum(value, 1) / C
            tl.store(mean + r, average, r < count)
            centred = tl.where(here, value - average[:, None], 0.0)
        inverse = tl.rsqrt(tl.sum(centred * centred, 1) / C + eps)
        tl.store(rstd + r, inverse, r < count)
        out = centred * inverse[:, None]
        if HAS_WEIGHT:
            out *= tl.load(weight + c, inside, 0.0).to(tl.float32)[None, :]
        if HAS_BIAS:
            out += tl.load(bias + c, inside, 0.0).to(tl.float32)[None, :]
        tl.store(y + at, out.to(y.dtype.element_ty), here)


def normalise(
    x: Tensor, weight: Grad, bias: Grad, static: Norm, dtype: torch.dtype | None,
    rows: Grad, branch: Grad, scale: Grad, factor: Grad, samples: int,
) -> tuple[Tensor, Tensor, Grad, Tensor]:  # fmt: skip
    x = x.contiguous()
    count, C = x.shape[0] if rows is None else rows.shape[0], x.shape[1]
    wide = x.dtype if weight is None else weight.dtype
    keep = rows is not None or branch is not None
    mid = torch.empty(count, C, dtype=x.dtype if branch is None else wide, device=x.device) if keep else x
    y = torch.empty(count, C, dtype=dtype or wide, device=x.device)
    rstd = torch.empty(count, dtype=torch.float32, device=x.device)
    mean = None if static.kind == "rms" else torch.empty_like(rstd)
    tile = Tiles(count, C, x.device)
    _normalise[(tile.programs,)](
        x, rows, branch, scale, factor, weight, bias, mid, y, mean, rstd, count, count // samples, C, eps_of(x, static),
        rows is not None, branch is not None, scale is not None, factor is not None,
        weight is not None, bias is not None, mean is not None, keep,
        tile.rows, tile.block, num_warps=tile.warps,
    )  # fmt: skip
    return y, mid, mean, rstd


def eps_of(x: Tensor, static: Norm) -> float:
    return torch.finfo(x.dtype).eps if static.eps is None else static.eps


@triton.jit
def _activation(
    h, dg, g, sums, count, H, ACT: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """ACT is the index in ``ACTIVATIONS``."""
    c = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = c < H
    total = tl.zeros([ROWS, BLOCK], tl.float32)
    for start in range(tl.program_id(1) * ROWS, count, tl.num_programs(1) * ROWS):
        r = start + tl.arange(0, ROWS)
        here = (r < count)[:, None] & inside[None, :]
        at = r.to(tl.int64)[:, None] * H + c[None, :]
        a = tl.load(h + at, here, 0.0).to(tl.float32)
        d = tl.load(dg + at, here, 0.0).to(tl.float32)
        if ACT == 0:
            cdf = 0.5 * (1.0 + tl.erf(a * 0.7071067811865476))
            value = a * cdf
            slope = cdf + a * 0.3989422804014327 * tl.exp(-0.5 * a * a)
        elif ACT == 1:
            s = tl.sigmoid(1.5957691216057308 * (a + 0.044715 * a * a * a))
            value = a * s
            slope = s + a * s * (1.0 - s) * 1.5957691216057308 * (1.0 + 0.134145 * a * a)
        elif ACT == 2:
            s = tl.sigmoid(1.702 * a)
            value = a * s
            slope = s * (1.0 + 1.702 * a * (1.0 - s))
        elif ACT == 3:
            s = tl.sigmoid(a)
            value = a * s
            slope = s * (1.0 + a * (1.0 - s))
        else:
            value = tl.maximum(a, 0.0)
            slope = tl.where(a > 0, 1.0, 0.0)
        d *= slope
        total += d
        tl.store(g + at, value.to(g.dtype.element_ty), here)
        tl.store(dg + at, d.to(dg.dtype.element_ty), here)
    tl.store(sums + tl.program_id(1).to(tl.int64) * H + c, tl.sum(total, 0), inside)


def activation_step(h: Tensor, dg: Tensor, name: str, own: bool) -> tuple[Tensor, Tensor, Tensor]:
    h, dg = h.contiguous(), dg.contiguous()
    count, H = h.shape
    g = h if own else torch.empty_like(h)
    block, rows = 256, 8
    columns = triton.cdiv(H, block)
    programs = min(triton.cdiv(count, rows), max(1, PROGRAMS_PER_PROCESSOR * processors(h.device) // columns))
    sums = torch.empty(programs, H, dtype=torch.float32, device=h.device)
    _activation[(columns, programs)](h, dg, g, sums, count, H, ACTIVATIONS.index(name), rows, block, num_warps=4)
    return g, dg, sums.sum(0)


@triton.jit
def _norm_backward(
    dn, dn_kept, x, mean, rstd, weight, kept, base, base_rows, places, dx, sums, size, C,
    HAS_DN_KEPT: tl.constexpr, HAS_WEIGHT: tl.constexpr, CENTRE: tl.constexpr, HAS_KEPT: tl.constexpr,
    HAS_BASE: tl.constexpr, HAS_BASE_ROWS: tl.constexpr, HAS_PLACES: tl.constexpr, DENSE: tl.constexpr,
    GATED: tl.constexpr, SUMS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Row i of the result; its place among the kept rows is ``places[i]``, -1 if it is not kept."""
    c = tl.arange(0, BLOCK)
    inside = c < C
    w = tl.load(weight + c, inside, 0.0).to(tl.float32)[None, :] if HAS_WEIGHT else tl.full([1, BLOCK], 1.0, tl.float32)
    weight_sum = tl.zeros([ROWS, BLOCK], tl.float32)
    bias_sum = tl.zeros([ROWS, BLOCK], tl.float32)
    for start in range(tl.program_id(0) * ROWS, size, tl.num_programs(0) * ROWS):
        i = start + tl.arange(0, ROWS)
        i_inside = i < size
        i_at = i.to(tl.int64)[:, None] * C + c[None, :]
        place = tl.load(places + i, i_inside, -1).to(tl.int64) if HAS_PLACES else i.to(tl.int64)
        is_kept = i_inside & (place >= 0)
        kept_at = place[:, None] * C + c[None, :]
        kept_here = is_kept[:, None] & inside[None, :]
        here = i_inside[:, None] & inside[None, :]

        n = i if DENSE else place
        n_inside = i_inside if DENSE else is_kept
        n_at = i_at if DENSE else kept_at
        n_here = here if DENSE else kept_here
        d = tl.load(dn + n_at, n_here, 0.0).to(tl.float32)
        if HAS_DN_KEPT:
            d += tl.load(dn_kept + kept_at, kept_here, 0.0).to(tl.float32)
        unit = tl.load(x + n_at, n_here, 0.0).to(tl.float32)
        if CENTRE:
            unit -= tl.load(mean + n, n_inside, 0.0)[:, None]
        inverse = tl.load(rstd + n, n_inside, 0.0)[:, None]
        unit = tl.where(n_here, unit * inverse, 0.0)
        if SUMS:
            weight_sum += d * unit
            bias_sum += d
        d *= w
        out = d - unit * (tl.sum(d * unit, 1) / C)[:, None]
        if CENTRE:
            out -= (tl.sum(d, 1) / C)[:, None]
        out *= inverse

        if HAS_KEPT:
            out += tl.load(kept + kept_at, kept_here, 0.0).to(tl.float32)
        if HAS_BASE:
            takes = i_inside
            if HAS_KEPT:
                takes = i_inside & (place < 0)
            if GATED:
                takes = takes & is_kept
            source = tl.load(base_rows + i, i_inside, 0) if HAS_BASE_ROWS else i.to(tl.int64)
            at = source[:, None] * C + c[None, :]
            out += tl.load(base + at, takes[:, None] & inside[None, :], 0.0).to(tl.float32)
        tl.store(dx + i_at, out.to(dx.dtype.element_ty), here)
    if SUMS:
        p = tl.program_id(0)
        tl.store(sums + p * C + c, tl.sum(weight_sum, 0), inside)
        tl.store(sums + (tl.num_programs(0) + p) * C + c, tl.sum(bias_sum, 0), inside)


def norm_backward(
    dn: Tensor, n: Normed, weight: Grad, bias: Grad, static: Norm, needs: Sequence[bool], dtype: torch.dtype, *,
    rows: Grad = None, size: int | None = None, dn_kept: Grad = None, kept: Grad = None,
    base: Grad = None, base_rows: Grad = None, gated: bool = False,
) -> tuple[Tensor, Grad, Grad]:  # fmt: skip
    dn, C = dn.contiguous(), dn.shape[1]
    size = dn.shape[0] if size is None else size
    base = None if base is None else base.contiguous()
    places = None if rows is None else places_of(rows, size)
    dx = torch.empty(size, C, dtype=dtype, device=dn.device)
    tile = Tiles(size, C, dn.device)
    sums = torch.empty(2, tile.programs, C, dtype=torch.float32, device=dn.device) if any(needs) else None
    _norm_backward[(tile.programs,)](
        dn, dn_kept, n.x, n.mean, n.rstd, weight, kept, base, base_rows, places, dx, sums, size, C,
        dn_kept is not None, weight is not None, n.mean is not None, kept is not None,
        base is not None, base_rows is not None, places is not None, places is None or dn_kept is not None,
        gated, sums is not None, tile.rows, tile.block, num_warps=tile.warps,
    )  # fmt: skip
    dw = sums[0].sum(0).to(weight.dtype) if needs[0] and sums is not None and weight is not None else None
    db = sums[1].sum(0).to(bias.dtype) if needs[1] and sums is not None and bias is not None else None
    return dx, dw, db


def places_of(rows: Tensor, size: int) -> Tensor:
    """The place of every row among the kept ones, -1 for the rest."""
    places = torch.full((size,), -1, dtype=torch.int32, device=rows.device)
    return places.index_copy_(0, rows, torch.arange(rows.shape[0], dtype=torch.int32, device=rows.device))


class Tiles:
    """How a matrix of ``count`` rows is cut: tiles of whole rows, shared out to programs."""

    def __init__(self, count: int, width: int, device: torch.device) -> None:
        self.block = triton.next_power_of_2(width)
        self.rows = max(1, ELEMENTS // self.block)
        self.warps = min(16, max(4, self.block * self.rows // 512))
        self.programs = min(triton.cdiv(count, self.rows), PROGRAMS_PER_PROCESSOR * processors(device))


_PROCESSORS: dict[Any, int] = {}


def processors(device: torch.device) -> int:
    if device not in _PROCESSORS:
        cuda = device.type == "cuda"
        _PROCESSORS[device] = torch.cuda.get_device_properties(device).multi_processor_count if cuda else 1
    return _PROCESSORS[device]
