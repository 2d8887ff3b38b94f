"""Triton kernels for kept rows: forward passes gather what they save, and backward passes may choose which to keep."""

import triton
import triton.language as tl


@triton.jit
def take(x, rows, kept, count, C: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    c = tl.arange(0, BLOCK)
    for start in range(tl.program_id(0) * ROWS, count, tl.num_programs(0) * ROWS):
        r = start + tl.arange(0, ROWS)
        here = (r < count)[:, None] & (c < C)[None, :]
        source = tl.load(rows + r, r < count, 0)
        value = tl.load(x + source[:, None] * C + c[None, :], here, 0.0)
        tl.store(kept + r.to(tl.int64)[:, None] * C + c[None, :], value.to(kept.dtype.element_ty), here)


@triton.jit
def keep(
    x, o, lse, rows, kept_x, kept_o, kept_lse, count_x, count, per_sample, positions, lse_sample, lse_head, lse_row,
    C: tl.constexpr, WIDTH: tl.constexpr, HEADS: tl.constexpr, HAS_X: tl.constexpr, X_ROWS: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, BLOCK_HEADS: tl.constexpr,
):  # fmt: skip
    """Copy kept rows of an attention's output and of its log-sum-exp, ``[B, H, k]``; if HAS_X, also x or (X_ROWS) its
    kept rows."""
    c = tl.arange(0, BLOCK)
    h = tl.arange(0, BLOCK_HEADS)
    if HAS_X:
        for start in range(tl.program_id(0) * ROWS, count_x, tl.num_programs(0) * ROWS):
            r = start + tl.arange(0, ROWS)
            here = (r < count_x)[:, None] & (c < C)[None, :]
            source = tl.load(rows + r, r < count_x, 0) if X_ROWS else r.to(tl.int64)
            value = tl.load(x + source[:, None] * C + c[None, :], here, 0.0)
            tl.store(kept_x + r.to(tl.int64)[:, None] * C + c[None, :], value.to(kept_x.dtype.element_ty), here)
    for start in range(tl.program_id(0) * ROWS, count, tl.num_programs(0) * ROWS):
        r = start + tl.arange(0, ROWS)
        row = r.to(tl.int64)
        source = tl.load(rows + r, r < count, 0)
        here = (r < count)[:, None] & (c < WIDTH)[None, :]
        value = tl.load(o + source[:, None] * WIDTH + c[None, :], here, 0.0)
        tl.store(kept_o + row[:, None] * WIDTH + c[None, :], value, here)
        sample = row // per_sample
        here = (r < count)[:, None] & (h < HEADS)[None, :]
        at = sample * lse_sample + (source - sample * positions) * lse_row
        value = tl.load(lse + at[:, None] + h[None, :] * lse_head, here, 0.0)
        at = ((sample * HEADS)[:, None] + h[None, :]) * per_sample + (row % per_sample)[:, None]
        tl.store(kept_lse + at, value, here)


@triton.jit
def lengths(x, lengths, count, C: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """The Euclidean lengths of rows."""
    c = tl.arange(0, BLOCK)
    for start in range(tl.program_id(0) * ROWS, count, tl.num_programs(0) * ROWS):
        r = start + tl.arange(0, ROWS)
        here = (r < count)[:, None] & (c < C)[None, :]
        value = tl.load(x + r.to(tl.int64)[:, None] * C + c[None, :], here, 0.0).to(tl.float32)
        tl.store(lengths + r, tl.sqrt(tl.sum(value * value, 1)), r < count)


@triton.jit
def choose(lengths, marks, rows, counts, inverse, n, k, prefix, BLOCK: tl.constexpr):
    """Program b chooses among the n rows of sample b. Probabilities are laid end to end as multiples of 2^-40, whose
    sums are exact: so no row has two marks, and a row's own threads can tell whether it has one."""
    b = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    free = (i >= prefix) & (i < n)
    length = tl.load(lengths + b * n + i, free, 0.0).to(tl.float64)
    length = tl.where(free & (length < 1e-30), 1e-30, length)  # if all are zero, all are alike; NaN stays NaN

    always, among = 0, tl.sum(length, 0)  # how many rows have p = 1; the sum of all other lengths
    c = k / among
    more = True
    while more:
        clipped = free & (c * length >= 1.0)
        found = tl.sum(clipped.to(tl.int32), 0)
        more = (found > always) & (found < k)
        among = tl.where(more, tl.sum(tl.where(clipped, 0.0, length), 0), among)
        c = tl.where(more, (k - found) / among, c)
        always = found
    p = tl.where(c * length >= 1.0, 1.0, c * length)

    one: tl.constexpr = 1 << 40
    wide = tl.where(p > 0.0, p * one, 0.0).to(tl.int64)
    start = ((1.0 - tl.load(marks + b * k)) * one).to(tl.int64)
    start = tl.maximum(start, tl.cast(k, tl.int64) * one - tl.sum(wide, 0))  # rounded down, they may miss the last mark
    ends = start + tl.cumsum(wide, 0)
    mark = (ends >> 40) - 1  # the last one up to the row's end
    chosen = free & (mark >= ((ends - wide) >> 40)) & (mark < k)

    own = b * (prefix + k)
    tl.store(rows + own + i, b * n + i, i < prefix + k)  # places that no row takes (sums are rounded, or NaN) count 0
    tl.store(counts + own + i, tl.where(i < prefix, 1.0, 0.0 * among).to(tl.float32), i < prefix + k)
    tl.debug_barrier()  # threads write where others have written
    tl.store(rows + own + prefix + mark, b * n + i, chosen)
    tl.store(counts + own + prefix + mark, (1.0 / tl.where(chosen, p, 1.0)).to(tl.float32), chosen)
    place = tl.where(i < prefix, own + i, tl.where(chosen, own + prefix + mark, -1))
    tl.store(inverse + b * n + i, place.to(tl.int32), i < n)
