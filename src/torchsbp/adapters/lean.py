"""Descriptions of blocks known part by part: dotted names of the parts, and a check that the ops know each part."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ..ops.activations import ACTIVATIONS, activation_of
from ..ops.layers import Norm
from . import lora
from .base import Bound, Description
from .names import class_of, find, qualified

NORMS = {
    "torch.nn.modules.normalization.LayerNorm": "layer",
    "torch.nn.modules.normalization.RMSNorm": "rms",
    "timm.layers.norm.LayerNorm": "layer",
    "timm.layers.norm.LayerNorm2d": "layer",
    "timm.layers.norm.RmsNorm": "rms",
    "torchvision.models.convnext.LayerNorm2d": "layer",
    "transformers.models.convnext.modeling_convnext.ConvNextLayerNorm": "layer",
    "transformers.models.convnextv2.modeling_convnextv2.ConvNextV2LayerNorm": "layer",
    "transformers.models.dinov3_convnext.modeling_dinov3_convnext.DINOv3ConvNextLayerNorm": "layer",
}
CONVOLUTION = "torch.nn.modules.conv.Conv2d"
LINEARS = (
    "torch.nn.modules.linear.Linear",
    "torch.nn.modules.linear.NonDynamicallyQuantizableLinear",  # the output of nn.MultiheadAttention
)
PER_SAMPLE_DROPS = (
    "torch.nn.modules.linear.Identity",
    "timm.layers.drop.DropPath",
    "torchvision.ops.stochastic_depth.StochasticDepth",
    "transformers.models.swin.modeling_swin.SwinDropPath",
    "transformers.models.swinv2.modeling_swinv2.Swinv2DropPath",
    "transformers.models.beit.modeling_beit.BeitDropPath",
    "transformers.models.data2vec.modeling_data2vec_vision.Data2VecVisionDropPath",
    "transformers.models.maskformer.modeling_maskformer_swin.MaskFormerDropPath",
    "transformers.models.convnext.modeling_convnext.ConvNextDropPath",
    "transformers.models.convnextv2.modeling_convnextv2.ConvNextV2DropPath",
    "transformers.models.dinov3_convnext.modeling_dinov3_convnext.Dinov3ConvnextDropPath",
    "transformers.models.dinov3_vit.modeling_dinov3_vit.Dinov3ViTDropPath",
    "transformers.models.dinov2.modeling_dinov2.Dinov2DropPath",
    "transformers.models.dinov2_with_registers.modeling_dinov2_with_registers.Dinov2WithRegistersDropPath",
    "transformers.models.donut.modeling_donut_swin.DonutDropPath",
    "transformers.models.pixio.modeling_pixio.PixioDropPath",
    "transformers.models.radio.modeling_radio.RadioDropPath",
    "transformers.models.tipsv2.modeling_tipsv2.Tipsv2VisionDropPath",
    "transformers.models.vjepa2.modeling_vjepa2.VJEPA2DropPath",
)
LARGEST_LOGIT = math.log(100)
FUSED = {None: True, True: True, False: False, "sdpa": True, "eager": False}
"""A library's setting for its attention -> whether that means ``F.scaled_dot_product_attention``."""


@dataclass(frozen=True)
class Lean(Description):
    """A block made of parts that the ops know. A field holds the name or names of a part; "" means there is none."""

    kind: ClassVar[str] = "lean"
    meaning: ClassVar[str] = "the backward pass is written out for its parts"

    def problems(self, block: nn.Module) -> Iterator[str]:
        yield from super().problems(block)
        for part in fields(self):
            check, names = _CHECKS.get(part.name), getattr(self, part.name)
            if check is not None and names:
                for name in (names,) if isinstance(names, str) else names:
                    yield from check(name, find(block, name))


HEADS_MEET = ("query", "qkv", "exact")
"""The rules for attention whose heads meet in a norm before they are added to the residual path: all but "head", as no
head contributes by itself."""


