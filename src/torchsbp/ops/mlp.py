"""MLP branch: ``y = x + s · gate(γ ∘ (W₂ act(W₁ norm(x) + b₁) + b₂))``, backward on kept rows (Eq. 4, 5).

The activation may be a gate, and a norm may follow it. The norm may be behind the branch instead of before it.
ConvNeXt's pointwise convolutions are this branch too, with ``residual=False``: their residual is added elsewhere.
Saved: the kept rows of x, from which backward recomputes the rest; with ``recompute=False`` also those of the hidden
layer. Every layer is row by row, so kept rows are all that backward needs.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import rows as R
from .activations import activate, activation_named
from .captured import captured_backward, captured_forward
from .compiling import compiling, op
from .device import Device, device_of, weight_gradient
from .layers import (
    NO_NORM,
    PART,
    BackwardOptions,
    Grad,
    Norm,
    Normed,
    apart,
    autocast_dtype,
    linear,
    norm,
    norm_columns,
    norm_over,
    parameter_gradients,
    saved_dtype,
)
from .named import Needs, split
from .once import once
from .steps import Affine, Cotangent, PostNormGradients, Steps, before_norm


class MLPParams(NamedTuple):
    """The parameters of the branch. Of a gate ``act(a) ∘ b``, ``weight1`` and ``bias1`` stack the layers of a and b; if
    the model has two weights, ``weight1`` is that of a and ``value_weight`` that of b."""

    norm_weight: Grad
    norm_bias: Grad
    weight1: Tensor
    bias1: Grad
    weight2: Tensor
    bias2: Grad
    scale: Grad = None
    inner_norm_weight: Grad = None
    inner_norm_bias: Grad = None
    post_norm_weight: Grad = None
    post_norm_bias: Grad = None
    value_weight: Grad = None

    @property
    def weights1(self) -> tuple[Any, ...]:
        return (self.weight1,) if self.value_weight is None else (self.weight1, self.value_weight)


class MLPSpec(NamedTuple):
    """The static part of the branch. ``act`` is a name for ``activation_named``; ``inner_norm`` (None: none) follows
    the activation, ``post_norm`` the branch, which then has no scale. ``dtype`` is the precision of products."""

    norm: Norm = Norm()
    act: str = "gelu"
    dtype: torch.dtype | None = None
    inner_norm: Norm | None = None
    post_norm: Norm | None = None


class MLPWeights(NamedTuple):
    """Weights and biases in the precision of products; ``bias2`` only where the output is computed."""

    weight1: Tensor
    bias1: Grad
    weight2: Tensor
    bias2: Grad = None


class MLPProducts(NamedTuple):
    """What ``mlp_backward`` returns for the parameters: the gradient of the (stacked) weight1, ``dyᵀ g`` for weight2
    and the scale, and the gradients of the norm behind the branch."""

    weight1: Any
    last: Grad
    post: PostNormGradients = PostNormGradients()


def mlp_branch(
    x: Tensor,
    rows: R.Rows,
    params: MLPParams,
    spec: MLPSpec = MLPSpec(),
    *,
    inverse: Tensor | None = None,
    marks: Tensor | None = None,
    factor: Tensor | None = None,
    residual: bool = True,
    options: BackwardOptions = BackwardOptions(),
) -> Tensor:
    """Return the branch's output for ``x [B, ..., C]``. ``factor [B]`` is stochastic depth's factor per sample,
    ``inverse`` that of ``rows`` if it is at hand; ``marks [B, k]`` stand for rows that backward chooses
    (``chosen.py``)."""
    spec = spec._replace(dtype=autocast_dtype(x))
    return _run_mlp(*MLPInputs(x, rows, inverse, marks, factor, spec, residual, options), *params)


def mlp_forward(
    x: Tensor, rows: R.Rows, p: MLPParams, weights: MLPWeights, spec: MLPSpec, recompute: bool
) -> tuple[Tensor, Grad]:
    """Return the branch's output, and the kept rows of its hidden layer (None if they will be recomputed)."""
    n = norm(x, p.norm_weight, p.norm_bias, spec.norm, spec.dtype)
    h = linear(n, weights.weight1, weights.bias1, spec.dtype)
    del n
    kept_h = None if recompute else device_of(x).save_rows(h, rows)
    g = activate(h, spec.act, overwrite=recompute or rows is not None)
    del h  # the hidden layer is the widest: as few copies of it at once as possible
    z = mlp_last(g, p, weights, spec)
    del g
    if spec.post_norm is not None:
        return norm(z, p.post_norm_weight, p.post_norm_bias, spec.post_norm), kept_h
    return z if p.scale is None else z * p.scale, kept_h


