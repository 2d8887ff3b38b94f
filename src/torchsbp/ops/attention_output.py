"""The end of an attention branch: the projection, with an optional norm before it and a scale or a norm behind it.

``y = γ ∘ (W norm(o) + b)``, or ``y = norm(W norm(o) + b)``; a row of o has all heads side by side.
"""

from typing import NamedTuple

from torch import Tensor

from .device import weight_gradient
from .heads import AttentionParams, AttentionSpec, AttentionWeights
from .layers import NO_NORM, Grad, cast, linear, norm, norm_again, norm_backward
from .named import Needs
from .steps import Affine, Cotangent, PostNormGradients, before_norm


def attention_last(o: Tensor, p: AttentionParams, weights: AttentionWeights, spec: AttentionSpec) -> Tensor:
    """Return the branch's output before its scale γ."""
    if spec.inner_norm is not None:
        o = norm(o, p.inner_norm_weight, p.inner_norm_bias, spec.inner_norm, spec.dtype)
    z = linear(o, weights.proj_weight, weights.proj_bias, spec.dtype)
    return z if spec.post_norm is None else norm(z, p.post_norm_weight, p.post_norm_bias, spec.post_norm)


def attention_output(o: Tensor, p: AttentionParams, weights: AttentionWeights, spec: AttentionSpec) -> Tensor:
    z = attention_last(o, p, weights, spec)
    return z if p.scale is None else z * p.scale


class OutputProducts(NamedTuple):
    """What backward gives for the parameters: ``dyᵀ norm(o)`` for the projection and the scale, and the norms'
    gradients."""

    last: Grad
    inner_norm_weight: Grad
    inner_norm_bias: Grad
    post: PostNormGradients


def output_backward(
    dy: Cotangent, o: Tensor, weight: Tensor, p: AttentionParams, spec: AttentionSpec, needs: Needs
) -> tuple[Tensor, OutputProducts]:
    """Return the gradient of o and what the parameters' gradients are made of; ``weight`` is the projection's in the
    precision of products."""
    affine = Affine(p.inner_norm_weight, p.inner_norm_bias, spec.inner_norm or NO_NORM)
    inner, post = norm_again(o, *affine, o.dtype), PostNormGradients()
    if spec.post_norm is not None:
        z = linear(inner.y, weight, p.proj_bias, o.dtype)
        dy, post = before_norm(dy, z, Affine(p.post_norm_weight, p.post_norm_bias, spec.post_norm))
    last = weight_gradient(dy.dy, inner.y, p.proj_weight, needs.proj_weight or needs.scale)
    do, dw, db = norm_backward(dy.dz @ weight, inner, *affine, needs.inner_norm_weight, needs.inner_norm_bias)
    return cast(do, o.dtype), OutputProducts(last, dw, db, post)
