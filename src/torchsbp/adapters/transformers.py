"""Hugging Face transformers: ViT, DeiT, ViT-MSN, I-JEPA, VitPose, DINOv2, DINOv3, the vision towers of CLIP and SigLIP,
ConvNeXt; models, and backbones that give feature maps.

Releases of transformers name the same parts differently, so that a block class may need several descriptions.
"""

import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from torch import nn

from ..errors import UsageError
from ..sampling import recommended
from .base import Adapter, Description
from .layouts import Layout, Stage, early_stages, member_names
from .lean import ConvBlock, DownsampleList, RotaryBlock, TransformerBlock
from .names import find
from .rerun import Mixer, PointwiseBlock, Residual

OLDEST = (5, 17)  # older releases have other names in the blocks and backbones of several families

Names = dict[str, Any]
Prefix = int | Callable[[nn.Module], int]


def check_version() -> None:
    version = sys.modules["transformers"].__version__
    if tuple(int(number) for number in version.split(".")[:2]) < OLDEST:
        oldest = ".".join(str(number) for number in OLDEST)
        raise UsageError(f"transformers {version} is not supported; install transformers >= {oldest}")


def one_stage(names: tuple[str, ...], model: nn.Module) -> list[Stage]:
    """Return one stage: the blocks in the first of these lists that the model has."""
    check_version()
    return [Stage(next(filter(None, (member_names(model, name) for name in names)), ()))]


def convnext_stages(chain: str, down: str, model: nn.Module) -> list[Stage]:
    """Return ConvNeXt's stages. A list of layers leads into every stage but the first, where DINOv3 has its stem."""
    check_version()
    names = member_names(model, chain)
    return [Stage(member_names(model, f"{name}.layers"), f"{name}.{down}" if i else "") for i, name in enumerate(names)]


def class_and_registers(model: nn.Module) -> int:
    return 1 + int(find(model, "embeddings.register_tokens").shape[1])


def family(module: str, prefix: str) -> str:
    """Return what the qualified names of a family's classes begin with."""
    return f"transformers.models.{module}.modeling_{module}.{prefix}"


def attention(name: str, qkv: tuple[str, str, str], proj: str, heads: str, scale: str, *idle: str) -> Names:
    """Return the fields that describe attention, the module ``name`` of the block. ``qkv``, ``heads`` and ``scale`` are
    names in that module, ``proj`` and ``idle`` are names in the block."""
    return {
        "heads": f"{name}.{heads}",
        "softmax_scale": f"{name}.{scale}",
        "fused": f"{name}.config._attn_implementation",
        "qkv": tuple(f"{name}.{layer}" for layer in qkv),
        "proj": proj,
        "idle": (f"{name}.is_causal", f"{name}.config.output_attentions", *idle),
    }


Q_PROJ = attention(
    *("attention", ("q_proj", "k_proj", "v_proj"), "attention.o_proj", "num_attention_heads", "scaling"),
    *("attention.attention_dropout", "dropout"),
)
QUERY = attention(
    *("attention.attention", ("query", "key", "value"), "attention.output.dense", "num_attention_heads", "scaling"),
    *("attention.attention.dropout_prob", "attention.output.dropout", "output.dropout"),
)
SELF_ATTN = attention(
    *("self_attn", ("q_proj", "k_proj", "v_proj"), "self_attn.out_proj", "num_heads", "scale"),
    "self_attn.dropout",
)
MLP: Names = {"fc1": "mlp.fc1", "act": "mlp.activation_fn", "fc2": "mlp.fc2"}
GATED_MLP: Names = {
    "fc1": ("mlp.gate_proj", "mlp.up_proj"), "act": "mlp.act_fn", "fc2": "mlp.down_proj", "gated": True,
}  # fmt: skip
OLD_MLP: Names = {**MLP, "act": "mlp.activation"}
INTERMEDIATE: Names = {"fc1": "intermediate.dense", "act": "intermediate.intermediate_act_fn", "fc2": "output.dense"}
LAYER_SCALE: Names = {"scale1": "layer_scale1.lambda1", "scale2": "layer_scale2.lambda1"}
IGNORED = ("num_items_in_batch", "output_hidden_states", "return_dict")
DROP_PATH: Names = {"drop1": "drop_path", "drop2": "drop_path"}


