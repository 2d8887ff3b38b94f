"""Triton kernels for the steps of ``steps.py``: the same functions, one launch each.

Every kernel walks over tiles of whole rows. Sums over rows stay in a program's registers until its last tile, then go
to its row of a buffer that all steps of a backward pass share and that is summed once. Arithmetic is in float32
whatever is stored.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import rows as R
from .layers import ACTIVATIONS, Grad, Normed
from .steps import Affine, Cotangent, Steps

PROGRAMS_PER_PROCESSOR = 4
ACTIVATION = {"ROWS": 8, "BLOCK": 128, "num_warps": 4}  # its tiles are not whole rows


class TritonSteps(Steps):
    def __init__(self, x: Tensor, columns: int) -> None:
        self.programs = PROGRAMS_PER_PROCESSOR * processors(x.device)
        self.sums = torch.empty(self.programs, columns, dtype=torch.float32, device=x.device)
        self.widths: list[int] = []

    def totals(self) -> list[Tensor]:
        used = sum(self.widths)
        assert used == self.sums.shape[1], f"{used} columns were summed, {self.sums.shape[1]} announced"
        return list(self.sums.sum(0).split(self.widths))

    def room(self, width: int, more: bool = False) -> int:
        """The first of the buffer's columns for another sum, or for more of the one before."""
        start = sum(self.widths)
        self.widths.append(width + (self.widths.pop() if more else 0))
        return start

    def cast(self, dtype: torch.dtype, *tensors: Grad) -> list[Any]:
        if torch.compiler.is_compiling():
            return super().cast(dtype, *tensors)
        others = [t for t in tensors if t is not None and t.dtype != dtype]
        halves = [torch.empty_like(t, dtype=dtype) for t in others]
        if others:
            torch._foreach_copy_(halves, others)
        given = iter(halves)
        return [t if t is None or t.dtype == dtype else next(given) for t in tensors]

    def cotangent(
        self, dy: Tensor, rows: Grad, factor: Grad, scale: Grad, samples: int, dtype: torch.dtype
    ) -> Cotangent:
        dy = dy.contiguous()
        count, C = dy.shape[0] if rows is None else rows.shape[0], dy.shape[1]
        half = torch.empty(count, C, dtype=dtype, device=dy.device)
        scaled = None if scale is None else torch.empty_like(half)
        _cotangent[(self.programs,)](
            dy, rows, factor, scale, half, scaled, self.sums, self.room(C), self.sums.shape[1],
            count, count // samples, C, rows is not None, factor is not None, scale is not None, **tile(C),
        )  # fmt: skip
        return Cotangent(half, half if scaled is None else scaled)

    def normalise(
        self, x: Tensor, norm: Affine, dtype: torch.dtype | None, *,
        after: Tensor,
        rows: Grad = None, branch: Grad = None, scale: Grad = None, factor: Grad = None, samples: int = 1,
    ) -> Normed:  # fmt: skip
        x, (weight, bias, static) = x.contiguous(), norm
        count, C = x.shape[0] if rows is None else rows.shape[0], x.shape[1]
        wide = x.dtype if weight is None else weight.dtype
        keep = rows is not None or branch is not None
        middle = torch.empty(count, C, dtype=x.dtype, device=x.device) if keep else x
        y = torch.empty(count, C, dtype=dtype or wide, device=x.device)
        rstd = torch.empty(count, dtype=torch.float32, device=x.device)
        mean = None if static.kind == "rms" else torch.empty_like(rstd)
        eps = torch.finfo(x.dtype).eps if static.eps is None else static.eps
        _normalise[(4 * self.programs,)](
            after, x, rows, branch, scale, factor, weight, bias, middle, y, mean, rstd, count, count // samples, C, eps,
            rows is not None, branch is not None, scale is not None, factor is not None,
            weight is not None, bias is not None, mean is not None, keep, **tile(C, 1024),
        )  # fmt: skip
        return Normed(y, middle, mean, rstd)

    def activation(self, h: Tensor, dg: Tensor, name: str, own: bool) -> tuple[Tensor, Tensor]:
        count, H = h.shape
        g = None if own else torch.empty_like(h)
        _activation[(-(-H // ACTIVATION["BLOCK"]), self.programs)](
            h, dg, g, self.sums, self.room(H), self.sums.shape[1], count, H, ACTIVATIONS.index(name), own, **ACTIVATION
        )
        return h if g is None else g, dg

    def stack(self, *parts: Tensor, more: bool = False) -> Tensor:
        a, b, c = (*parts, None, None)[:3]
        assert a is not None
        count, C = a.shape
        stacked = None if b is None else torch.empty(count, len(parts) * C, dtype=a.dtype, device=a.device)
        _stack[(self.programs, len(parts))](
            a, b, c, stacked, self.sums, self.room(len(parts) * C, more), self.sums.shape[1],
            count, C, len(parts), **tile(C),
        )  # fmt: skip
        return a if stacked is None else stacked

    def norm_backward_middle(
        self, dn: Tensor, n: Normed, norm: Affine, dy: Tensor, rows: Grad,
        factor: Grad, scale: Grad, samples: int, dtype: torch.dtype,
    ) -> tuple[Tensor, Cotangent]:  # fmt: skip
        half = torch.empty(dn.shape, dtype=dtype, device=dn.device)
        scaled = None if scale is None else torch.empty_like(half)
        middle = self._launch(
            dn, n, norm, dy.dtype, dn.shape[0], base=dy, base_rows=rows,
            half=half, scaled=scaled, factor=factor, scale=scale, samples=samples,
        )  # fmt: skip
        return middle, Cotangent(half, half if scaled is None else scaled)

    def norm_backward_input(
        self, dn: Tensor, n: Normed, norm: Affine, dtype: torch.dtype, *,
        rows: Grad = None, places: Grad = None, size: int = 0,
        dn_kept: Grad = None, kept: Grad = None, base: Grad = None, gated: bool = False,
    ) -> Tensor:  # fmt: skip
        if rows is None:
            return self._launch(dn, n, norm, dtype, dn.shape[0], base=base if kept is None else kept)
        places = R.places(rows, size) if places is None else places
        return self._launch(dn, n, norm, dtype, size, places=places, dn_kept=dn_kept, kept=kept, base=base, gated=gated)

    def _launch(
        self, dn: Tensor, n: Normed, norm: Affine, dtype: torch.dtype, size: int, *,
        places: Grad = None, dn_kept: Grad = None, kept: Grad = None,
        base: Grad = None, base_rows: Grad = None, gated: bool = False,
        half: Grad = None, scaled: Grad = None, factor: Grad = None, scale: Grad = None, samples: int = 1,
    ) -> Tensor:  # fmt: skip
        C = dn.shape[1]
        start = self.room(C)
        self.room(C)
        if half is not None:
            self.room(C)
        dx = torch.empty(size, C, dtype=dtype, device=dn.device)
        _norm_backward[(self.programs,)](
            dn.contiguous(), dn_kept, n.x, n.mean, n.rstd, norm.weight, kept,
            None if base is None else base.contiguous(), base_rows, places, dx, half, scaled, factor, scale,
            self.sums, start, self.sums.shape[1], size, size // samples, C,
            dn_kept is not None, norm.weight is not None, n.mean is not None, kept is not None,
            base is not None, base_rows is not None, places is not None, places is None or dn_kept is not None, gated,
            half is not None, factor is not None, scale is not None, **tile(C),
        )  # fmt: skip
        return dx


def tile(width: int, elements: int = 2048) -> dict[str, int]:
    """Whole rows of so many channels, a warp for 1024 elements: measured on an H200 for widths 96, 192 and 768."""
    block = 1 << (width - 1).bit_length()
    rows = max(1, elements // block)
    return {"ROWS": rows, "BLOCK": block, "num_warps": min(8, max(1, rows * block // 1024))}


def processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def take(x: Tensor, rows: Tensor, dtype: torch.dtype) -> Tensor:
    """``x[rows]``."""
    count, C = rows.shape[0], x.shape[1]
    kept = torch.empty(count, C, dtype=dtype, device=x.device)
    _take[(8 * PROGRAMS_PER_PROCESSOR * processors(x.device),)](x, rows, kept, count, C, **tile(C, 1024))
    return kept


@triton.jit
def _take(x, rows, kept, count, C: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    c = tl.arange(0, BLOCK)
    for start in range(tl.program_id(0) * ROWS, count, tl.num_programs(0) * ROWS):
        r = start + tl.arange(0, ROWS)
        here = (r < count)[:, None] & (c < C)[None, :]
        source = tl.load(rows + r, r < count, 0)
        value = tl.load(x + source[:, None] * C + c[None, :], here, 0.0)
        tl.store(kept + r.to(tl.int64)[:, None] * C + c[None, :], value.to(kept.dtype.element_ty), here)


@triton.jit
def _cotangent(
    dy, rows, factor, scale, half, scaled, sums, first, columns, count, per_sample, C: tl.constexpr,
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
    tl.store(sums + tl.program_id(0) * columns + first + c, tl.sum(total, 0), inside)


@triton.jit
def _normalise(
    after, x, rows, branch, scale, factor, weight, bias, middle, y, mean, rstd, count, per_sample, C: tl.constexpr, eps,
    HAS_ROWS: tl.constexpr, HAS_BRANCH: tl.constexpr, HAS_SCALE: tl.constexpr, HAS_FACTOR: tl.constexpr,
    HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr, CENTRE: tl.constexpr, KEEP: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """``after`` is not read: it orders this kernel behind another one."""
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
            tl.store(middle + at, value.to(middle.dtype.element_ty), here)
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


@triton.jit
def normal_cdf(a, e):
    """Of the standard normal distribution, given ``e = exp(−a² / 2)``, which GELU's derivative needs anyway.

    The tail by Abramowitz and Stegun 7.1.26 (error below 1e-7): a third of the instructions of erf.
    """
    t = 1.0 / (1.0 + 0.23164190 * tl.abs(a))
    tail = t * (0.127414796 + t * (-0.142248368 + t * (0.7107068705 + t * (-0.7265760135 + t * 0.5307027145)))) * e
    return tl.where(a < 0, tail, 1.0 - tail)


@triton.jit
def _activation(
    h, dg, g, sums, first, columns, count, H: tl.constexpr,
    ACT: tl.constexpr, OWN: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """ACT is the index in ``ACTIVATIONS``; dh overwrites dg, and g overwrites h if that is our OWN."""
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
            e = tl.exp(-0.5 * a * a)
            cdf = normal_cdf(a, e)
            value = a * cdf
            slope = cdf + a * 0.3989422804014327 * e
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
        if OWN:
            tl.store(h + at, value.to(h.dtype.element_ty), here)
        else:
            tl.store(g + at, value.to(g.dtype.element_ty), here)
        tl.store(dg + at, d.to(dg.dtype.element_ty), here)
    tl.store(sums + tl.program_id(1) * columns + first + c, tl.sum(total, 0), inside)


@triton.jit
def _stack(
    a, b, c, stacked, sums, first, columns, count, C: tl.constexpr,
    PARTS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program (p, i) copies rows of part i to its columns; a single part is summed and stays where it is."""
    part = tl.program_id(1)
    k = tl.arange(0, BLOCK)
    inside = k < C
    source = a
    if PARTS > 1:
        source = b if part == 1 else a
    if PARTS > 2:
        source = c if part == 2 else source
    total = tl.zeros([ROWS, BLOCK], tl.float32)
    for start in range(tl.program_id(0) * ROWS, count, tl.num_programs(0) * ROWS):
        r = start + tl.arange(0, ROWS)
        here = (r < count)[:, None] & inside[None, :]
        row = r.to(tl.int64)[:, None]
        value = tl.load(source + row * C + k[None, :], here, 0.0)
        total += value.to(tl.float32)
        if PARTS > 1:
            tl.store(stacked + row * (PARTS * C) + part * C + k[None, :], value, here)
    tl.store(sums + tl.program_id(0) * columns + first + part * C + k, tl.sum(total, 0), inside)


@triton.jit
def _norm_backward(
    dn, dn_kept, x, mean, rstd, weight, kept, base, base_rows, places, dx, half, scaled, factor, scale,
    sums, first, columns, size, per_sample, C: tl.constexpr,
    HAS_DN_KEPT: tl.constexpr, HAS_WEIGHT: tl.constexpr, CENTRE: tl.constexpr, HAS_KEPT: tl.constexpr,
    HAS_BASE: tl.constexpr, HAS_BASE_ROWS: tl.constexpr, HAS_PLACES: tl.constexpr, DENSE: tl.constexpr,
    GATED: tl.constexpr, HAS_HALF: tl.constexpr, HAS_FACTOR: tl.constexpr, HAS_SCALE: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Row i of the result; its place among the kept rows is ``places[i]``, -1 if it is not kept."""
    c = tl.arange(0, BLOCK)
    inside = c < C
    w = tl.full([1, BLOCK], 1.0, tl.float32)
    if HAS_WEIGHT:
        w = tl.load(weight + c, inside, 0.0).to(tl.float32)[None, :]
    weight_sum = tl.zeros([ROWS, BLOCK], tl.float32)
    bias_sum = tl.zeros([ROWS, BLOCK], tl.float32)
    half_sum = tl.zeros([ROWS, BLOCK], tl.float32)
    for start in range(tl.program_id(0) * ROWS, size, tl.num_programs(0) * ROWS):
        i = start + tl.arange(0, ROWS)
        i_inside = i < size
        i_at = i.to(tl.int64)[:, None] * C + c[None, :]
        place = tl.load(places + i, i_inside, -1).to(tl.int64) if HAS_PLACES else i.to(tl.int64)
        is_kept = i_inside & (place >= 0)
        kept_at = place[:, None] * C + c[None, :]
        kept_here = is_kept[:, None] & inside[None, :]
        here = i_inside[:, None] & inside[None, :]

        n = i.to(tl.int64) if DENSE else place
        n_inside = i_inside if DENSE else is_kept
        n_at = i_at if DENSE else kept_at
        n_here = here if DENSE else kept_here
        d = tl.load(dn + n_at, n_here, 0.0).to(tl.float32)
        if HAS_DN_KEPT:
            d += tl.load(dn_kept + kept_at, kept_here, 0.0).to(tl.float32)
        unit = tl.load(x + n_at, n_here, 0.0).to(tl.float32)
        residual = tl.zeros([ROWS, BLOCK], tl.float32)
        if HAS_KEPT:
            residual += tl.load(kept + kept_at, kept_here, 0.0).to(tl.float32)
        if HAS_BASE:
            takes = i_inside
            if HAS_KEPT:
                takes = i_inside & (place < 0)
            if GATED:
                takes = takes & is_kept
            source = tl.load(base_rows + i, i_inside, 0) if HAS_BASE_ROWS else i.to(tl.int64)
            at = source[:, None] * C + c[None, :]
            residual += tl.load(base + at, takes[:, None] & inside[None, :], 0.0).to(tl.float32)
        if CENTRE:
            unit -= tl.load(mean + n, n_inside, 0.0)[:, None]
        inverse = tl.load(rstd + n, n_inside, 0.0)[:, None]
        unit = tl.where(n_here, unit * inverse, 0.0)
        weight_sum += d * unit
        bias_sum += d
        d *= w
        out = d - unit * (tl.sum(d * unit, 1) / C)[:, None]
        if CENTRE:
            out -= (tl.sum(d, 1) / C)[:, None]
        out = out * inverse + residual
        tl.store(dx + i_at, out.to(dx.dtype.element_ty), here)
        if HAS_HALF:
            if HAS_FACTOR:
                out *= tl.load(factor + i // per_sample, i_inside, 0.0).to(tl.float32)[:, None]
            half_sum += tl.where(here, out, 0.0)
            tl.store(half + i_at, out.to(half.dtype.element_ty), here)
            if HAS_SCALE:
                out *= tl.load(scale + c, inside, 0.0).to(tl.float32)[None, :]
                tl.store(scaled + i_at, out.to(scaled.dtype.element_ty), here)
    at = sums + tl.program_id(0) * columns + first + c
    tl.store(at, tl.sum(weight_sum, 0), inside)
    tl.store(at + C, tl.sum(bias_sum, 0), inside)
    if HAS_HALF:
        tl.store(at + 2 * C, tl.sum(half_sum, 0), inside)
