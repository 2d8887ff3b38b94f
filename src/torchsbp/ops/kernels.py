"""Triton kernels for the steps of ``kernel_steps.py``, one launch each.

A program goes through tiles of rows, whole ones except for activations. Its sums over rows stay in registers until the
last tile, then go to its row of the buffer ``sums``, at column ``first``. Arithmetic is float32 whatever is stored.
"""

import triton
import triton.language as tl

from .kernel_steps import ACTIVATION_CODES

GELU = tl.constexpr(ACTIVATION_CODES["gelu"])
GELU_TANH = tl.constexpr(ACTIVATION_CODES["gelu_tanh"])
QUICK_GELU = tl.constexpr(ACTIVATION_CODES["quick_gelu"])
SILU = tl.constexpr(ACTIVATION_CODES["silu"])
RELU = tl.constexpr(ACTIVATION_CODES["relu"])


@triton.jit
def counted(counts, r, here, per_sample, row_weight, prefix, BY_ROW: tl.constexpr):
    """How often rows count: each by itself (BY_ROW), or all alike but for the prefix of a sample."""
    if BY_ROW:
        return tl.load(counts + r, here, 0.0).to(tl.float32)
    return tl.where(r % per_sample < prefix, 1.0, row_weight)


@triton.jit
def cotangent(
    dy, rows, counts, factor, scale, half, scaled, sums, first, columns, count, per_sample, row_weight, prefix,
    C: tl.constexpr, WEIGHTED: tl.constexpr, BY_ROW: tl.constexpr,
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
        if WEIGHTED:
            d *= counted(counts, r, r < count, per_sample, row_weight, prefix, BY_ROW)[:, None]
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
def normalise(
    after, x, rows, branch, scale, factor, weight, bias, middle, y, inverse, y_kept, mean, rstd,
    count, per_sample, eps, C: tl.constexpr,
    HAS_ROWS: tl.constexpr, HAS_BRANCH: tl.constexpr, HAS_SCALE: tl.constexpr, HAS_FACTOR: tl.constexpr,
    HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr, CENTRE: tl.constexpr, KEEP: tl.constexpr, HAS_KEPT: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """``after`` is not read: it orders this kernel behind the one that makes it. Row r of y goes to row ``inverse[r]``
    of y_kept too, unless that is -1."""
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
        inverse_std = tl.rsqrt(tl.sum(centred * centred, 1) / C + eps)
        tl.store(rstd + r, inverse_std, r < count)
        out = centred * inverse_std[:, None]
        if HAS_WEIGHT:
            out *= tl.load(weight + c, inside, 0.0).to(tl.float32)[None, :]
        if HAS_BIAS:
            out += tl.load(bias + c, inside, 0.0).to(tl.float32)[None, :]
        tl.store(y + at, out.to(y.dtype.element_ty), here)
        if HAS_KEPT:
            place = tl.load(inverse + r, r < count, -1).to(tl.int64)[:, None]
            tl.store(y_kept + place * C + c[None, :], out.to(y.dtype.element_ty), here & (place >= 0))


@triton.jit
def normal_cdf(a, e):
    """The standard normal distribution function, given ``e = exp(−a² / 2)``, which GELU's derivative needs anyway.

    The tail by Abramowitz and Stegun 7.1.26 (error below 1e-7): a third of the instructions of erf.
    """
    t = 1.0 / (1.0 + 0.23164190 * tl.abs(a))
    tail = t * (0.127414796 + t * (-0.142248368 + t * (0.7107068705 + t * (-0.7265760135 + t * 0.5307027145)))) * e
    return tl.where(a < 0, tail, 1.0 - tail)


@triton.jit
def value_and_slope(a, CODE: tl.constexpr):
    """act(a) and act'(a) for the activation of that code (``ACTIVATION_CODES``)."""
    if CODE == GELU:
        e = tl.exp(-0.5 * a * a)
        cdf = normal_cdf(a, e)
        value = a * cdf
        slope = cdf + a * 0.3989422804014327 * e
    elif CODE == GELU_TANH:
        s = tl.sigmoid(1.5957691216057308 * (a + 0.044715 * a * a * a))
        value = a * s
        slope = s + a * s * (1.0 - s) * 1.5957691216057308 * (1.0 + 0.134145 * a * a)
    elif CODE == QUICK_GELU:
        s = tl.sigmoid(1.702 * a)
        value = a * s
        slope = s * (1.0 + 1.702 * a * (1.0 - s))
    elif CODE == SILU:
        s = tl.sigmoid(a)
        value = a * s
        slope = s * (1.0 + a * (1.0 - s))
    else:
        tl.static_assert(CODE == RELU, "the kernel has no activation of that code")
        value = tl.maximum(a, 0.0)
        slope = tl.where(a > 0, 1.0, 0.0)
    return value, slope


@triton.jit
def activation(
    h, dg, g, sums, first, columns, count, H: tl.constexpr,
    CODE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """``g = act(h)`` and its dh; dh overwrites dg; g may be h."""
    c = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = c < H
    total = tl.zeros([ROWS, BLOCK], tl.float32)
    for start in range(tl.program_id(1) * ROWS, count, tl.num_programs(1) * ROWS):
        r = start + tl.arange(0, ROWS)
        here = (r < count)[:, None] & inside[None, :]
        at = r.to(tl.int64)[:, None] * H + c[None, :]
        a = tl.load(h + at, here, 0.0).to(tl.float32)
        d = tl.load(dg + at, here, 0.0).to(tl.float32)
        value, slope = value_and_slope(a, CODE)
        d *= slope
        total += d
        tl.store(g + at, value.to(g.dtype.element_ty), here)
        tl.store(dg + at, d.to(dg.dtype.element_ty), here)
    tl.store(sums + tl.program_id(1) * columns + first + c, tl.sum(total, 0), inside)


@triton.jit
def gated_activation(
    h, dg, dh, sums, first, columns, count, H: tl.constexpr,
    CODE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """``g = act(a) ∘ b`` for h = (a, b), each H wide; g overwrites dg; dh may be h."""
    c = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = c < H
    total_a = tl.zeros([ROWS, BLOCK], tl.float32)
    total_b = tl.zeros([ROWS, BLOCK], tl.float32)
    for start in range(tl.program_id(1) * ROWS, count, tl.num_programs(1) * ROWS):
        r = start + tl.arange(0, ROWS)
        here = (r < count)[:, None] & inside[None, :]
        row = r.to(tl.int64)[:, None]
        at = row * (2 * H) + c[None, :]
        a = tl.load(h + at, here, 0.0).to(tl.float32)
        b = tl.load(h + at + H, here, 0.0).to(tl.float32)
        d = tl.load(dg + row * H + c[None, :], here, 0.0).to(tl.float32)
        value, slope = value_and_slope(a, CODE)
        da, db = d * b * slope, d * value
        total_a += da
        total_b += db
        tl.store(dg + row * H + c[None, :], (value * b).to(dg.dtype.element_ty), here)
        tl.store(dh + at, da.to(dh.dtype.element_ty), here)
        tl.store(dh + at + H, db.to(dh.dtype.element_ty), here)
    at = sums + tl.program_id(1) * columns + first + c
    tl.store(at, tl.sum(total_a, 0), inside)
    tl.store(at + H, tl.sum(total_b, 0), inside)


@triton.jit
def rotation(
    x, rope, rows, y, x_row, y_row, n, count, HEADS: tl.constexpr, D: tl.constexpr,
    HALF: tl.constexpr, BACK: tl.constexpr, HAS_ROWS: tl.constexpr, BY_HEAD: tl.constexpr, OVERWRITE: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Rotate rows of x by the angles of their positions, or BACK; OVERWRITE: y is x."""
    c = tl.arange(0, BLOCK)
    d = c % D
    partner = (d + D // 2) % D if HALF else d ^ 1
    sign = tl.where(d < D // 2, -1.0, 1.0) if HALF else tl.where(d % 2 == 0, -1.0, 1.0)
    for start in range(tl.program_id(0) * ROWS, count, tl.num_programs(0) * ROWS):
        r = start + tl.arange(0, ROWS)
        here = (r < count)[:, None] & (c < HEADS * D)[None, :]
        position = (tl.load(rows + r, r < count, 0) if HAS_ROWS else r.to(tl.int64)) % n
        angle = position[:, None] * (2 * D)
        if BY_HEAD:
            angle += (c // D)[None, :] * n * (2 * D)
        at = x + r.to(tl.int64)[:, None] * x_row + (c - d)[None, :]
        own = tl.load(at + d[None, :], here, 0.0).to(tl.float32)
        other = tl.load(at + partner[None, :], here, 0.0).to(tl.float32)
        cos = tl.load(rope + angle + D + d[None, :], here, 0.0).to(tl.float32)
        if BACK:
            sin = tl.load(rope + angle + partner[None, :], here, 0.0).to(tl.float32)
            out = own * cos - sign[None, :] * other * sin
        else:
            sin = tl.load(rope + angle + d[None, :], here, 0.0).to(tl.float32)
            out = own * cos + sign[None, :] * other * sin
        if OVERWRITE:
            tl.debug_barrier()  # threads read what others write
        tl.store(y + r.to(tl.int64)[:, None] * y_row + c[None, :], out.to(y.dtype.element_ty), here)


@triton.jit
def stack(
    a, b, c, stacked, sums, first, columns, count_a, count, C: tl.constexpr,
    PARTS: tl.constexpr, APART: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program (p, i) copies rows of part i to its columns; if the first part stays APART, it is only summed."""
    part = tl.program_id(1)
    k = tl.arange(0, BLOCK)
    inside = k < C
    source = a
    if PARTS > 1:
        source = b if part == 1 else a
    if PARTS > 2:
        source = c if part == 2 else source
    number = count_a if part == 0 else count
    total = tl.zeros([ROWS, BLOCK], tl.float32)
    for start in range(tl.program_id(0) * ROWS, number, tl.num_programs(0) * ROWS):
        r = start + tl.arange(0, ROWS)
        here = (r < number)[:, None] & inside[None, :]
        row = r.to(tl.int64)[:, None]
        value = tl.load(source + row * C + k[None, :], here, 0.0)
        total += value.to(tl.float32)
        if part >= APART:
            tl.store(stacked + row * ((PARTS - APART) * C) + (part - APART) * C + k[None, :], value, here)
    tl.store(sums + tl.program_id(0) * columns + first + part * C + k, tl.sum(total, 0), inside)


@triton.jit
def norm_backward(
    dn, dn_kept, x, mean, rstd, weight, kept, base, base_rows, inverse, dx, half, scaled, counts, factor, scale,
    sums, first, columns, size, per_sample, row_weight, prefix,
    C: tl.constexpr, WEIGHTED: tl.constexpr, BY_ROW: tl.constexpr,
    HAS_DN_KEPT: tl.constexpr, HAS_WEIGHT: tl.constexpr, CENTRE: tl.constexpr, HAS_KEPT: tl.constexpr,
    HAS_BASE: tl.constexpr, HAS_BASE_ROWS: tl.constexpr, HAS_INVERSE: tl.constexpr, DENSE: tl.constexpr,
    GATED: tl.constexpr, HAS_HALF: tl.constexpr, HAS_FACTOR: tl.constexpr, HAS_SCALE: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Row i of the result is row ``inverse[i]`` of the kept ones; it is not kept if that is -1."""
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
        place = tl.load(inverse + i, i_inside, -1).to(tl.int64) if HAS_INVERSE else i.to(tl.int64)
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
        inverse_std = tl.load(rstd + n, n_inside, 0.0)[:, None]
        unit = tl.where(n_here, unit * inverse_std, 0.0)
        weight_sum += d * unit
        bias_sum += d
        d *= w
        out = d - unit * (tl.sum(d * unit, 1) / C)[:, None]
        if CENTRE:
            out -= (tl.sum(d, 1) / C)[:, None]
        out = out * inverse_std + residual
        tl.store(dx + i_at, out.to(dx.dtype.element_ty), here)
        if HAS_HALF:
            if WEIGHTED:
                times = counted(counts, i, i_inside, per_sample, row_weight, prefix, BY_ROW)
                out += residual * (times - 1.0)[:, None]
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


@triton.jit
def last_layer(
    product, total, weight, bias, scale, dbias, dscale,
    WIDTH: tl.constexpr, HAS_BIAS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program i turns row i of the product into that of the weight's gradient, and makes element i of both vectors."""
    i = tl.program_id(0)
    gamma = tl.load(scale + i).to(tl.float32)
    dot = tl.zeros([BLOCK], tl.float32)
    for start in range(0, WIDTH, BLOCK):
        k = start + tl.arange(0, BLOCK)
        at = i * WIDTH + k
        value = tl.load(product + at, k < WIDTH, 0.0).to(tl.float32)
        dot += value * tl.load(weight + at, k < WIDTH, 0.0).to(tl.float32)
        tl.store(product + at, (value * gamma).to(product.dtype.element_ty), k < WIDTH)
    summed = tl.load(total + i).to(tl.float32)
    found = tl.sum(dot, 0)
    if HAS_BIAS:
        found += tl.load(bias + i).to(tl.float32) * summed
    tl.store(dscale + i, found.to(dscale.dtype.element_ty))
    tl.store(dbias + i, (gamma * summed).to(dbias.dtype.element_ty))
