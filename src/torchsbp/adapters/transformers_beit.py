"""Hugging Face transformers: BEiT and Data2Vec vision, whose attention has a bias of relative positions."""

from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from .lean import BiasedBlock, TransformerBlock
from .rerun import Mixer, Residual
from .transformers import DROP_PATH, INTERMEDIATE, MLP, Q_PROJ, QUERY, Names, block, family, transformer

NORMS = "layernorm_before", "layernorm_after"
LAYER_SCALE: Names = {"scale1": "lambda_1", "scale2": "lambda_2"}
INTERPOLATED = "interpolate_pos_encoding", "resolution"  # arguments of blocks


def relative_bias(
    own: nn.Module | None, shared: Tensor | None, patch: int, positions: int, interpolated: bool, resolution: Any
) -> Tensor | None:
    """Return the sum of the block's own bias and the one that all blocks share, or whichever there is."""
    if own is None:
        return shared
    height, width = resolution
    bias = own((height // patch, width // patch), interpolated, dim_size=positions)
    return bias if shared is None else bias + shared


def beit_bias(
    block: Any,
    positions: int,
    attention_mask: Tensor | None = None,
    interpolate_pos_encoding: bool = False,
    resolution: tuple[int, int] | None = None,
) -> Tensor | None:
    """Return BEiT's bias. The one that all blocks share is given as an attention mask."""
    own, patch = block.relative_position_bias, block.patch_size
    return relative_bias(own, attention_mask, patch, positions, interpolate_pos_encoding, resolution)


def data2vec_bias(
    block: Any,
    positions: int,
    relative_position_bias: Tensor | None = None,
    interpolate_pos_encoding: bool = False,
    resolution: tuple[int, int] | None = None,
) -> Tensor | None:
    m = block.attention.attention
    own, patch = getattr(m, "relative_position_bias", None), m.config.patch_size
    return relative_bias(own, relative_position_bias, patch, positions, interpolate_pos_encoding, resolution)


def beit_block(cls: str) -> TransformerBlock:
    bias: Names = {"score_bias": beit_bias, "arguments": ("attention_mask", *INTERPOLATED)}
    parts = Q_PROJ, MLP, LAYER_SCALE, DROP_PATH, bias
    return block(cls, *NORMS, *parts, classes={"attention": "Attention", "mlp": "MLP"}, kind=BiasedBlock)


def data2vec_block(cls: str) -> TransformerBlock:
    bias: Names = {"score_bias": data2vec_bias, "arguments": ("relative_position_bias", *INTERPOLATED), "pair": True}
    idle: Names = {"idle": (*QUERY["idle"], "attention.attention.dropout")}
    parts = QUERY, INTERMEDIATE, LAYER_SCALE, DROP_PATH, bias, idle
    classes = {"attention.output": "SelfOutput", "intermediate": "Intermediate", "output": "Output"}
    found = block(cls, *NORMS, *parts, classes=classes, kind=BiasedBlock)
    attention = f"{cls}SelfAttention", f"{cls}SdpaSelfAttention"
    return replace(found, classes={**found.classes, "attention.attention": attention})


BEIT_CLASSES = family("beit", "Beit")
BEIT = transformer(
    "BEiT",
    BEIT_CLASSES,
    beit_block(BEIT_CLASSES),
    Residual(
        mixers=(Mixer("attention", "layernorm_before"),),
        idle=("attention.attention_dropout",),
        constant=("relative_position_bias",),
    ),
    prefix=1,
    blocks=("layers",),
)
DATA2VEC_CLASSES = "transformers.models.data2vec.modeling_data2vec_vision.Data2VecVision"
DATA2VEC = transformer("Data2Vec vision", DATA2VEC_CLASSES, data2vec_block(DATA2VEC_CLASSES), prefix=1)

ADAPTERS = (BEIT, DATA2VEC)