def no_bias(block: Any, positions: int) -> None:
    """Add nothing to the scores."""


@dataclass(frozen=True)
class TransformerBlock(Lean):
    """``x + drop1(scale1(proj(attention(norm1(x)))))``, then ``x + drop2(scale2(fc2(act(fc1(norm2(x))))))``.

    - ``softmax_scale``: if there is none, it is one over the root of a head's width.
    - ``logit_scale``: the logarithm of a factor per head. If there is one, scores are cosines times that factor.
    - ``fused``: the setting that says how attention is computed (``FUSED``).
    - ``qkv``: a layer; or its weight, if that is a parameter of the attention module (``in_proj_weight``); or three
      layers, for queries, keys and values.
    - ``qkv_bias``: the biases of queries, keys and values, if they do not belong to the layers.
    - ``key_bias``: False if the block does not use the bias of keys.
    - ``head_first``: a flag of the block: the layer's outputs come head by head, not as queries, keys and values.
    - ``attention_norm``, ``inner_norm``: norms before ``proj`` and before ``fc2``.
    - ``gated``: ``act`` applies to the first half of what ``fc1`` gives, and multiplies the second half. ``fc1`` may
      then be two layers, one for each half.
    - ``post_norm1``, ``post_norm2``: norms after the branches, ``x + drop1(post_norm1(proj(attention(x))))``, instead
      of before them. Such a block has no scales (see ``post_norms``).
    - ``pair``: the block returns its output and its attention maps. In training, the maps are None.
    """

    called: ClassVar[tuple[str, ...]] = ("drop1", "drop2")

    norm1: str = "norm1"
    heads: str = "attn.num_heads"
    softmax_scale: str = "attn.scale"
    logit_scale: str = ""
    fused: str = "attn.fused_attn"
    qkv: str | tuple[str, str, str] = "attn.qkv"
    qkv_bias: tuple[str, ...] = ()
    key_bias: bool = True
    head_first: str = ""
    q_norm: str = "attn.q_norm"
    k_norm: str = "attn.k_norm"
    attention_norm: str = ""
    proj: str = "attn.proj"
    scale1: str = "ls1.gamma"
    post_norm1: str = ""
    drop1: str = "drop_path1"
    norm2: str = "norm2"
    fc1: str | tuple[str, str] = "mlp.fc1"
    act: str = "mlp.act"
    gated: bool = False
    inner_norm: str = ""
    fc2: str = "mlp.fc2"
    scale2: str = "ls2.gamma"
    post_norm2: str = ""
    drop2: str = "drop_path2"
    pair: bool = False

    def problems(self, block: nn.Module) -> Iterator[str]:
        yield from super().problems(block)
        norms = [find(block, name) for name in (self.q_norm, self.k_norm)]
        if len({(type(n), getattr(n, "eps", None)) for n in norms}) > 1:
            yield f"{self.q_norm} and {self.k_norm} differ: {norms}"
        if not isinstance(self.qkv, str):
            widths = [getattr(find(block, name), "out_features", None) for name in self.qkv]
            if len(set(widths)) > 1:
                yield f"{', '.join(self.qkv)} have {widths} outputs; supported: equally many"
        if isinstance(self.qkv, str) and self.qkv not in self.classes and lora.is_lora(find(block, self.qkv)):
            yield from left_out(self, block, self.qkv)

    def heads_of(self, block: nn.Module) -> int:
        return int(find(block, self.heads))


def post_norms(norm1: str = "norm1", norm2: str = "norm2") -> dict[str, Any]:
    """Return the fields of a ``TransformerBlock`` whose norms come after its branches."""
    names = {"norm1": "", "post_norm1": norm1, "scale1": "", "norm2": "", "post_norm2": norm2, "scale2": ""}
    return {**names, "rules": HEADS_MEET}


