"""Hugging Face transformers, models of videos: VideoMAE, ViViT, V-JEPA 2. No contest (docs/study) has been run for
any of them."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from .base import Adapter
from .layouts import Layout, Stage, member_names
from .lean import RotaryBlock
from .rerun import Mixer, Residual
from .transformers import (
    DROP_PATH,
    INTERMEDIATE,
    OLD_MLP,
    QUERY,
    SELF_ATTN,
    Names,
    attention,
    block,
    check_version,
    family,
    transformer,
    vit_block,
)

VIDEOMAE_CLASSES = family("videomae", "VideoMAE")
VJEPA2_CLASSES = family("vjepa2", "VJEPA2")


def vjepa2_rope(its: Any, positions: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return cosine and sine ``[N, D]`` of time, height and width, read from the block's own rotation of two vectors.

    The rotation is ``y = x ∘ cos + rot(x) ∘ sin`` with neighbours as pairs. A vector with ones at even places and zeros
    at odd ones becomes the cosines at even places, and the sines at odd ones.
    """
    m = its.attention
    even = torch.zeros(m.attention_head_size, dtype=dtype, device=device)
    even[::2] = 1
    rows = torch.stack([even, 1 - even]).unsqueeze(1).expand(-1, positions, -1)
    turned = m.apply_rotary_embeddings(rows.unsqueeze(0), m.get_position_ids(rows))[0]
    cos = torch.where(even.bool(), turned[0], turned[1])
    sin = torch.where(even.bool(), -turned[1], turned[0])
    return cos, sin


VJEPA2_ATTENTION = attention(
    *("attention", ("query", "key", "value"), "attention.proj", "num_attention_heads", "scaling"),
    *("attention.dropout_prob", "attention.dropout"),
)
VJEPA2_ROPE: Names = {"rope": "", "own_rope": vjepa2_rope, "rotate_half": False, "pair": True}
VJEPA2_BLOCK = block(
    VJEPA2_CLASSES,
    "norm1",
    "norm2",
    *(VJEPA2_ATTENTION, OLD_MLP, DROP_PATH, VJEPA2_ROPE),
    classes={"attention": "RopeAttention", "mlp": "MLP"},
    kind=RotaryBlock,
)
VIDEOMAE_BLOCK = block(
    VIDEOMAE_CLASSES,
    "layernorm_before",
    "layernorm_after",
    *(QUERY, INTERMEDIATE),
    classes={
        **{"attention.attention": "SelfAttention", "attention.output": "SelfOutput"},
        **{"intermediate": "Intermediate", "output": "Output"},
    },
)
VIDEOMAE = transformer("VideoMAE", VIDEOMAE_CLASSES, VIDEOMAE_BLOCK)
VIVIT_CLASSES = family("vivit", "Vivit")
VIVIT = transformer(
    "ViViT",
    VIVIT_CLASSES,
    vit_block(VIVIT_CLASSES),
    Residual(  # its own activation is one that no op knows
        mixers=(Mixer("attention", "layernorm_before"),), idle=("attention.attention_dropout",)
    ),
    prefix=1,
    blocks=("layers",),
)
VJEPA2_POOLER_BLOCK = block(
    *(VJEPA2_CLASSES, "layer_norm1", "layer_norm2", SELF_ATTN, OLD_MLP, {"pair": True}),
    classes={"self_attn": "PoolerSelfAttention", "mlp": "MLP"},
)
VJEPA2_ENTRY = "encoder.embeddings.patch_embeddings.proj"


def vjepa2_stages(model: nn.Module) -> list[Stage]:
    """Return the stage of a model with a classifier: blocks of its attentive pooler go on with all positions."""
    check_version()
    return [Stage(member_names(model, "vjepa2.encoder.layer") + member_names(model, "pooler.self_attention_layers"))]


def vjepa2() -> Adapter:
    """Return V-JEPA 2's adapter. The predictor's blocks, which have the encoder's class, stay as they are."""
    encoder = transformer("V-JEPA 2", VJEPA2_CLASSES, VJEPA2_BLOCK, entry=VJEPA2_ENTRY, blocks=("encoder.layer",))
    blocks = {**encoder.blocks, f"{VJEPA2_CLASSES}PoolerSelfAttentionLayer": VJEPA2_POOLER_BLOCK}
    classifier = Layout(f"{VJEPA2_CLASSES}ForVideoClassification", f"vjepa2.{VJEPA2_ENTRY}", stages=vjepa2_stages)
    return replace(encoder, blocks=blocks, layouts=(*encoder.every_layout, classifier))


ADAPTERS = (VIDEOMAE, VIVIT, vjepa2())
