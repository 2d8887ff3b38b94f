"""Triton kernels for attention in windows, launched by ``window_launches.py``.

A program takes one head of a window, or of a tile of it, for some samples in turn. If the window is one tile (WHOLE),
what is added to its scores stays in registers for all these samples. Rows are ``[rows, heads · D]`` and read where they
are: ``*_row`` is the distance from one to the next. Arithmetic is in float32 whatever is stored.

A table has the row in every slot, or in every kept one; a number that is no row of the sample is padding. Kernels load
tables themselves, not in functions that they call: a compiler that analyses what a kernel writes to takes the results
of such functions for addresses in all of their arguments.
"""

import triton
import triton.language as tl

from .window_attention import MASKED

ACROSS = tl.constexpr(MASKED)
COUNTS = ["n", "rows", "columns", "heads", "windows", "batch", "samples"]
"""What differs between a model's stages, for all of which a kernel is compiled once; no address is aligned by it."""


@triton.jit
def added(
    bias, regions, head, w, slot_q, slot_k, asks, seen, AREA: tl.constexpr, HAS_REGIONS: tl.constexpr,
):  # fmt: skip
    """What is added to scores: bias and mask, or −inf where no query meets a key."""
    here = asks[:, None] & seen[None, :]
    found = tl.load(bias + head * AREA * AREA + slot_q[:, None] * AREA + slot_k[None, :], here, float("-inf"))
    found = found.to(tl.float32)
    if HAS_REGIONS:
        of_q = tl.load(regions + w * AREA + slot_q, asks, 0).to(tl.int32)
        of_k = tl.load(regions + w * AREA + slot_k, seen, 0).to(tl.int32)
        found += tl.where(of_q[:, None] != of_k[None, :], ACROSS, 0.0)
    return found


@triton.jit
def load_rows(x, first, place, distance, is_row, head, d, D: tl.constexpr):
    """Rows of one head, in the sample whose first row is given."""
    at = x + first * distance + head * D
    return tl.load(at + place[:, None] * distance + d[None, :], is_row[:, None] & (d < D)[None, :], 0.0)


@triton.jit
def load_keys(x, padding, first, place, distance, seen, is_row, head, d, D: tl.constexpr, PADDED: tl.constexpr):
    """The same for keys or values, with those of padding where there is no row."""
    found = load_rows(x, first, place, distance, is_row, head, d, D)
    if PADDED:
        beyond = tl.load(padding + head * D + d, d < D, 0.0).to(x.dtype.element_ty)
        found = tl.where((seen & (is_row == 0))[:, None], beyond[None, :], found)
    return found


@triton.jit
def store_rows(x, first, place, is_row, head, d, value, heads, D: tl.constexpr):
    at = x + first * (heads * D) + head * D
    here = is_row[:, None] & (d < D)[None, :]
    tl.store(at + place[:, None] * (heads * D) + d[None, :], value.to(x.dtype.element_ty), here)


