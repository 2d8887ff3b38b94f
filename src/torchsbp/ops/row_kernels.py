"""Triton kernels that keep rows: for what forward passes save, and which ones, where backward chooses."""

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
    """Kept rows of an attention's output and of its log-sum-exp, ``[B, H, k]``; and x, or its kept rows (X_ROWS)."""
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
    """Of rows, as vectors."""
    c = tl.arange(0, BLOCK)
    for start in range(tl.program_id(0) * ROWS, count, tl.num_programs(0) * ROWS):
        r = start + tl.arange(0, ROWS)
        here = (r < count)[:, None] & (c < C)[None, :]
        value = tl.load(x + r.to(tl.int64)[:, None] * C + c[None, :], here, 0.0).to(tl.float32)
        tl.store(lengths + r, tl.sqrt(tl.sum(value * value, 1)), r < count)


@triton.jit
def choose(
    lengths, marks, rows, counts, inverse, n, k, prefix, BLOCK: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    """Program b: of the n rows of sample b. Arithmetic is in float64, that marks lie on the rows that they should."""
    b = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    free = (i >= prefix) & (i < n)
    length = tl.load(lengths + b * n + i, free, 0.0).to(tl.float64)
    length = tl.where(free & (length < 1e-30), 1e-30, length)  # where all are zero all are alike; what is NaN stays so

    always, among = 0, tl.sum(length, 0)  # rows with p = 1, and the lengths of all others
    c = k / among
    more = True
    while more:
        clipped = free & (c * length >= 1.0)
        found = tl.sum(clipped.to(tl.int32), 0)
        more = (found > always) & (found < k)
        among = tl.where(more, tl.sum(tl.where(clipped, 0.0, length), 0), among)
        c = tl.where(more, (k - found) / among, c)
        always = found
    ends = tl.cumsum(tl.where(c * length >= 1.0, 1.0, c * length), 0)

    own = b * (prefix + k)
    tl.store(inverse + b * n + i, tl.where(i < prefix, own + i, -1).to(tl.int32), i < n)
    tl.store(rows + own + i, b * n + i, i < prefix)
    tl.store(counts + own + i, tl.full([BLOCK], 1.0, tl.float32), i < prefix)
    tl.debug_barrier()  # threads write where others have written
    for first in range(0, k, AT_ONCE):
        j = first + tl.arange(0, AT_ONCE)
        mark = tl.load(marks + b * k + j, j < k, 0.0)
        before = free[:, None] & (ends[:, None] < mark[None, :])
        pick = tl.minimum(prefix + tl.sum(before.to(tl.int32), 0), n - 1)
        its = tl.load(lengths + b * n + pick, j < k, 1.0).to(tl.float64)
        its = c * tl.where(its < 1e-30, 1e-30, its)
        tl.store(rows + own + prefix + j, b * n + pick, j < k)
        tl.store(counts + own + prefix + j, tl.where(its >= 1.0, 1.0, 1.0 / its).to(tl.float32), j < k)
        tl.store(inverse + b * n + pick, (own + prefix + j).to(tl.int32), j < k)