def mlp_last(g: Tensor, p: MLPParams, weights: MLPWeights, spec: MLPSpec) -> Tensor:
    """Return the last layer's output for the activated hidden layer g, which may be overwritten."""
    if spec.inner_norm is not None:
        g = norm_over(g, p.inner_norm_weight, p.inner_norm_bias, spec.inner_norm, spec.dtype)
    return linear(g, weights.weight2, weights.bias2, spec.dtype)


def mlp_weights(p: MLPParams) -> tuple[Any, ...]:
    """Return the parameters that ``MLPWeights`` holds, before they are cast."""
    return p.weights1, p.bias1, p.weight2, p.bias2


def mlp_norm(p: MLPParams, spec: MLPSpec) -> Affine:
    return Affine(p.norm_weight, p.norm_bias, spec.norm)


def mlp_columns(p: MLPParams, spec: MLPSpec) -> int:
    """Count the columns of the branch's totals: "mlp_output", "mlp_hidden", "mlp_norm_weight", "mlp_norm_bias", and of
    an inner norm "mlp_inner_norm_weight", "mlp_inner_norm_bias"."""
    hidden = sum(weight.shape[0] for weight in p.weights1)
    inner = norm_columns(spec.inner_norm or NO_NORM, p.weight2.shape[1])
    return p.weight2.shape[0] + hidden + norm_columns(spec.norm, p.weight1.shape[1]) + inner


def mlp_backward(
    steps: Steps,
    dy: Cotangent,
    n: Normed,
    h: Grad,
    cast_weights: MLPWeights,
    p: MLPParams,
    spec: MLPSpec,
    needs: Needs,
    spare: bool,
) -> tuple[Tensor, MLPProducts]:
    """Backpropagate from the cotangent of the last layer to the normalised kept rows ``n.y``; return their gradient and
    the products for the parameters. The hidden layer ``h`` is recomputed unless given. If it is large, the rows may be
    taken in two halves, one after the other, so that only half of it exists at a time."""
    hidden = n.y.shape[0] * cast_weights.weight1.shape[0]
    if spec.post_norm is not None or not in_halves(hidden, device_of(n.y), spare):
        return mlp_backward_rows(steps, dy, n.y, h, cast_weights, p, spec, needs)
    halves = steps.parts(2)
    rows = zip(dy.dy.chunk(2), dy.dz.chunk(2), n.y.chunk(2), (None, None) if h is None else h.chunk(2), strict=True)
    (dn, products), (more_dn, more) = (
        mlp_backward_rows(part, Cotangent(*of_rows[:2]), *of_rows[2:], cast_weights, p, spec, needs)
        for part, of_rows in zip(halves, rows, strict=True)
    )
    steps.join(halves)
    weight1, last = (None if a is None else a.add_(b) for a, b in zip(products[:2], more[:2], strict=True))
    return torch.cat([dn, more_dn]), MLPProducts(weight1, last)


def in_halves(hidden: int, device: Device, spare: bool) -> bool:
    """Whether a hidden layer of ``hidden`` elements is too large to be made at once: in a CUDA graph, which holds its
    memory, or in a compiled step, where the compiler's order of operators lets it set the peak, if memory is to be
    spared."""
    return (hidden >= 2 * PART and device.capturing()) or (spare and hidden >= 4 * PART and compiling())


def mlp_backward_rows(
    steps: Steps,
    dy: Cotangent,
    y: Tensor,
    h: Grad,
    cast_weights: MLPWeights,
    p: MLPParams,
    spec: MLPSpec,
    needs: Needs,
) -> tuple[Tensor, MLPProducts]:
    """``mlp_backward`` of some rows at once; y are their normalised values."""
    weight1, bias1, weight2, _ = cast_weights
    overwrite, post, act = h is None, PostNormGradients(), activation_named(spec.act)
    if h is None:
        h = linear(y, weight1, bias1, None)
    if spec.post_norm is not None:
        affine = Affine(p.post_norm_weight, p.post_norm_bias, spec.post_norm)
        dy, post = before_norm(dy, mlp_last(act.forward(h), p, cast_weights._replace(bias2=p.bias2), spec), affine)
    # The hidden layer is the widest: as few copies of it at once as possible.
    product, needs_product = None, needs.weight2 or needs.scale
    if spec.inner_norm is None:
        dg = dy.dz @ weight2
    else:
        affine = Affine(p.inner_norm_weight, p.inner_norm_bias, spec.inner_norm)
        inner = steps.normalise(act.forward(h), affine, h.dtype, after=dy.dz)
        product = weight_gradient(dy.dy, inner.y, p.weight2, needs_product)
        inner = inner.without_output()
        dg = steps.norm_backward_input(
            dy.dz @ weight2, inner, affine, h.dtype, norm_total="mlp_inner_norm", overwrite=True
        )
        del inner
    g, dh = steps.activation(h, dg, spec.act, overwrite, total="mlp_hidden")
    del h, dg
    if spec.inner_norm is None:
        product = weight_gradient(dy.dy, g, p.weight2, needs_product)
    del g
    return dh @ weight1, MLPProducts(weight_gradient(dh, y, p.weight1, any(needs.weights1)), product, post)


