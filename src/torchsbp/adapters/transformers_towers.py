"""Hugging Face transformers: vision towers of models of images and text other than CLIP and SigLIP; DPT's ViT."""

from torch import nn

from .base import Adapter
from .lean import TransformerBlock
from .names import find
from .transformers import (
    INTERMEDIATE,
    MLP,
    QUERY,
    SELF_ATTN,
    Names,
    attention,
    block,
    family,
    tower,
    tower_block,
    transformer,
)

LAYER_SCALE: Names = {"scale1": "lambda_1", "scale2": "lambda_2"}

ALT_CLIP = tower("AltCLIP vision", family("altclip", "AltCLIP"), prefix=1)
CHINESE_CLIP = tower(
    *("Chinese-CLIP vision", family("chinese_clip", "ChineseCLIPVision")), prefix=1, models=("Model",), block="Layer"
)
METACLIP_2 = tower("MetaCLIP 2 vision", family("metaclip_2", "MetaClip2"), prefix=1)
OWL_VIT = tower("OWL-ViT vision", family("owlvit", "OwlViT"), prefix=1, models=("VisionTransformer",))
OWL_V2 = tower("OWLv2 vision", family("owlv2", "Owlv2"), prefix=1, models=("VisionTransformer",))
KOSMOS_2 = tower("Kosmos-2 vision", family("kosmos2", "Kosmos2Vision"), prefix=1, models=("Transformer",))


def idefics(name: str, module: str, prefix: str) -> Adapter:
    """Return an Idefics tower's adapter. Padded images come with an attention mask, which is refused in training."""
    cls = family(module, prefix)
    return tower(name, cls, tower_block(f"{cls}Vision"), prefix=0, models=("VisionTransformer",))


IDEFICS_2 = idefics("Idefics 2 vision", "idefics2", "Idefics2")
IDEFICS_3 = idefics("Idefics 3 vision", "idefics3", "Idefics3")
SMOL_VLM = idefics("SmolVLM vision", "smolvlm", "SmolVLM")


def blip_block(cls: str) -> TransformerBlock:
    """Describe a block of BLIP, in which one layer gives queries, keys and values."""
    idle = (*SELF_ATTN["idle"], "self_attn.attention_dropout")
    projections: Names = {"qkv": "self_attn.qkv", "proj": "self_attn.projection", "idle": idle}
    classes = {"self_attn": "Attention", "mlp": "MLP"}
    return block(cls, "layer_norm1", "layer_norm2", SELF_ATTN, MLP, projections, classes=classes)


def blip(name: str, module: str, prefix: str) -> Adapter:
    cls = family(module, prefix)
    return tower(name, cls, blip_block(cls), prefix=1)


BLIP = blip("BLIP vision", "blip", "Blip")
BLIP_2 = blip("BLIP-2 vision", "blip_2", "Blip2")
INSTRUCT_BLIP = blip("InstructBLIP vision", "instructblip", "InstructBlip")
INSTRUCT_BLIP_VIDEO = blip("InstructBLIP video vision", "instructblipvideo", "InstructBlipVideo")

INTERNVL_CLASSES = family("internvl", "InternVLVision")
INTERNVL_ATTENTION = attention(
    *("attention", ("q_proj", "k_proj", "v_proj"), "attention.projection_layer", "num_heads", "scale"),
    *("attention.attention_dropout", "attention.projection_dropout", "dropout"),
    *("attention.q_norm", "attention.k_norm"),  # norms of all heads together are refused
)
INTERNVL = transformer(
    "InternVL vision",
    INTERNVL_CLASSES,
    block(
        INTERNVL_CLASSES,
        "layernorm_before",
        "layernorm_after",
        *(INTERNVL_ATTENTION, MLP, LAYER_SCALE),
        classes={"attention": "Attention", "mlp": "MLP"},
    ),
    prefix=1,
)


JANUS_CLASSES = family("janus", "JanusVision")
JANUS_ATTENTION = attention(
    *("self_attn", ("q_proj", "k_proj", "v_proj"), "self_attn.projection_layer", "num_heads", "scale"),
    *("self_attn.attention_dropout", "self_attn.projection_dropout", "mlp.dropout1", "mlp.dropout2"),
    *("self_attn.q_norm", "self_attn.k_norm"),
)
JANUS_BLOCK = block(
    *(JANUS_CLASSES, "layer_norm1", "layer_norm2", JANUS_ATTENTION, MLP),
    classes={"self_attn": "Attention", "mlp": "MLP"},
)
JANUS = tower("Janus vision", JANUS_CLASSES, JANUS_BLOCK, prefix=0, models=("Model",))
DPT_CLASSES = family("dpt", "DPT")


def dpt_entry(model: nn.Module) -> str:
    """Return the name of what makes patches: of an image, or of the features of a convolutional network."""
    return "embeddings.projection" if find(model, "embeddings.backbone") else "embeddings.patch_embeddings.projection"


def dpt_block() -> TransformerBlock:
    classes = {"attention.attention": "SelfAttention", "attention.output": "ViTSelfOutput"}
    classes |= {"intermediate": "ViTIntermediate", "output": "ViTOutput"}
    return block(DPT_CLASSES, "layernorm_before", "layernorm_after", QUERY, INTERMEDIATE, classes=classes)


DPT = transformer("DPT", DPT_CLASSES, dpt_block(), prefix=1, entry=dpt_entry, block="ViTLayer")

ADAPTERS = (
    *(ALT_CLIP, CHINESE_CLIP, METACLIP_2, OWL_VIT, OWL_V2, KOSMOS_2, IDEFICS_2, IDEFICS_3, SMOL_VLM),
    *(BLIP, BLIP_2, INSTRUCT_BLIP, INSTRUCT_BLIP_VIDEO, INTERNVL, JANUS, DPT),
)
