"""A patch embedding, a convolution whose stride is its kernel: ``y = patches(x) Wᵀ + b``.

It is exact, not sampled. Patches do not overlap, so backward is that of a linear layer on patches, which are cut out of
x again: images that their owner holds anyway are not saved a second time in the precision of products. Forward is the
convolution, bit for bit; when compiling, which changes kernels anyway, it is the linear layer, which is faster on GPUs.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from . import rows as R
from .compiling import compiling, op
from .device import device_of
from .layers import Grad, autocast_dtype, cast
from .once import once


def patch_embedding(x: Tensor, weight: Tensor, bias: Grad, held: bool = True) -> Tensor:
    """Convolve ``x [B, C, *size]`` with ``weight [C', C, *kernel]``, in two or three dimensions. With ``held``, x is
    saved as it is, since others hold it too; otherwise in the precision of products."""
    return _run_patch_embedding(x, weight, bias, autocast_dtype(x), held)


def cut_patches(x: Tensor, kernel: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Cut ``x [B, C, *size]`` into patches by one copy: rows ``[B * N, C * prod(kernel)]`` in the order of
    ``weight.flatten(1)``. What is left over at the end of a dimension is cut off."""
    for dim, k in enumerate(kernel, 2):
        x = x.unfold(dim, k, k)
    x = x.movedim(1, len(kernel) + 1).to(dtype, memory_format=torch.contiguous_format)
    return x.flatten(len(kernel) + 1).flatten(0, len(kernel))


def convolution(x: Tensor, weight: Tensor, bias: Grad, transposed: bool = False, rest: Sequence[int] = ()) -> Tensor:
    """Run the convolution or its transpose, which puts patches side by side and zeros into the ``rest`` that no patch
    covers at the end of every dimension."""
    kernel = weight.shape[2:]
    none, one = [0] * len(kernel), [1] * len(kernel)
    return torch.convolution(x, weight, bias, kernel, none, one, transposed, rest or none, 1)


class _PatchEmbedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Grad, dtype: torch.dtype | None, held: bool) -> Tensor:
        seen, (w, b) = cast(x, dtype), device_of(x).cast(dtype, weight, bias)
        _, needs_weight, *_ = ctx.needs_input_grad
        ctx.save_for_backward((x if held else seen) if needs_weight else None, weight)
        ctx.static = x.shape[2:], x.dtype
        if not compiling():
            return convolution(seen, w, b)
        kernel = weight.shape[2:]
        grid = [n // k for n, k in zip(x.shape[2:], kernel, strict=True)]
        y = F.linear(cut_patches(x, kernel, w.dtype), w.flatten(1), b)
        return R.channels_back(y.view(x.shape[0], *grid, -1), 2)

    @staticmethod
    @once
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        (x, weight), (size, x_dtype) = ctx.saved_tensors, ctx.static
        needs_x, needs_weight, needs_bias, *_ = ctx.needs_input_grad
        kernel, rows = weight.shape[2:], R.flat(R.channels_last(dy, 2))
        dx = dw = db = None
        if needs_weight:
            patches = cut_patches(R.after(dy, x), kernel, dy.dtype)
            dw = device_of(dy).weight_gradient(weight, (rows, patches)).view(weight.shape)
        if needs_bias:
            db = rows.sum(0, dtype=weight.dtype)
        if needs_x:
            rest = [n % k for n, k in zip(size, kernel, strict=True)]
            dx = cast(convolution(dy, cast(weight, dy.dtype), None, transposed=True, rest=rest), x_dtype)
        return dx, dw, db, None, None


_run_patch_embedding = op(_PatchEmbedding)