def mlp_gradients(products: MLPProducts, totals: dict[str, Tensor], p: MLPParams) -> MLPParams:
    """Return the gradients of all parameters, which ``parameter_gradients`` has yet to cast and scale."""
    post = products.post
    total = totals["mlp_output"] if post.total is None else post.total
    last = device_of(p.weight2).last_layer(products.last, total, p.weight2, p.bias2, p.scale)
    weight1, value_weight = (*apart(products.weight1, p.weights1), None)[:2]
    return MLPParams(
        norm_weight=totals.get("mlp_norm_weight"),
        norm_bias=totals.get("mlp_norm_bias"),
        weight1=weight1,
        bias1=totals["mlp_hidden"],
        weight2=last.weight,
        bias2=last.bias,
        scale=last.scale,
        inner_norm_weight=totals.get("mlp_inner_norm_weight"),
        inner_norm_bias=totals.get("mlp_inner_norm_bias"),
        post_norm_weight=post.weight,
        post_norm_bias=post.bias,
        value_weight=value_weight,
    )


class MLPInputs(NamedTuple):
    """The autograd function's arguments before the parameters; among its gradients, only that of x is not None."""

    x: Any
    rows: R.Rows = None
    inverse: Grad = None
    marks: Grad = None
    factor: Grad = None
    spec: MLPSpec | None = None
    residual: bool | None = None
    options: BackwardOptions | None = None


class MLPSaved(NamedTuple):
    """What the function saves before the parameters: kept rows of x and, unless recomputed, of the hidden layer; all
    rows of both if backward chooses which to keep."""

    x: Tensor
    h: Grad
    rows: R.Rows
    inverse: Grad
    marks: Grad
    factor: Grad


class _MLPBranch(torch.autograd.Function):
    @staticmethod
    @captured_forward
    def forward(ctx: Any, *flat: Any) -> Tensor:
        (x, rows, inverse, marks, factor, spec, residual, options), p = split(flat, MLPInputs, MLPParams)
        device = device_of(x)
        weights = MLPWeights(*device.cast(spec.dtype, *mlp_weights(p)))
        kept_x = device.save_rows(x, rows, saved_dtype(x, spec.dtype, options.recompute))
        y, kept_h = mlp_forward(x, rows, p, weights, spec, options.recompute)
        ctx.save_for_backward(*MLPSaved(kept_x, kept_h, rows, inverse, marks, factor), *p)
        ctx.static = spec, residual, options, x.dtype
        if factor is not None:
            y = y * factor.view(-1, *[1] * (x.dim() - 1))
        return x + y if residual else y

    @staticmethod
    @once
    @captured_backward
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        (x, h, rows, inverse, marks, factor), p = split(ctx.saved_tensors, MLPSaved, MLPParams)
        _, needs = split(ctx.needs_input_grad, MLPInputs, MLPParams)
        spec, residual, options, x_dtype = ctx.static
        shape, dy = dy.shape, R.flat(dy)
        device, affine = device_of(x), mlp_norm(p, spec)
        steps = device.steps(x, mlp_columns(p, spec))

        weight: R.Weight = options.row_weight
        if marks is not None:
            rows, inverse, weight = device.choose(dy, marks, options)
            h = None if h is None else R.take(h, rows)
        n = steps.normalise(R.flat(x), affine, spec.dtype, after=dy, rows=None if marks is None else rows)
        cast_weights = MLPWeights(*device.cast(n.y.dtype, *mlp_weights(p)[:3], after=dy))
        kept_dy = steps.cotangent(dy, rows, factor, p.scale, shape[0], n.y.dtype, total="mlp_output", weight=weight)
        dn, products = mlp_backward(steps, kept_dy, n, h, cast_weights, p, spec, needs, options.spare)
        dx = steps.norm_backward_input(
            dn, n, affine, x_dtype, rows=rows, inverse=inverse, size=dy.shape[0],
            base=dy if residual else None, gated=options.scope == "block", norm_total="mlp_norm",
        )  # fmt: skip
        grads = mlp_gradients(products, steps.totals(), p)
        return *MLPInputs(dx.view(shape)), *parameter_gradients(grads, p, needs, options.weight_scale)


_run_mlp = op(_MLPBranch)
