"""The gate itself, lean: identity in forward; in backward the rows outside the kept set are zero."""

from typing import Any

import torch
from torch import Tensor

from . import rows as R
from .compiling import op
from .once import once


def gate(y: Tensor, rows: R.Rows) -> Tensor:
    """``y [B, ..., C]`` with its gradient kept at ``rows`` only; saves nothing but the indices."""
    return y if rows is None else _run_gate(y, rows)


class _Gate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, rows: Tensor) -> Tensor:
        ctx.save_for_backward(rows)
        return y.view_as(y)

    @staticmethod
    @once
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        (rows,) = ctx.saved_tensors
        return R.put(torch.zeros_like(dy), rows, R.take(dy, rows)), None


_run_gate = op(_Gate)
