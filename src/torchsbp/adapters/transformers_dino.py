"""Hugging Face transformers: backbones whose blocks are DINOv2's, or nearly: TIPSv2, RADIO, Pixio."""

from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from .base import Adapter
from .layouts import Grid
from .lean import TransformerBlock
from .names import find
from .transformers import (
    DROP_PATH,
    MLP,
    OLD_MLP,
    Q_PROJ,
    Names,
    block,
    class_and_registers,
    dinov2,
    family,
    transformer,
)

TIPS_V2 = dinov2("TIPSv2 vision", family("tipsv2", "Tipsv2Vision"), prefix=class_and_registers)


def patch_grid(entry: Any, x: Tensor, y: Tensor) -> Grid:
    """Return the grid of an embedding that cuts images itself."""
    return tuple(n // entry.patch_size for n in x.shape[-2:])


def summary_tokens(model: nn.Module) -> int:
    return len(find(model, "embeddings.cls_register_token"))


def radio() -> Adapter:
    """Return RADIO's adapter. Its entry is the whole embedding. Images packed into one sequence can't be trained on."""
    adapter = dinov2("RADIO", family("radio", "Radio"), prefix=summary_tokens)
    layouts = tuple(replace(its, entry="embeddings", grid=patch_grid) for its in adapter.every_layout)
    return replace(adapter, layouts=layouts)


RADIO = radio()
PIXIO_CLASSES = family("pixio", "Pixio")


def pixio_block(mlp: Names) -> TransformerBlock:
    classes = {"attention": "Attention", "mlp": "MLP"}
    return block(PIXIO_CLASSES, "layernorm_before", "layernorm_after", Q_PROJ, mlp, DROP_PATH, classes=classes)


def class_tokens(model: nn.Module) -> int:
    return int(find(model, "embeddings.cls_token").shape[1])


PIXIO = transformer(
    "Pixio",
    PIXIO_CLASSES,
    *(pixio_block(MLP), pixio_block(OLD_MLP)),
    prefix=class_tokens,
    blocks=("layers",),
)

ADAPTERS = (TIPS_V2, RADIO, PIXIO)
