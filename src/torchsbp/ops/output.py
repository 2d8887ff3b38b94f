"""The last layer of an attention branch: a norm before the projection, the projection, a norm behind it or a scale.

``y = γ ∘ (W norm(o) + b)``, or ``y = norm(W norm(o) + b)``; o are rows of all heads side by side.
"""

from typing import NamedTuple

from torch import Tensor

from .device import weight_gradient
from .heads import AttentionParams, AttentionSpec, AttentionWeights
from .layers import NO_NORM, Grad, cast, linear, norm, norm_again, norm_backward
from .named import Needs
from .steps import Affine, Cotangent, PostNormGradients, before_norm


def attention_last(o: Tensor, p: AttentionParams, weights: AttentionWeights, spec: AttentionSpec) -> Tensor:
    """The branch's output, but for its scale."""
    if spec.inner_norm is not None:
        o = norm(o, p.inner_norm_weight, p.inner_norm_bias, spec.inner_norm, spec.dtype)
    z = linear(o, weights.proj_weight, weights.proj_bias, spec.dtype)
    return z if spec.post_norm is None else norm(z, p.post_norm_weight, p.post_norm_bias, spec.post_norm)


def attention_output(o: Tensor, p: AttentionParams, weights: AttentionWeights, spec: AttentionSpec) -> Tensor:
    z = attention_last(o, p, weights, spec)
    return z if p.scale is None else z * p.scale


class OutputProducts(NamedTuple):
    """What backward has found for the parameters: ``dyᵀ o`` for the projection, and the gradients of the norms."""

    last: Grad
    inner_norm_weight: Grad
    inner_norm_bias: Grad
    post: PostNormGradients


def output_backward(
    dy: Cotangent, o: Tensor, weight: Tensor, p: AttentionParams, spec: AttentionSpec, needs: Needs
) -> tuple[Tensor, OutputProducts]:
    """The gradient of o, and of the parameters; ``weight`` is the projection's in the precision of products."""
    affine = Affine(p.inner_norm_weight, p.inner_norm_bias, spec.inner_norm or NO_NORM)
    inner, post = norm_again(o, *affine, o.dtype), PostNormGradients()
    if spec.post_norm is not None:
        z = linear(inner.y, weight, p.proj_bias, o.dtype)
        dy, post = before_norm(dy, z, Affine(p.post_norm_weight, p.post_norm_bias, spec.post_norm))
    last = weight_gradient(dy.dy, inner.y, p.proj_weight, needs.proj_weight or needs.scale)
    do, dw, db = norm_backward(dy.dz @ weight, inner, *affine, needs.inner_norm_weight, needs.inner_norm_bias)
    return cast(do, o.dtype), OutputProducts(last, dw, db, post)
