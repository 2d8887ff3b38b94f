"""Triton kernels for what forward passes save: kept rows. Every kernel walks over tiles of whole rows."""

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
