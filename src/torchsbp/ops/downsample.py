"""Down-sampling with stride ≥ kernel: ``y = gate(conv(norm(x)))``. Patches do not overlap, so outputs are independent.

Every output position is a linear function of its own patch of normalised x. So backward is that of a linear layer on
the patches of kept outputs, and only these patches of x are saved. If all outputs are kept and their patches cover x,
x is saved as it is.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from . import rows as R
from .compiling import op
from .device import device_of, weight_gradient
from .layers import BackwardOptions, Grad, Norm, autocast_dtype, cast, norm, parameter_gradients, saved_dtype
from .named import split
from .once import once
from .steps import Affine


class DownsampleParams(NamedTuple):
    """The parameters; ``weight [C', C, kh, kw]``."""

    norm_weight: Grad
    norm_bias: Grad
    weight: Any
    bias: Grad


class DownsampleSpec(NamedTuple):
    stride: tuple[int, int]
    norm: Norm = Norm()
    dtype: torch.dtype | None = None


def downsample(
    x: Tensor,
    rows: R.Rows,
    params: DownsampleParams,
    spec: DownsampleSpec,
    options: BackwardOptions = BackwardOptions(),
) -> Tensor:
    """Return the layer's output for ``x [B, C, H, W]``; ``rows`` are kept output positions."""
    spec = spec._replace(dtype=autocast_dtype(x))
    return _run_downsample(*DownsampleInputs(x, rows, spec, options), *params)


def patch_rows(rows: Tensor, size: Sequence[int], kernel: Sequence[int], stride: Sequence[int]) -> Tensor:
    """Return the input rows ``[len(rows) * kh * kw]`` of the given output rows' patches; ``size`` is (B, H, W)."""
    (kh, kw), (down, right) = kernel, stride
    patches = torch.arange(math.prod(size), device=rows.device).view(*size).unfold(1, kh, down).unfold(2, kw, right)
    return patches.reshape(-1, kh * kw).index_select(0, rows).flatten()


def into_patches(x: Tensor, kernel: Sequence[int]) -> Tensor:
    """Reorder ``x [B, H, W, C]``, which patches cover without a rest, to rows ``[-1, C]``, patch after patch."""
    (B, H, W, C), (kh, kw) = x.shape, kernel
    return x.view(B, H // kh, kh, W // kw, kw, C).transpose(2, 3).reshape(-1, C)


def out_of_patches(x: Tensor, size: Sequence[int], kernel: Sequence[int]) -> Tensor:
    """Undo ``into_patches``; ``size`` is (B, H, W, C)."""
    (B, H, W, C), (kh, kw) = size, kernel
    return x.view(B, H // kh, W // kw, kh, kw, C).transpose(2, 3).reshape(B, H, W, C)


class DownsampleInputs(NamedTuple):
    """The autograd function's arguments before the parameters; among its gradients, only that of x is not None."""

    x: Any
    rows: R.Rows = None
    spec: DownsampleSpec | None = None
    options: BackwardOptions | None = None


class DownsampleSaved(NamedTuple):
    """What the function saves before the parameters: the rows of x in the patches of kept outputs, and the indices of
    these outputs; or all of x ``[B, C, H, W]`` and None."""

    x: Tensor
    rows: R.Rows


class _Downsample(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *flat: Any) -> Tensor:
        (x, rows, spec, options), p = split(flat, DownsampleInputs, DownsampleParams)
        channels_last, (kh, kw) = x.permute(0, 2, 3, 1), p.weight.shape[2:]
        n = norm(channels_last, p.norm_weight, p.norm_bias, spec.norm).permute(0, 3, 1, 2)
        weight, bias = device_of(x).cast(spec.dtype, p.weight, p.bias)
        y = F.conv2d(cast(n, spec.dtype), weight, bias, spec.stride)
        if rows is None and (y.shape[2] * kh, y.shape[3] * kw) != x.shape[2:]:
            rows = torch.arange(y.shape[0] * y.shape[2] * y.shape[3], device=x.device)
        kept = x
        if rows is not None:
            kept = R.take(channels_last, patch_rows(rows, channels_last.shape[:3], (kh, kw), spec.stride))
        kept = cast(kept, saved_dtype(x, spec.dtype, options.recompute))
        ctx.save_for_backward(*DownsampleSaved(kept, rows), *p)
        ctx.static = spec, options, channels_last.shape, x.dtype
        return y

    @staticmethod
    @once
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        (x, rows), p = split(ctx.saved_tensors, DownsampleSaved, DownsampleParams)
        _, needs = split(ctx.needs_input_grad, DownsampleInputs, DownsampleParams)
        (spec, options, (B, H, W, C), x_dtype), (out, _, kh, kw) = ctx.static, p.weight.shape
        x = into_patches(x.permute(0, 2, 3, 1), (kh, kw)) if rows is None else x
        steps, affine = device_of(x).steps(x, out + 2 * C), Affine(p.norm_weight, p.norm_bias, spec.norm)
        n = steps.normalise(x, affine, spec.dtype, after=dy)
        weight, dy_rows = options.row_weight, R.flat(dy.permute(0, 2, 3, 1))
        kept_dy, _ = steps.cotangent(dy_rows, rows, None, None, B, n.y.dtype, total="output", weight=weight)
        matrix = p.weight.permute(0, 2, 3, 1).flatten(1)
        dw = weight_gradient(kept_dy, n.y.view(-1, kh * kw * C), matrix, needs.weight)
        if dw is not None:
            dw = dw.view(out, kh, kw, C).permute(0, 3, 1, 2)
        dn = kept_dy @ cast(matrix, n.y.dtype)
        inputs = None if rows is None else patch_rows(rows, (B, H, W), (kh, kw), spec.stride)
        dx = steps.norm_backward_input(
            dn.view_as(x), n, affine, x_dtype, rows=inputs, size=B * H * W, norm_total="norm"
        )
        del x, n, kept_dy, dn  # each is about as large as dx, of which a second copy may be made next
        dx = (out_of_patches(dx, (B, H, W, C), (kh, kw)) if rows is None else dx.view(B, H, W, C)).permute(0, 3, 1, 2)
        totals = steps.totals()
        grads = DownsampleParams(totals["norm_weight"], totals["norm_bias"], dw, totals["output"])
        return *DownsampleInputs(dx), *parameter_gradients(grads, p, needs, options.weight_scale)


_run_downsample = op(_Downsample)
