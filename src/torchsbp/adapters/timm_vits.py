"""timm: more ViTs. NaFlexViT, the encoders of Qwen3, DeepSeek and Gemma 4, CaiT, ConViT, PiT and Hiera."""

from itertools import pairwise
from typing import Any

from torch import Tensor, nn

from ..errors import UsageError
from ..sampling import recommended
from .base import Adapter, Plain
from .layouts import Grid, Layout, Stage, early_stages, member_names
from .lean import TransformerBlock
from .names import find
from .timm import EVA, MLP, PRE_NORM, VIT, like_vit, with_hooks


def naflex_grid(embeds: nn.Module, x: Tensor, y: Any) -> Grid:
    """Return the grid, which the entry returns beside the tokens; raise if each sample has its own."""
    if y[1] is None:
        raise UsageError(
            f"NaFlexVit was given patches of shape {tuple(x.shape)} with coordinates: grids differ from sample to "
            "sample, and SBP samples one grid. Give it images [B, C, H, W], or call torchsbp.remove(model)."
        )
    return tuple(y[1])


NAFLEX = Adapter(
    name="timm NaFlexViT",
    layouts=with_hooks(like_vit("naflexvit.NaFlexVit", entry="embeds", grid=naflex_grid)),
    blocks={**VIT.blocks, **EVA.blocks},
    recommended=recommended.VIT,
)

QWEN3 = Adapter(
    name="timm Qwen3 ViT",
    layouts=like_vit("qwen3_vit.Qwen3VitEncoder", prefix=0),
    blocks=dict(EVA.blocks),
)

DEEPSEEK = Adapter(
    name="timm DeepSeek ViT",
    layouts=like_vit("deepseek_vit.DeepseekVitEncoder", prefix=0),
    blocks={"timm.models.deepseek_vit.DeepseekVitBlock": PRE_NORM},  # run again, as its RMS norm is computed in float32
)


def gemma_grid(embed: Any, x: Tensor, y: Any) -> Grid:
    if x.dim() != 4:
        raise UsageError(
            f"Gemma4VitEncoder was given patches of shape {tuple(x.shape)}: SBP samples the grid of an image. Give it "
            "images [B, C, H, W], or call torchsbp.remove(model)."
        )
    return x.shape[2] // embed.patch_size[0], x.shape[3] // embed.patch_size[1]


GEMMA4 = Adapter(
    name="timm Gemma 4 ViT",
    layouts=like_vit("gemma4_vit.Gemma4VitEncoder", grid=gemma_grid, prefix=0),
    blocks={"timm.models.gemma4_vit.Gemma4Block": PRE_NORM},
)

CAIT = Adapter(
    name="timm CaiT",
    layouts=like_vit("cait.Cait", prefix=0),  # the class token is added after these blocks
    blocks={"timm.models.cait.LayerScaleBlock": PRE_NORM},
)

CONVIT = Adapter(
    name="timm ConViT",
    layouts=like_vit("convit.ConVit", prefix=0),
    blocks={
        # The last blocks, with plain attention, have other positions: a class token is added before them.
        "timm.models.convit.Block": (Plain(where="attn.qkv"), PRE_NORM),
    },
)


def pooled_stages(model: nn.Module) -> list[Stage]:
    """Return PiT's stages. Every stage but the first begins with a pooling layer."""
    names = member_names(model, "transformers")
    return [
        Stage(member_names(model, f"{name}.blocks"), f"{name}.pool" if find(model, f"{name}.pool") is not None else "")
        for name in names
    ]


def tokens_in_front(model: nn.Module) -> int:
    return int(model.num_tokens)  # type: ignore[arg-type]


PIT = Adapter(
    name="timm PiT",
    layouts=Layout("timm.models.pit.PoolingVisionTransformer", stages=pooled_stages, prefix=tokens_in_front),
    blocks=dict(VIT.blocks),
    default_blocks=early_stages,
)

UNIT = 8  # side of a mask unit, 2³: the grid is halved three times


def units_grid(embed: Any, x: Tensor, y: Tensor) -> Grid:
    """Return the grid in Hiera's order of tokens: place in a unit of 8×8, then the units. Tokens that are pooled
    together are far apart in it."""
    height, width = (n // stride // UNIT for n, stride in zip(x.shape[2:], embed.proj.stride, strict=True))
    return UNIT**2, height, width


def quartered(grid: Grid) -> Grid:
    return grid[0] // 4, *grid[1:]


def cut_at_ends(model: Any) -> list[tuple[str, ...]]:
    """Return the names of one list of blocks, cut where stages end. A feature backbone may lack the last blocks."""
    begins = [0, *(end + 1 for end in model.stage_ends)]
    numbers = [int(key) for key in model.blocks._modules]
    chains = [tuple(f"blocks.{i}" for i in numbers if begin <= i < end) for begin, end in pairwise(begins)]
    return [chain for chain in chains if chain]


def hiera_stages(model: Any) -> list[Stage]:
    """Return Hiera's stages. After the first stage, ``q_pool`` stages begin with a block that pools."""
    return [
        Stage(blocks, shrink=quartered if 0 < i <= model.q_pool else None)
        for i, blocks in enumerate(cut_at_ends(model))
    ]


HIERA = Adapter(
    name="timm Hiera",
    layouts=Layout("timm.models.hiera.Hiera", grid=units_grid, stages=hiera_stages),
    blocks={
        "timm.models.hiera.HieraBlock": (
            Plain(where="do_expand"),  # pools its queries and its residual path
            TransformerBlock(heads="attn.heads", idle=("attn.use_mask_unit_attn", "mlp.norm"), classes={"mlp": MLP}),
            PRE_NORM,
        )
    },
    default_blocks=early_stages,
)

ADAPTERS = (NAFLEX, QWEN3, DEEPSEEK, GEMMA4, CAIT, CONVIT, PIT, HIERA)