def block(
    cls: str,
    norm1: str,
    norm2: str,
    *parts: Names,
    classes: dict[str, str],
    kind: type[TransformerBlock] = TransformerBlock,
) -> TransformerBlock:
    """Describe a block of the family ``cls`` that has these parts and no others: norms of queries and keys, layer scale
    and drop path only if named. ``classes``: part -> what its class name has after ``cls``."""
    names = dict.fromkeys(("q_norm", "k_norm", "scale1", "scale2", "drop1", "drop2"), "")
    for part in parts:
        names |= part
    return kind(
        norm1=norm1,
        norm2=norm2,
        classes={name: (cls + kind,) for name, kind in classes.items()},
        ignored=IGNORED,
        **names,  # type: ignore[arg-type]
    )


def vit_block(cls: str) -> TransformerBlock:
    classes = {"attention": "Attention", "mlp": "MLP"}
    return block(cls, "layernorm_before", "layernorm_after", Q_PROJ, MLP, classes=classes)


def vitpose_block(cls: str) -> TransformerBlock:
    classes = {"attention.attention": "SelfAttention", "attention.output": "SelfOutput", "mlp": "MLP"}
    return block(cls, "layernorm_before", "layernorm_after", QUERY, OLD_MLP, classes=classes)


def dinov2_block(cls: str, mlp: str = "MLP", names: Names = MLP) -> TransformerBlock:
    classes = {"attention": "Attention", "mlp": mlp, "layer_scale1": "LayerScale", "layer_scale2": "LayerScale"}
    return block(cls, "norm1", "norm2", Q_PROJ, names, LAYER_SCALE, DROP_PATH, classes=classes)


def nested_dinov2_block(cls: str) -> TransformerBlock:
    """Describe a block of DINOv2 before transformers 5.18."""
    classes = {"attention.attention": "SelfAttention", "attention.output": "SelfOutput"}
    classes |= {"mlp": "MLP", "layer_scale1": "LayerScale", "layer_scale2": "LayerScale"}
    return block(cls, "norm1", "norm2", QUERY, OLD_MLP, LAYER_SCALE, DROP_PATH, classes=classes)


RERUN = Residual(  # DINOv2's and DINOv3's blocks with a part that the ops don't know
    mixers=(Mixer("attention"),),
    idle=("attention.dropout", "attention.attention_dropout", "attention.attention.dropout_prob"),
)


def tower_block(cls: str) -> TransformerBlock:
    classes = {"self_attn": "Attention", "mlp": "MLP"}
    return block(cls, "layer_norm1", "layer_norm2", SELF_ATTN, MLP, classes=classes)


MODELS = ("Model",)
BACKBONES = ("Model", "Backbone")  # a Backbone that holds a Model needs no layout of its own


def layouts(cls: str, models: tuple[str, ...], layout: Layout) -> tuple[Layout, ...]:
    """Return the layout for each of several model classes of a family."""
    return tuple(replace(layout, model=cls + model) for model in models)


def transformer(
    name: str,
    cls: str,
    *descriptions: Description,
    prefix: Prefix = 0,
    models: tuple[str, ...] = MODELS,
    entry: str | Callable[[nn.Module], str] = "embeddings.patch_embeddings.projection",
    block: str = "Layer",
    blocks: tuple[str, ...] = ("encoder.layer",),
) -> Adapter:
    """Return the adapter of a family with one stage. Its entry is the convolution that makes patches, unless given."""
    layout = Layout("", entry, stages=partial(one_stage, blocks), prefix=prefix)
    return Adapter(
        name=f"transformers {name}",
        blocks={cls + block: descriptions},
        layouts=layouts(cls, models, layout),
    )


def vit(name: str, cls: str, prefix: int) -> Adapter:
    """Return the adapter of a ViT for images, with what is recommended for such. Other families may be read anywhere:
    as towers, backbones, or by more than one head."""
    adapter = transformer(name, cls, vit_block(cls), prefix=prefix, blocks=("layers",))
    return replace(adapter, recommended=recommended.VIT)


def dinov2(name: str, cls: str, prefix: Prefix) -> Adapter:
    gated = dinov2_block(cls, "SwiGLUFFN", GATED_MLP)
    descriptions = dinov2_block(cls), gated, nested_dinov2_block(cls), RERUN
    return transformer(name, cls, *descriptions, prefix=prefix, models=BACKBONES)


def tower(
    name: str,
    cls: str,
    *descriptions: Description,
    prefix: int,
    models: tuple[str, ...] = ("VisionModel",),
    block: str = "EncoderLayer",
) -> Adapter:
    """Return the adapter of a vision tower, with CLIP's block unless another one is described."""
    return transformer(
        name,
        cls,
        *(descriptions or (tower_block(cls),)),
        prefix=prefix,
        models=models,
        entry="embeddings.patch_embedding",
        block=block,
        blocks=("encoder.layers",),
    )


