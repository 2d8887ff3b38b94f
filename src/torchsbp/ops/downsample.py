"""Down-sampling with stride ≥ kernel: ``y = gate(conv(norm(x)))``. Patches do not overlap, so outputs are independent.

Every output position is a linear function of its own patch: the backward pass runs on the patches of kept outputs, and
only these are saved.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from . import rows as R
from .layers import Backward, Grad, Norm, autocast_dtype, cast, norm, parameter_gradients, weight_gradient
from .steps import Affine, steps_for


class Downsample(NamedTuple):
    """The parameters; ``weight [C', C, kh, kw]``."""

    norm_weight: Grad
    norm_bias: Grad
    weight: Tensor
    bias: Grad


class DownsampleSpec(NamedTuple):
    stride: tuple[int, int]
    norm: Norm = Norm()
    dtype: torch.dtype | None = None


def downsample(x: Tensor, rows: R.Rows, params: Downsample, spec: DownsampleSpec, how: Backward = Backward()) -> Tensor:
    """The layer on ``x [B, C, H, W]``; ``rows`` are kept output positions."""
    return _Downsample.apply(x, rows, spec._replace(dtype=autocast_dtype(x)), how, *params)


def patch_rows(
    rows: Tensor, size: Sequence[int], out: Sequence[int], kernel: Sequence[int], stride: Sequence[int]
) -> Tensor:
    """Input rows ``[len(rows) * kh * kw]`` of the patches behind the given output rows."""
    (H, W), (h, w) = size, out
    sample, i, j = rows // (h * w), rows % (h * w) // w, rows % w
    corner = (sample * H + i * stride[0]) * W + j * stride[1]
    di = torch.arange(kernel[0], device=rows.device) * W
    dj = torch.arange(kernel[1], device=rows.device)
    return (corner[:, None, None] + di[:, None] + dj).flatten()


class _Downsample(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: R.Rows, spec: DownsampleSpec, how: Backward, *params: Grad) -> Tensor:
        p = Downsample(*params)  # type: ignore[arg-type]
        channels_last = x.permute(0, 2, 3, 1)
        n = norm(channels_last, p.norm_weight, p.norm_bias, spec.norm).permute(0, 3, 1, 2)
        bias = None if p.bias is None else cast(p.bias, spec.dtype)
        y = F.conv2d(cast(n, spec.dtype), cast(p.weight, spec.dtype), bias, spec.stride)
        if rows is None:
            rows = torch.arange(y.shape[0] * y.shape[2] * y.shape[3], device=x.device)
        inputs = patch_rows(rows, x.shape[2:], y.shape[2:], p.weight.shape[2:], spec.stride)
        ctx.save_for_backward(R.take(channels_last, inputs), rows, *params)
        ctx.spec, ctx.weight_scale, ctx.shape = spec, how.weight_scale, channels_last.shape
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        tensors = ctx.saved_tensors
        x, rows = tensors[:2]
        p, spec, needs = Downsample(*tensors[2:]), ctx.spec, ctx.needs_input_grad[4:]
        B, H, W, C = ctx.shape
        out, _, kh, kw = p.weight.shape
        steps, affine = steps_for(x, out + 2 * C), Affine(p.norm_weight, p.norm_bias, spec.norm)
        n = steps.normalise(x, affine, spec.dtype, after=dy)
        kept_dy, _ = steps.cotangent(R.flat(dy.permute(0, 2, 3, 1)), rows, None, None, B, n.y.dtype)
        matrix = p.weight.permute(0, 2, 3, 1).flatten(1)
        dw = weight_gradient(kept_dy, n.y.view(-1, kh * kw * C), matrix, needs[2])
        if dw is not None:
            dw = dw.view(out, kh, kw, C).permute(0, 3, 1, 2)
        dn = kept_dy @ cast(matrix, n.y.dtype)
        inputs = patch_rows(rows, (H, W), dy.shape[2:], (kh, kw), spec.stride)
        dx = steps.norm_backward_input(dn.view_as(x), n, affine, x.dtype, rows=inputs, size=B * H * W)
        db, dnw, dnb = steps.totals()
        dx = dx.view(B, H, W, C).permute(0, 3, 1, 2)
        return dx, *[None] * 3, *parameter_gradients((dnw, dnb, dw, db), p, needs, ctx.weight_scale)
