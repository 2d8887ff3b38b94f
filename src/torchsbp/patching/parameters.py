"""Parameters of blocks known part by part, in the form that the ops take."""

from typing import Any

import torch
from torch import Tensor, nn

from ..adapters import lean as L
from ..adapters import lora
from ..adapters.names import find, parameter
from ..ops.activations import GATED, activation_of
from ..ops.heads import AttentionParams, AttentionSpec
from ..ops.layers import COSINE, NO_NORM
from ..ops.mlp import MLPParams, MLPSpec
from ..ops.rules import Rule
from .site import refuse


def affine(module: nn.Module | None) -> tuple[Any, Any]:
    """Weight and bias of a norm or convolution; None where it has none."""
    if module is None or isinstance(module, nn.Identity):
        return None, None
    return parameter(module, "weight"), parameter(module, "bias")


def stack(layers: list[tuple[Tensor, Tensor | None]]) -> tuple[list[Tensor], Tensor | None]:
    """Return the weights of layers that share an input, and their biases joined into one (zeros for a layer without).

    Weights are not joined, since a joined one would be saved for backward; the ops take several.
    """
    weights = [w for w, _ in layers]
    if all(b is None for _, b in layers):
        return weights, None
    return weights, torch.cat([w.new_zeros(w.shape[0]) if b is None else b for w, b in layers])


def matrix(block: nn.Module, name: str, parts: L.Lean) -> tuple[Tensor, Tensor | None]:
    """Return weight, a matrix, and bias of a block's linear layer or 1×1 convolution; LoRA may be added any time."""
    layer = find(block, name)
    if isinstance(layer, (nn.Linear, nn.Conv2d)):
        weight, bias = affine(layer)
        return weight if weight.dim() == 2 else weight.flatten(1), bias
    refuse(block, [*L.check_linear(name, layer), *L.left_out(parts, block, name)])
    return lora.weight(layer), layer.base_layer.bias


def attention_of(block: nn.Module, parts: L.TransformerBlock, rule: Rule) -> tuple[AttentionParams, AttentionSpec]:
    norm, scale, post_norm = find(block, parts.norm1), scale_of(block, parts.scale1), find(block, parts.post_norm1)
    q_norm, k_norm = find(block, parts.q_norm), find(block, parts.k_norm)
    (qkv_weight, *others), qkv_bias = qkv_of(block, parts)
    inner_norm, proj = find(block, parts.attention_norm), matrix(block, parts.proj, parts)
    qkv, norms = (qkv_weight, qkv_bias), (*affine(inner_norm), *affine(post_norm))
    params = AttentionParams(*affine(norm), *qkv, *affine(q_norm), *affine(k_norm), *proj, scale, *norms)
    if others:
        params = params._replace(k_weight=others[0], v_weight=others[1])
    heads, softmax_scale = find(block, parts.heads), find(block, parts.softmax_scale)
    if softmax_scale is None:
        softmax_scale = (params.proj_weight.shape[1] // heads) ** -0.5
    fused = L.FUSED[find(block, parts.fused)]
    spec = AttentionSpec(heads, softmax_scale, L.norm_of(norm) or NO_NORM, L.norm_of(q_norm), fused, rule)
    spec = spec._replace(inner_norm=L.norm_of(inner_norm), post_norm=L.norm_of(post_norm))
    if not parts.logit_scale:
        return params, spec
    factor = L.cosine_factor(find(block, parts.logit_scale))
    return params._replace(q_norm_weight=factor), spec._replace(softmax_scale=1.0, qk_norm=COSINE)


def scale_of(block: nn.Module, name: str) -> Tensor | None:
    """Return the layer scale, None if there is none: a block may have the number 1 in its place."""
    found = find(block, name)
    return found if isinstance(found, Tensor) else None


def qkv_of(block: nn.Module, parts: L.TransformerBlock) -> tuple[list[Tensor], Tensor | None]:
    """Return the weights (one, or three) and the bias of the projection to queries, keys and values."""
    weights, bias = projection_of(block, parts.qkv, parts)
    if find(block, parts.head_first):
        by_head = find(block, parts.heads), 3, -1
        weight, bias = (
            t if t is None else t.unflatten(0, by_head).transpose(0, 1).flatten(0, 2) for t in (*weights, bias)
        )
        weights = [weight]
    biases = [b for b in (find(block, name) for name in parts.qkv_bias) if b is not None]
    bias = torch.cat(biases) if biases else bias
    if bias is None or parts.key_bias:
        return weights, bias
    q, k, v = bias.chunk(3)
    return weights, torch.cat([q, torch.zeros_like(k), v])


def projection_of(block: nn.Module, name: str | tuple[str, ...], parts: L.Lean) -> tuple[list[Any], Any]:
    """Return weights and bias of what is named: a layer, a weight that is a parameter by itself, or several layers."""
    if not isinstance(name, str):
        return stack([matrix(block, each, parts) for each in name])
    part = find(block, name)
    own = isinstance(part, Tensor)
    home, dot, own_name = name.rpartition(".")
    weight, bias = (
        (part, find(block, home + dot + own_name.replace("weight", "bias"))) if own else matrix(block, name, parts)
    )
    return [weight], bias


def mlp_of(block: nn.Module, norm_name: str, parts: Any) -> tuple[MLPParams, MLPSpec]:
    norm, post_norm = find(block, norm_name), find(block, getattr(parts, "post_norm2", ""))
    ((weight1, *value), bias1), fc2 = projection_of(block, parts.fc1, parts), matrix(block, parts.fc2, parts)
    act = activation_of(find(block, parts.act))
    assert act is not None
    act = GATED + act if getattr(parts, "gated", False) else act
    inner = find(block, getattr(parts, "inner_norm", ""))
    return (
        MLPParams(*affine(norm), weight1, bias1, *fc2, None, *affine(inner), *affine(post_norm), *value),
        MLPSpec(L.norm_of(norm) or NO_NORM, act, None, L.norm_of(inner), L.norm_of(post_norm)),
    )