@triton.jit(do_not_specialize=COUNTS)
def window_forward(
    q, k, v, bias, pad_k, pad_v, table, regions, o, lse, q_row, k_row, v_row, n, heads, windows, batch, samples, scale,
    AREA: tl.constexpr, D: tl.constexpr, PADDED: tl.constexpr, HAS_REGIONS: tl.constexpr,
    WHOLE: tl.constexpr, PRECISION: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Program (some samples, window, tile of queries, head), the heads of a window side by side."""
    tiles: tl.constexpr = (AREA + QUERIES - 1) // QUERIES
    head = tl.program_id(0) % heads
    tile = tl.program_id(0) // heads % tiles
    w = tl.program_id(0) // (heads * tiles) % windows
    begin = tl.program_id(0) // (heads * tiles * windows) * samples
    d = tl.arange(0, WIDTH)
    i = tile * QUERIES + tl.arange(0, QUERIES)
    j = tl.arange(0, KEYS)
    inside, seen = i < AREA, j < AREA
    place_q = tl.load(table + w * AREA + i, inside, 0).to(tl.int32)
    place_k = tl.load(table + w * AREA + j, seen, 0).to(tl.int32)
    asks = inside & (place_q < n)
    extra = tl.zeros([QUERIES, KEYS], tl.float32)
    if WHOLE:
        extra = added(bias, regions, head, w, i, j, inside, seen, AREA, HAS_REGIONS)
    for sample in range(begin, tl.minimum(begin + samples, batch)):
        first = tl.full([], 0, tl.int64) + sample * n
        tq = load_rows(q, first, place_q, q_row, asks, head, d, D)
        highest = tl.full([QUERIES], float("-inf"), tl.float32)
        total = tl.zeros([QUERIES], tl.float32)
        out = tl.zeros([QUERIES, WIDTH], tl.float32)
        for start in range(0, AREA, KEYS):
            if not WHOLE:
                seen = start + j < AREA
                place_k = tl.load(table + w * AREA + start + j, seen, 0).to(tl.int32)
                extra = added(bias, regions, head, w, i, start + j, inside, seen, AREA, HAS_REGIONS)
            is_row = seen & (place_k < n)
            tk = load_keys(k, pad_k, first, place_k, k_row, seen, is_row, head, d, D, PADDED)
            tv = load_keys(v, pad_v, first, place_k, v_row, seen, is_row, head, d, D, PADDED)
            s = tl.dot(tq, tl.trans(tk), input_precision=PRECISION) * scale + extra
            s = tl.where(inside[:, None], s, 0.0)  # a row of −inf has no maximum
            higher = tl.maximum(highest, tl.max(s, 1))
            p = tl.exp(s - higher[:, None])
            shrink = tl.exp(highest - higher)
            total = total * shrink + tl.sum(p, 1)
            out = out * shrink[:, None] + tl.dot(p.to(tv.dtype), tv, input_precision=PRECISION)
            highest = higher
        store_rows(o, first, place_q, asks, head, d, out / total[:, None], heads, D)
        tl.store(lse + (first + place_q) * heads + head, highest + tl.log(total), asks)


@triton.jit(do_not_specialize=COUNTS)
def window_backward(
    do, q, k, v, o, lse, bias, pad_k, pad_v, table_q, table_k, slots, regions, dq, dk, dv, d_pad_k, d_pad_v, d_bias,
    do_row, q_row, k_row, v_row, o_row, rows, columns, heads, windows, batch, samples, scale,
    AREA: tl.constexpr, COUNT_Q: tl.constexpr, COUNT_K: tl.constexpr, D: tl.constexpr, PADDED: tl.constexpr,
    HAS_REGIONS: tl.constexpr, KEPT_Q: tl.constexpr, KEPT_K: tl.constexpr,
    SHARED: tl.constexpr, NEEDS_BIAS: tl.constexpr, WHOLE: tl.constexpr, PRECISION: tl.constexpr,
    QUERIES: tl.constexpr, KEYS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """dK and dV; if a window is one tile also dQ and the bias's gradient, summed over samples before it is added to
    that of other programs. Program (some samples, or one if each keeps other rows, window, tile of keys, head)."""
    tiles: tl.constexpr = (COUNT_K + KEYS - 1) // KEYS
    head = tl.program_id(0) % heads
    tile = tl.program_id(0) // heads % tiles
    w = tl.program_id(0) // (heads * tiles) % windows
    begin = tl.program_id(0) // (heads * tiles * windows) * samples
    of = 0 if SHARED else begin
    d = tl.arange(0, WIDTH)
    i = tl.arange(0, QUERIES)
    j = tile * KEYS + tl.arange(0, KEYS)
    of_q, of_k = (of * windows + w) * COUNT_Q, (of * windows + w) * COUNT_K
    place_q = tl.load(table_q + w * COUNT_Q + i, i < COUNT_Q, rows).to(tl.int32)
    place_k = tl.load(table_k + w * COUNT_K + j, j < COUNT_K, columns).to(tl.int32)
    slot_q = tl.load(slots + of_q + i, i < COUNT_Q, 0).to(tl.int32) if KEPT_Q else i
    slot_k = tl.load(slots + of_k + j, j < COUNT_K, 0).to(tl.int32) if KEPT_K else j
    asks, is_row = place_q < rows, place_k < columns
    seen = is_row if KEPT_K else j < COUNT_K
    extra = tl.zeros([QUERIES, KEYS], tl.float32)
    d_scores = tl.zeros([QUERIES, KEYS], tl.float32)
    if WHOLE:
        extra = added(bias, regions, head, w, slot_q, slot_k, asks, seen, AREA, HAS_REGIONS)
    for sample in range(begin, tl.minimum(begin + samples, batch)):
        first = tl.full([], 0, tl.int64) + sample * rows
        first_k = tl.full([], 0, tl.int64) + sample * columns
        tk = load_keys(k, pad_k, first_k, place_k, k_row, seen, is_row, head, d, D, PADDED)
        tv = load_keys(v, pad_v, first_k, place_k, v_row, seen, is_row, head, d, D, PADDED)
        tdk = tl.zeros([KEYS, WIDTH], tl.float32)
        tdv = tl.zeros([KEYS, WIDTH], tl.float32)
        for start in range(0, COUNT_Q, QUERIES):
            if not WHOLE:
                t = start + i
                place_q = tl.load(table_q + w * COUNT_Q + t, t < COUNT_Q, rows).to(tl.int32)
                slot_q = tl.load(slots + of_q + t, t < COUNT_Q, 0).to(tl.int32) if KEPT_Q else t
                asks = place_q < rows
                extra = added(bias, regions, head, w, slot_q, slot_k, asks, seen, AREA, HAS_REGIONS)
            tq = load_rows(q, first, place_q, q_row, asks, head, d, D)
            tdo = load_rows(do, first, place_q, do_row, asks, head, d, D)
            to = load_rows(o, first, place_q, o_row, asks, head, d, D)
            delta = tl.sum(tdo.to(tl.float32) * to.to(tl.float32), 1)
            log_total = tl.load(lse + (first + place_q) * heads + head, asks, 0.0)
            s = tl.dot(tq, tl.trans(tk), input_precision=PRECISION) * scale + extra
            p = tl.exp(s - log_total[:, None])
            tdv += tl.dot(tl.trans(p.to(tdo.dtype)), tdo, input_precision=PRECISION)
            ds = p * (tl.dot(tdo, tl.trans(tv), input_precision=PRECISION) - delta[:, None])
            half = ds.to(tq.dtype)
            tdk += tl.dot(tl.trans(half), tq, input_precision=PRECISION)
            if WHOLE:
                tdq = tl.dot(half, tk, input_precision=PRECISION) * scale
                store_rows(dq, first, place_q, asks, head, d, tdq, heads, D)
                if NEEDS_BIAS:
                    d_scores += ds
        tdk *= scale
        store_rows(dk, first_k, place_k, is_row, head, d, tdk, heads, D)
        store_rows(dv, first_k, place_k, is_row, head, d, tdv, heads, D)
        if PADDED:
            beyond = tl.full([], 0, tl.int64) + sample * (windows * AREA - columns)
            store_rows(d_pad_k, beyond, place_k - columns, seen & (is_row == 0), head, d, tdk, heads, D)
            store_rows(d_pad_v, beyond, place_k - columns, seen & (is_row == 0), head, d, tdv, heads, D)
    if WHOLE and NEEDS_BIAS:
        at = d_bias + head * AREA * AREA + slot_q[:, None] * AREA + slot_k[None, :]
        tl.atomic_add(at, d_scores, asks[:, None] & seen[None, :], sem="relaxed")


@triton.jit(do_not_specialize=COUNTS)
def window_backward_queries(
    do, q, k, v, o, lse, bias, pad_k, pad_v, table_q, table_k, slots, regions, dq, d_bias,
    do_row, q_row, k_row, v_row, o_row, rows, columns, heads, windows, scale,
    AREA: tl.constexpr, COUNT_Q: tl.constexpr, COUNT_K: tl.constexpr, D: tl.constexpr, PADDED: tl.constexpr,
    HAS_REGIONS: tl.constexpr, KEPT_Q: tl.constexpr, KEPT_K: tl.constexpr,
    SHARED: tl.constexpr, NEEDS_BIAS: tl.constexpr, PRECISION: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr,
    WIDTH: tl.constexpr,
):  # fmt: skip
    """dQ and the bias's gradient, if a window has several tiles. Program (sample, window, tile of queries, head)."""
    tiles: tl.constexpr = (COUNT_Q + QUERIES - 1) // QUERIES
    head = tl.program_id(0) % heads
    tile = tl.program_id(0) // heads % tiles
    w = tl.program_id(0) // (heads * tiles) % windows
    sample = tl.program_id(0) // (heads * tiles * windows)
    of = 0 if SHARED else sample
    d = tl.arange(0, WIDTH)
    i = tile * QUERIES + tl.arange(0, QUERIES)
    of_q, of_k = (of * windows + w) * COUNT_Q, (of * windows + w) * COUNT_K
    place_q = tl.load(table_q + w * COUNT_Q + i, i < COUNT_Q, rows).to(tl.int32)
    slot_q = tl.load(slots + of_q + i, i < COUNT_Q, 0).to(tl.int32) if KEPT_Q else i
    asks = place_q < rows
    first = tl.full([], 0, tl.int64) + sample * rows
    first_k = tl.full([], 0, tl.int64) + sample * columns
    tq = load_rows(q, first, place_q, q_row, asks, head, d, D)
    tdo = load_rows(do, first, place_q, do_row, asks, head, d, D)
    to = load_rows(o, first, place_q, o_row, asks, head, d, D)
    delta = tl.sum(tdo.to(tl.float32) * to.to(tl.float32), 1)
    log_total = tl.load(lse + (first + place_q) * heads + head, asks, 0.0)
    tdq = tl.zeros([QUERIES, WIDTH], tl.float32)
    for start in range(0, COUNT_K, KEYS):
        j = start + tl.arange(0, KEYS)
        place_k = tl.load(table_k + w * COUNT_K + j, j < COUNT_K, columns).to(tl.int32)
        slot_k = tl.load(slots + of_k + j, j < COUNT_K, 0).to(tl.int32) if KEPT_K else j
        is_row = place_k < columns
        seen = is_row if KEPT_K else j < COUNT_K
        extra = added(bias, regions, head, w, slot_q, slot_k, asks, seen, AREA, HAS_REGIONS)
        tk = load_keys(k, pad_k, first_k, place_k, k_row, seen, is_row, head, d, D, PADDED)
        tv = load_keys(v, pad_v, first_k, place_k, v_row, seen, is_row, head, d, D, PADDED)
        s = tl.dot(tq, tl.trans(tk), input_precision=PRECISION) * scale + extra
        p = tl.exp(s - log_total[:, None])
        ds = p * (tl.dot(tdo, tl.trans(tv), input_precision=PRECISION) - delta[:, None])
        tdq += tl.dot(ds.to(tk.dtype), tk, input_precision=PRECISION)
        if NEEDS_BIAS:
            at = d_bias + head * AREA * AREA + slot_q[:, None] * AREA + slot_k[None, :]
            tl.atomic_add(at, ds, asks[:, None] & seen[None, :], sem="relaxed")
    store_rows(dq, first, place_q, asks, head, d, tdq * scale, heads, D)