@dataclass(frozen=True)
class BiasedBlock(TransformerBlock):
    """A ``TransformerBlock`` that adds a bias to its scores, the same for all samples.

    - ``score_bias``: (block, number of positions, ``arguments`` by name) -> the bias, ``[(1,) H, N, N]``, or None.
    - ``arguments``: keyword arguments of the block's call that ``score_bias`` gets, if they are given.
    - ``dim``: where rows begin in the block's input: 1 in ``[B, N, C]``, 2 in ``[B, C, H, W]``.
    """

    score_bias: Callable[..., Tensor | None] = no_bias
    arguments: tuple[str, ...] = ()
    dim: int = 1


@dataclass(frozen=True)
class RotaryBlock(TransformerBlock):
    """A ``TransformerBlock`` whose queries and keys are turned by rotary embeddings.

    - ``rope``: the keyword argument that brings them: sine and cosine side by side, or a pair (cosine, sine). Rows in
      front that have none, class and register tokens, are not turned.
    - ``own_rope``: (block, number of positions, dtype, device) -> (cosine, sine), if the block makes them itself.
    - ``rotate_half``: True if numbers half a head apart are turned as pairs, False for neighbours; or the name of a
      flag of the block that says so.
    """

    rope: str = "rope"
    own_rope: Callable[[Any, int, torch.dtype, torch.device], tuple[Tensor, Tensor]] | None = None
    rotate_half: str | bool = "attn.rotate_half"


@dataclass(frozen=True)
class ConvBlock(Lean):
    """``shortcut(x) + drop(scale(fc2(act(fc1(norm(conv(pool(x))))))))`` on ``[B, C, H, W]``.

    fc1 and fc2 are Linear or 1×1 Conv2d.
    """

    called: ClassVar[tuple[str, ...]] = ("conv", "drop", "pool", "shortcut")

    conv: str = "conv_dw"
    norm: str = "norm"
    fc1: str = "mlp.fc1"
    act: str = "mlp.act"
    fc2: str = "mlp.fc2"
    scale: str = "gamma"
    drop: str = "drop_path"
    pool: str = ""
    shortcut: str = ""


@dataclass(frozen=True)
class Downsample(Lean):
    """``down(norm(x))`` on ``[B, C, H, W]``, where ``down`` is a convolution with stride ≥ kernel."""

    norm: str = "0"
    down: str = "1"


@dataclass(frozen=True)
class DownsampleList(Downsample):
    """A ``Downsample`` that is a ``ModuleList``, whose members the stage calls one by one. In training the last of them
    does the work of all."""

    def bindings(self, block: nn.Module) -> Iterator[Bound]:
        down = find(block, self.down)
        yield find(block, self.norm), Skipped(down)
        yield down, LastOfList(self, block)


@dataclass(frozen=True)
class Skipped:
    """A part that does nothing in training: ``worker``, another module, does its work."""

    worker: nn.Module


@dataclass(frozen=True)
class LastOfList:
    """The last module of a ``DownsampleList``, which does the work of all."""

    description: DownsampleList
    block: nn.Module


def norm_of(module: nn.Module | None) -> Norm | None:
    """Return a norm module's epsilon and kind; None for Identity or no module."""
    if module is None or isinstance(module, nn.Identity):
        return None
    return Norm(module.eps, NORMS[qualified(module)])  # type: ignore[arg-type]


def cosine_factor(logit_scale: Tensor) -> Tensor:
    """Return the factor of each head's cosines, ``[H, 1, 1]``, from its logarithm, bounded as in every library."""
    return logit_scale.clamp(max=LARGEST_LOGIT).exp().view(-1, 1, 1)


def _check_norm(name: str, part: Any) -> Iterator[str]:
    if part is None or qualified(part) not in NORMS:
        yield f"{name} is {class_of(part)}; supported norms: {', '.join(NORMS)}"
    elif getattr(part, "_fast_norm", False):
        yield f"{name} uses timm's fast norm; switch it off with timm.layers.set_fast_norm(False)"