def convnext(
    name: str,
    cls: str,
    description: Description,
    entry: str = "embeddings.patch_embeddings",
    chain: str = "encoder.stages",
    down: str = "downsampling_layer",
) -> Adapter:
    layout = Layout("", entry, stages=partial(convnext_stages, chain, down))
    return Adapter(
        name=f"transformers {name}",
        layouts=layouts(cls, BACKBONES, layout),
        blocks={f"{cls}Layer": description},
        default_blocks=early_stages,
        downsample=DownsampleList(),
        recommended=recommended.CONVNEXT,
    )


DINOV3_CLASSES = family("dinov3_vit", "DINOv3ViT")


def dinov3_block(mlp: str, **names: Any) -> RotaryBlock:
    attention_names = attention(
        *("attention", ("q_proj", "k_proj", "v_proj"), "attention.o_proj", "num_heads", "scaling"),
        "attention.dropout",
    )
    classes = {"attention": "Attention", "mlp": mlp, "layer_scale1": "LayerScale", "layer_scale2": "LayerScale"}
    parts: Names = {"q_norm": "", "k_norm": "", "act": "mlp.act_fn", "fc2": "mlp.down_proj"}
    parts |= attention_names | LAYER_SCALE | DROP_PATH | names
    return RotaryBlock(
        classes={name: (DINOV3_CLASSES + kind,) for name, kind in classes.items()},
        ignored=IGNORED,
        rope="position_embeddings",
        rotate_half=True,
        **parts,
    )


REGISTERS_CLASSES = family("dinov2_with_registers", "Dinov2WithRegisters")

VIT = vit("ViT", family("vit", "ViT"), prefix=1)
DEIT = vit("DeiT", family("deit", "DeiT"), prefix=2)
VIT_MSN = vit("ViT-MSN", family("vit_msn", "ViTMSN"), prefix=1)
IJEPA = vit("I-JEPA", family("ijepa", "IJepa"), prefix=0)
DINOV2 = dinov2("DINOv2", family("dinov2", "Dinov2"), prefix=1)
DINOV2_REGISTERS = dinov2("DINOv2 with registers", REGISTERS_CLASSES, prefix=class_and_registers)
DINOV3 = transformer(
    "DINOv3",
    DINOV3_CLASSES,
    dinov3_block("MLP", fc1="mlp.up_proj"),
    dinov3_block("GatedMLP", **GATED_MLP),
    RERUN,
    prefix=class_and_registers,
    models=BACKBONES,
    entry="embeddings.patch_embeddings",
    blocks=("model.layer", "layer"),
)
CLIP = tower("CLIP vision", family("clip", "CLIP"), prefix=1)
SIGLIP = tower("SigLIP vision", family("siglip", "Siglip"), prefix=0)
VITPOSE_CLASSES = family("vitpose_backbone", "VitPoseBackbone")
VITPOSE = transformer(
    "VitPose",
    VITPOSE_CLASSES,
    vitpose_block(VITPOSE_CLASSES),
    Residual(mixers=(Mixer("attention", "layernorm_before"),), idle=("attention.attention.dropout_prob",)),
    models=("",),
)
CONVNEXT = convnext(
    "ConvNeXt",
    family("convnext", "ConvNext"),
    ConvBlock(conv="dwconv", norm="layernorm", fc1="pwconv1", act="act", fc2="pwconv2", scale="layer_scale_parameter"),
)
CONVNEXT_V2 = convnext(
    "ConvNeXt v2",
    family("convnextv2", "ConvNextV2"),
    PointwiseBlock(
        conv="dwconv", pointwise=("layernorm", "pwconv1", "act", "grn", "pwconv2"), response="grn", scale=""
    ),
)
DINOV3_CONVNEXT = convnext(
    "DINOv3 ConvNeXt",
    family("dinov3_convnext", "DINOv3ConvNext"),
    ConvBlock(
        conv="depthwise_conv",
        norm="layer_norm",
        fc1="pointwise_conv1",
        act="activation_fn",
        fc2="pointwise_conv2",
        scale="gamma",
    ),
    entry="model.stages.0.downsample_layers.0",
    chain="model.stages",
    down="downsample_layers",
)
ADAPTERS = (
    *(VIT, DEIT, VIT_MSN, IJEPA, VITPOSE, DINOV2, DINOV2_REGISTERS, DINOV3, CLIP, SIGLIP),
    *(CONVNEXT, CONVNEXT_V2, DINOV3_CONVNEXT),
)
