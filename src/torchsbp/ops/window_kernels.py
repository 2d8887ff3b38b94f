"""Triton kernels for attention in windows, launched by ``window_launches.py``.

A program has one head of one window, or a tile of it. Rows are ``[rows, heads · D]`` and read where they are: ``*_row``
is the distance from one to the next. Arithmetic is in float32 whatever is stored.
"""

import triton
import triton.language as tl

from .window_attention import MASKED

ACROSS = tl.constexpr(MASKED)


@triton.jit
def locate(
    i, sample, w, places, slots, kept, n, size, WINDOWS: tl.constexpr, AREA: tl.constexpr, COUNT: tl.constexpr,
    KEPT: tl.constexpr, SHARED: tl.constexpr,
):  # fmt: skip
    """Of the slots i of a window, or of its kept ones: their numbers in it, their rows, whether they are rows, and
    which padding they are if not."""
    inside = i < COUNT
    if KEPT:
        of = 0 if SHARED else sample
        slot = tl.load(slots + (of * WINDOWS + w) * COUNT + i, inside, 0)
        place = tl.load(kept + w * COUNT + i, inside, 0)
        rows = size
    else:
        slot = i.to(tl.int64)
        place = tl.load(places + w * AREA + i, inside, 0)
        rows = n
    return slot, sample * rows + place, inside & (place < rows), inside, place - rows


@triton.jit
def load_rows(x, row, distance, is_row, head, d, D: tl.constexpr):
    return tl.load(x + row[:, None] * distance + head * D + d[None, :], is_row[:, None] & (d < D)[None, :], 0.0)


@triton.jit
def load_keys(x, padding, row, distance, is_row, inside, head, d, D: tl.constexpr, PADDED: tl.constexpr):
    """Rows of keys or values; padding's where there is no row."""
    found = load_rows(x, row, distance, is_row, head, d, D)
    if PADDED:
        beyond = tl.load(padding + head * D + d, d < D, 0.0).to(x.dtype.element_ty)
        found = tl.where((inside & (is_row == 0))[:, None], beyond[None, :], found)
    return found


