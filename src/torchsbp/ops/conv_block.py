"""The ConvNeXt block as one function: ``y = x + s · gate(γ ∘ (W₂ act(W₁ norm(conv(x)) + b₁) + b₂))``.

It is the MLP branch on the output u of a convolution that keeps the size of x, plus x. The convolution is exact: all of
x is saved, in the precision of products; of u only the kept rows. Left to autograd, convolution and sum would be some
fifteen launches beside the branch's captured passes, and the gradient of x would take twice the convolution's forward.
"""

from functools import partial
from inspect import unwrap
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from . import rows as R
from .captured import Context, Noted, captured_backward, captured_forward
from .compiling import op
from .device import device_of
from .layers import BackwardOptions, Grad, autocast_dtype, cast
from .mlp import MLPInputs, MLPParams, MLPSpec, _MLPBranch
from .named import first, split
from .once import once

branch_forward, branch_backward = unwrap(_MLPBranch.forward), unwrap(_MLPBranch.backward)
"""The branch's passes without their capture: the block's passes are captured as a whole."""


class ConvParams(NamedTuple):
    """The parameters of the convolution; ``weight [C, C / groups, kh, kw]``."""

    weight: Any
    bias: Grad


class ConvSpec(NamedTuple):
    """The static part of the convolution; its stride is 1."""

    padding: tuple[int, int]
    dilation: tuple[int, int]
    groups: int


def conv_block(
    x: Tensor,
    rows: R.Rows,
    conv: ConvParams,
    conv_spec: ConvSpec,
    mlp: MLPParams,
    mlp_spec: MLPSpec,
    *,
    inverse: Tensor | None = None,
    marks: Tensor | None = None,
    factor: Tensor | None = None,
    options: BackwardOptions = BackwardOptions(),
) -> Tensor:
    """Return the block's output for ``x [B, C, H, W]``, in scope "branch". ``factor [B]`` is stochastic depth's factor
    per sample, ``inverse`` that of ``rows`` if it is at hand; ``marks [B, k]`` stand for rows that backward chooses."""
    assert options.scope == "branch"
    spec = mlp_spec._replace(dtype=autocast_dtype(x))
    return _run_conv_block(*ConvInputs(x, rows, inverse, marks, factor, conv_spec, spec, options), *conv, *mlp)


class ConvInputs(NamedTuple):
    """The autograd function's arguments before the parameters; among its gradients, only that of x is not None."""

    x: Any
    rows: R.Rows = None
    inverse: Grad = None
    marks: Grad = None
    factor: Grad = None
    conv_spec: ConvSpec | None = None
    mlp_spec: MLPSpec | None = None
    options: BackwardOptions | None = None


class ConvSaved(NamedTuple):
    """What the function saves before what the branch saves: x and the weight, in the precision of products."""

    x: Tensor
    weight: Tensor


CAPTURED_SHARE = 0.6
"""A pass is captured only up to this share of ``graphs.LARGEST`` elements: the memory that the graphs of a large one
hold would serve only the few blocks of a stage."""


class _ConvBlock(torch.autograd.Function):
    @staticmethod
    @partial(captured_forward, share=CAPTURED_SHARE)
    def forward(ctx: Any, *flat: Any) -> Tensor:
        inputs, conv, mlp = split(flat, ConvInputs, ConvParams, MLPParams)
        x, rows, inverse, marks, factor, conv_spec, spec, options = inputs
        weight, bias = device_of(x).cast(spec.dtype, *conv)
        seen = cast(x, spec.dtype)
        u = F.conv2d(seen, weight, bias, 1, *conv_spec).permute(0, 2, 3, 1)
        branch = Noted()
        y = branch_forward(branch, *MLPInputs(u, rows, inverse, marks, factor, spec, False, options), *mlp)
        ctx.save_for_backward(*ConvSaved(seen, weight), *branch.saved)
        ctx.static = conv_spec, conv.weight.dtype, x.dtype, branch.static
        return y.permute(0, 3, 1, 2) + x

    @staticmethod
    @once
    @partial(captured_backward, share=CAPTURED_SHARE)
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        (x, weight), saved = first(ctx.saved_tensors, ConvSaved)
        needs, needs_conv, needs_mlp = split(ctx.needs_input_grad, ConvInputs, ConvParams, MLPParams)
        (padding, dilation, groups), dtype, x_dtype, static = ctx.static
        branch = Context(saved, (*MLPInputs(True), *needs_mlp), static)
        (du, *_), grads = split(branch_backward(branch, dy.permute(0, 2, 3, 1)), MLPInputs, MLPParams)
        dx, dw, db = device_of(x).convolution_backward(
            du.permute(0, 3, 1, 2), x, weight, padding, dilation, groups, (needs.x, *needs_conv)
        )
        dx = cast(cast(dy, x_dtype) + dx, x_dtype) if needs.x else None
        return *ConvInputs(dx), *(None if d is None else cast(d, dtype) for d in (dw, db)), *grads


_run_conv_block = op(_ConvBlock)