def _check_optional_norm(name: str, part: Any) -> Iterator[str]:
    if part is not None and not isinstance(part, nn.Identity):
        yield from _check_norm(name, part)


def check_linear(name: str, part: Any) -> Iterator[str]:
    """Yield why the ops can't read a part as a matrix."""
    if lora.is_lora(part):
        yield from lora.problems(name, part)
        name, part = f"{name}.base_layer", part.base_layer
    if class_of(part) not in LINEARS and not _is_pointwise(part):
        yield (
            f"{name} is {class_of(part)}; supported: torch.nn.Linear, torch.nn.Conv2d with a 1×1 kernel, and peft's "
            "LoRA of these"
        )


def left_out(parts: Any, block: nn.Module, name: str) -> Iterator[str]:
    """Yield why LoRA of a layer takes no part in the block's own forward: that reads the weight of this layer, whose
    class is told, or to which separate biases are added."""
    biases = [bias for bias in getattr(parts, "qkv_bias", ()) if find(block, bias) is not None]
    if name in parts.classes or (biases and name == parts.qkv):
        yield f"{name} is a LoRA layer, of which this block uses the weight alone"


def _check_heads(name: str, part: Any) -> Iterator[str]:
    if not isinstance(part, int):
        yield f"{name} is {part}; supported: a number of heads"


def _check_fused(name: str, part: Any) -> Iterator[str]:
    if part not in FUSED:
        words = ", ".join(repr(word) for word in FUSED if isinstance(word, type(part)))
        yield f"{name} is {part!r}; supported: {words}"


def _check_qkv(name: str, part: Any) -> Iterator[str]:
    if not isinstance(part, nn.Parameter):
        yield from check_linear(name, part)


def _is_pointwise(part: Any) -> bool:
    return type(part) is nn.Conv2d and part.kernel_size == part.stride == (1, 1) and part.groups == 1


def _check_activation(name: str, part: Any) -> Iterator[str]:
    if activation_of(part) is None:
        known = ", ".join(module for activation in ACTIVATIONS.values() for module in activation.modules)
        yield f"{name} is {class_of(part)}; supported activations: {known}"


def check_drop_path(name: str, part: Any) -> Iterator[str]:
    """Yield why a part is not stochastic depth with a factor per sample."""
    if part is not None and qualified(part) not in PER_SAMPLE_DROPS:
        yield f"{name} is {class_of(part)}; supported: {', '.join(PER_SAMPLE_DROPS)}"
    elif getattr(part, "mode", "row") != "row":
        yield f'{name} drops the whole batch at once (mode="{part.mode}"); supported: "row"'


def check_down(name: str, part: Any) -> Iterator[str]:
    """Yield why kept outputs of a convolution can't be computed from patches of their own."""
    if class_of(part) != CONVOLUTION or part.groups != 1:
        yield f"{name} is {class_of(part)}; supported: torch.nn.Conv2d with one group"
    elif any(k > s for k, s in zip(part.kernel_size, part.stride, strict=True)):
        yield f"{name} has kernel {part.kernel_size} > stride {part.stride}: its outputs share inputs"
    elif part.padding != (0, 0) or part.dilation != (1, 1):
        yield f"{name} has padding {part.padding} and dilation {part.dilation}; supported: 0 and 1"


_CHECKS = {
    "norm": _check_norm,
    "norm1": _check_norm,
    "norm2": _check_norm,
    "post_norm1": _check_norm,
    "post_norm2": _check_norm,
    "q_norm": _check_optional_norm,
    "k_norm": _check_optional_norm,
    "attention_norm": _check_optional_norm,
    "inner_norm": _check_optional_norm,
    "heads": _check_heads,
    "fused": _check_fused,
    "qkv": _check_qkv,
    "proj": check_linear,
    "fc1": check_linear,
    "fc2": check_linear,
    "act": _check_activation,
    "drop": check_drop_path,
    "drop1": check_drop_path,
    "drop2": check_drop_path,
    "down": check_down,
}