@triton.jit
def scores(
    tq, tk, bias, regions, head, w, slot_q, slot_k, seen_q, seen_k, scale, AREA: tl.constexpr,
    HAS_REGIONS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    s = tl.dot(tq, tl.trans(tk), input_precision=PRECISION) * scale
    here = seen_q[:, None] & seen_k[None, :]
    s += tl.load(bias + head * AREA * AREA + slot_q[:, None] * AREA + slot_k[None, :], here, 0.0).to(tl.float32)
    if HAS_REGIONS:
        of_q = tl.load(regions + w * AREA + slot_q, seen_q, 0)
        of_k = tl.load(regions + w * AREA + slot_k, seen_k, 0)
        s += tl.where(of_q[:, None] != of_k[None, :], ACROSS, 0.0)
    return s


@triton.jit
def window_forward(
    q, k, v, bias, pad_k, pad_v, places, regions, o, lse, q_row, k_row, v_row, n, scale,
    WINDOWS: tl.constexpr, AREA: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr, PADDED: tl.constexpr,
    HAS_REGIONS: tl.constexpr, PRECISION: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Program (window, tile of queries, head), the heads of a window side by side."""
    tiles: tl.constexpr = (AREA + QUERIES - 1) // QUERIES
    head = tl.program_id(0) % HEADS
    tile = tl.program_id(0) // HEADS % tiles
    window = tl.program_id(0) // (HEADS * tiles)
    sample, w = window // WINDOWS, window % WINDOWS
    d = tl.arange(0, WIDTH)
    i = tile * QUERIES + tl.arange(0, QUERIES)
    slot_q, row_q, asks, inside_q, _ = locate(
        i, sample, w, places, None, None, n, n, WINDOWS, AREA, AREA, False, True
    )
    tq = load_rows(q, row_q, q_row, asks, head, d, D)
    highest = tl.full([QUERIES], float("-inf"), tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    out = tl.zeros([QUERIES, WIDTH], tl.float32)
    for start in range(0, AREA, KEYS):
        j = start + tl.arange(0, KEYS)
        slot_k, row_k, is_row, seen, _ = locate(
            j, sample, w, places, None, None, n, n, WINDOWS, AREA, AREA, False, True
        )
        tk = load_keys(k, pad_k, row_k, k_row, is_row, seen, head, d, D, PADDED)
        tv = load_keys(v, pad_v, row_k, v_row, is_row, seen, head, d, D, PADDED)
        s = scores(tq, tk, bias, regions, head, w, slot_q, slot_k, inside_q, seen, scale, AREA, HAS_REGIONS, PRECISION)
        s = tl.where(seen[None, :], s, float("-inf"))
        higher = tl.maximum(highest, tl.max(s, 1))
        shrink = tl.exp(highest - higher)
        p = tl.exp(s - higher[:, None])
        total = total * shrink + tl.sum(p, 1)
        out = out * shrink[:, None] + tl.dot(p.to(tv.dtype), tv, input_precision=PRECISION)
        highest = higher
    here = asks[:, None] & (d < D)[None, :]
    out = out / total[:, None]
    tl.store(o + row_q[:, None] * (HEADS * D) + head * D + d[None, :], out.to(o.dtype.element_ty), here)
    tl.store(lse + row_q * HEADS + head, highest + tl.log(total), asks)


@triton.jit
def window_backward(
    do, q, k, v, o, lse, bias, pad_k, pad_v, places, regions, slots, kept, dq, dk, dv, d_pad_k, d_pad_v, d_bias,
    do_row, q_row, k_row, v_row, o_row, n, size, batch, scale,
    WINDOWS: tl.constexpr, AREA: tl.constexpr, COUNT_Q: tl.constexpr, COUNT_K: tl.constexpr, HEADS: tl.constexpr,
    D: tl.constexpr, PADDED: tl.constexpr, HAS_REGIONS: tl.constexpr, KEPT_Q: tl.constexpr, KEPT_K: tl.constexpr,
    SHARED: tl.constexpr, NEEDS_BIAS: tl.constexpr, WHOLE: tl.constexpr, SAMPLES: tl.constexpr,
    PRECISION: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """dK and dV. Program (some samples, window, tile of keys, head); if a window is one tile (WHOLE), dQ and the bias's
    gradient too, which is summed over the samples first."""
    tiles: tl.constexpr = (COUNT_K + KEYS - 1) // KEYS
    head = tl.program_id(0) % HEADS
    tile = tl.program_id(0) // HEADS % tiles
    w = tl.program_id(0) // (HEADS * tiles) % WINDOWS
    first = tl.program_id(0) // (HEADS * tiles * WINDOWS) * SAMPLES
    channels: tl.constexpr = HEADS * D
    d = tl.arange(0, WIDTH)
    j = tile * KEYS + tl.arange(0, KEYS)
    d_scores = tl.zeros([QUERIES, KEYS], tl.float32)
    for sample in range(first, tl.minimum(first + SAMPLES, batch)):
        slot_k, row_k, is_row, seen, pad = locate(
            j, sample, w, places, slots, kept, n, size, WINDOWS, AREA, COUNT_K, KEPT_K, SHARED
        )
        if KEPT_K:
            seen = is_row
        tk = load_keys(k, pad_k, row_k, k_row, is_row, seen, head, d, D, PADDED)
        tv = load_keys(v, pad_v, row_k, v_row, is_row, seen, head, d, D, PADDED)
        tdk = tl.zeros([KEYS, WIDTH], tl.float32)
        tdv = tl.zeros([KEYS, WIDTH], tl.float32)
        for start in range(0, COUNT_Q, QUERIES):
            i = start + tl.arange(0, QUERIES)
            slot_q, row_q, asks, _, _ = locate(
                i, sample, w, places, slots, kept, n, size, WINDOWS, AREA, COUNT_Q, KEPT_Q, SHARED
            )
            tq = load_rows(q, row_q, q_row, asks, head, d, D)
            tdo = load_rows(do, row_q, do_row, asks, head, d, D)
            to = load_rows(o, row_q, o_row, asks, head, d, D)
            delta = tl.sum(tdo.to(tl.float32) * to.to(tl.float32), 1)
            s = scores(tq, tk, bias, regions, head, w, slot_q, slot_k, asks, seen, scale, AREA, HAS_REGIONS, PRECISION)
            log_total = tl.load(lse + row_q * HEADS + head, asks, 0.0)
            p = tl.where(asks[:, None] & seen[None, :], tl.exp(s - log_total[:, None]), 0.0)
            tdv += tl.dot(tl.trans(p.to(tdo.dtype)), tdo, input_precision=PRECISION)
            ds = p * (tl.dot(tdo, tl.trans(tv), input_precision=PRECISION) - delta[:, None])
            half = ds.to(tq.dtype)
            tdk += tl.dot(tl.trans(half), tq, input_precision=PRECISION)
            if WHOLE:
                tdq = tl.dot(half, tk, input_precision=PRECISION) * scale
                at = row_q[:, None] * channels + head * D + d[None, :]
                tl.store(dq + at, tdq.to(dq.dtype.element_ty), asks[:, None] & (d < D)[None, :])
                if NEEDS_BIAS:
                    d_scores += ds
        tdk *= scale
        at = row_k[:, None] * channels + head * D + d[None, :]
        here = is_row[:, None] & (d < D)[None, :]
        tl.store(dk + at, tdk.to(dk.dtype.element_ty), here)
        tl.store(dv + at, tdv.to(dv.dtype.element_ty), here)
        if PADDED:
            at = (sample * (WINDOWS * AREA - n) + pad)[:, None] * channels + head * D + d[None, :]
            here = (seen & (is_row == 0))[:, None] & (d < D)[None, :]
            tl.store(d_pad_k + at, tdk, here)
            tl.store(d_pad_v + at, tdv, here)
    if WHOLE and NEEDS_BIAS:
        i = tl.arange(0, QUERIES)
        slot_q, _, asks, _, _ = locate(
            i, first, w, places, slots, kept, n, size, WINDOWS, AREA, COUNT_Q, KEPT_Q, SHARED
        )
        slot_k, _, is_row, seen, _ = locate(
            j, first, w, places, slots, kept, n, size, WINDOWS, AREA, COUNT_K, KEPT_K, SHARED
        )
        if KEPT_K:
            seen = is_row
        at = d_bias + head * AREA * AREA + slot_q[:, None] * AREA + slot_k[None, :]
        tl.atomic_add(at, d_scores, asks[:, None] & seen[None, :], sem="relaxed")


@triton.jit
def window_backward_queries(
    do, q, k, v, o, lse, bias, pad_k, pad_v, places, regions, slots, kept, dq, d_bias,
    do_row, q_row, k_row, v_row, o_row, n, size, scale,
    WINDOWS: tl.constexpr, AREA: tl.constexpr, COUNT_Q: tl.constexpr, COUNT_K: tl.constexpr, HEADS: tl.constexpr,
    D: tl.constexpr, PADDED: tl.constexpr, HAS_REGIONS: tl.constexpr, KEPT_Q: tl.constexpr, KEPT_K: tl.constexpr,
    SHARED: tl.constexpr, NEEDS_BIAS: tl.constexpr, PRECISION: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr,
    WIDTH: tl.constexpr,
):  # fmt: skip
    """dQ and the bias's gradient, where a window has several tiles. Program (window, tile of queries, head)."""
    tiles: tl.constexpr = (COUNT_Q + QUERIES - 1) // QUERIES
    head = tl.program_id(0) % HEADS
    tile = tl.program_id(0) // HEADS % tiles
    window = tl.program_id(0) // (HEADS * tiles)
    sample, w = window // WINDOWS, window % WINDOWS
    d = tl.arange(0, WIDTH)
    i = tile * QUERIES + tl.arange(0, QUERIES)
    slot_q, row_q, asks, _, _ = locate(
        i, sample, w, places, slots, kept, n, size, WINDOWS, AREA, COUNT_Q, KEPT_Q, SHARED
    )
    tq = load_rows(q, row_q, q_row, asks, head, d, D)
    tdo = load_rows(do, row_q, do_row, asks, head, d, D)
    to = load_rows(o, row_q, o_row, asks, head, d, D)
    delta = tl.sum(tdo.to(tl.float32) * to.to(tl.float32), 1)
    log_total = tl.load(lse + row_q * HEADS + head, asks, 0.0)
    tdq = tl.zeros([QUERIES, WIDTH], tl.float32)
    for start in range(0, COUNT_K, KEYS):
        j = start + tl.arange(0, KEYS)
        slot_k, row_k, is_row, seen, _ = locate(
            j, sample, w, places, slots, kept, n, size, WINDOWS, AREA, COUNT_K, KEPT_K, SHARED
        )
        if KEPT_K:
            seen = is_row
        tk = load_keys(k, pad_k, row_k, k_row, is_row, seen, head, d, D, PADDED)
        tv = load_keys(v, pad_v, row_k, v_row, is_row, seen, head, d, D, PADDED)
        s = scores(tq, tk, bias, regions, head, w, slot_q, slot_k, asks, seen, scale, AREA, HAS_REGIONS, PRECISION)
        here = asks[:, None] & seen[None, :]
        p = tl.where(here, tl.exp(s - log_total[:, None]), 0.0)
        ds = p * (tl.dot(tdo, tl.trans(tv), input_precision=PRECISION) - delta[:, None])
        tdq += tl.dot(ds.to(tk.dtype), tk, input_precision=PRECISION)
        if NEEDS_BIAS:
            at = d_bias + head * AREA * AREA + slot_q[:, None] * AREA + slot_k[None, :]
            tl.atomic_add(at, ds, here, sem="relaxed")
    at = row_q[:, None] * (HEADS * D) + head * D + d[None, :]
    tl.store(dq + at, (tdq * scale).to(dq.dtype.element_ty), asks[:, None] & (d < D)[None, :])
