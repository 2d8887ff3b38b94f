"""timm: the families of ViT, EVA, BEiT, ViT with relative positions, MLP-Mixer, ConvNeXt, CoAtNet, MaxViT and Swin."""

from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

from torch import Tensor, nn

from ..sampling import recommended
from . import queries
from . import windowed as W
from .base import Adapter, Plain
from .layouts import Grid, Layout, Shrink, Stage, channels_last_grid, early_stages, halved, member_names
from .lean import HEADS_MEET, LINEARS, BiasedBlock, ConvBlock, Downsample, RotaryBlock, TransformerBlock, post_norms
from .names import find
from .rerun import Mixer, Patches, PointwiseBlock, Residual
from .windowed import InWindows, PartitionBlock, WindowBlock, Windowed

# Classes, by all the names that releases of timm give them.
ATTENTION = ("timm.layers.attention.Attention", "timm.models.vision_transformer.Attention")
EVA_ATTENTION = ("timm.models.eva.EvaAttention", "timm.layers.attention.AttentionRope")
MLP = ("timm.layers.mlp.Mlp",)


def patch_grid(embed: nn.Module, x: Tensor, y: Tensor) -> Grid:
    return tuple(embed.dynamic_feat_size(tuple(x.shape[-2:])))  # type: ignore[operator]


def prefix_tokens(model: nn.Module) -> int:
    return int(model.num_prefix_tokens)  # type: ignore[arg-type]


def chain_of(model: nn.Module, name: str) -> list[tuple[str, nn.Module]]:
    """Return the members of a chain: ``stages.0``, …, or ``stages_0``, … if ``features_only`` has flattened it."""
    chain = find(model, name)
    if chain is None:
        return [(key, child) for key, child in model.named_children() if key.startswith(f"{name}_")]
    return [(f"{name}.{key}", child) for key, child in chain.named_children()]


def stages(chain: str, shrink: Shrink | None, model: nn.Module) -> list[Stage]:
    """Return the stages of a chain. Each begins with its own down-sampling layer, if it has one."""
    found = []
    for name, stage in chain_of(model, chain):
        down = find(stage, "downsample")
        has_layer = down is not None and not isinstance(down, nn.Identity)
        blocks = member_names(model, f"{name}.blocks")
        found.append(Stage(blocks, f"{name}.downsample", shrink) if has_layer else Stage(blocks))
    return found


def hybrid_stages(model: nn.Module) -> list[Stage]:
    """Return CoAtNet's and MaxViT's stages: all described blocks, also inside other modules. The first block of a stage
    shrinks the grid, as its shortcut tells."""
    found = []
    for name, stage in chain_of(model, "stages"):
        modules = list(stage.named_modules())
        blocks = tuple(f"{name}.{inner}" for inner, module in modules if HYBRID.knows(module))
        shortcut = next((f"{name}.{inner}" for inner, _ in modules if inner.endswith("shortcut")), "")
        found.append(Stage(blocks, shortcut))
    return found


FEATURES_ONLY = ("timm.models._features.FeatureDictNet", "timm.models._features.FeatureHookNet")


def with_features(layout: Layout) -> tuple[Layout, ...]:
    """Return the layout, and those of the same models behind ``features_only=True``, which flattens the first level:
    ``stem.0`` becomes ``stem_0``."""
    assert isinstance(layout.entry, str)
    flat = replace(layout, entry=partial(last_of, layout.entry), holds_any=True)
    return layout, *(replace(flat, model=model) for model in FEATURES_ONLY)


def last_of(entry: str, model: nn.Module) -> str:
    """Return the name of the entry, or of the last module that it was flattened into."""
    return next((key for key in reversed(model._modules) if key == entry or key.startswith(f"{entry}_")), "")


PRE_NORM = Residual()
POST_NORM = Residual(mixers=(Mixer("attn", ""),))
IN_ONE_PIECE = Residual(mixers=())

VIT_LAYOUT = Layout("timm.models.vision_transformer.VisionTransformer", grid=patch_grid, prefix=prefix_tokens)


def like_vit(model: str, **changes: Any) -> Layout:
    return replace(VIT_LAYOUT, model=f"timm.models.{model}", **changes)


def with_hooks(layout: Layout) -> tuple[Layout, ...]:
    """Return the layout, and that of the same models behind ``feature_cls="hook"``, which are read at maps."""

    def prefix(model: nn.Module) -> int:
        return layout.prefix_of(find(model, "body"))

    behind = replace(layout, model=FEATURES_ONLY[1], prefix=prefix, holds_any=True)
    return layout, replace(behind, entry=f"body.{layout.entry}", stages=f"body.{layout.stages}")


MLPS: tuple[dict[str, Any], ...] = (
    {"mlp": ("timm.layers.mlp.Mlp",)},
    {"mlp": ("timm.layers.mlp.GluMlp",), "gated": True},
    {"mlp": ("timm.layers.mlp.SwiGLU",), "gated": True, "fc1": ("mlp.fc1_g", "mlp.fc1_x")},
)
"""Kinds of MLPs: their classes, and the fields of a description that differ for them."""
DROPOUTS = ("attn.attn_drop", "attn.proj_drop", "mlp.drop1", "mlp.drop2")
QKV_BIAS = ("attn.q_bias", "attn.k_bias", "attn.v_bias")
GATES = ("attn.gate", "mlp.gate_last")
NO_ATTENTION_NORM: dict[str, Any] = {"idle": (*DROPOUTS, *GATES, "attn.norm")}
ATTENTION_NORM: dict[str, Any] = {"idle": (*DROPOUTS, *GATES), "attention_norm": "attn.norm", "rules": HEADS_MEET}


def lean(description: TransformerBlock, *attentions: dict[str, Any]) -> tuple[TransformerBlock, ...]:
    """Return a description for every kind of attention, with a norm in it or without, and of MLP. An item of
    ``attentions`` has the classes of attention, under "attn", and the fields that differ for it."""
    found = []
    for attention, norm, mlp in product(attentions, (NO_ATTENTION_NORM, ATTENTION_NORM), MLPS):
        parts = {**attention, **norm, **mlp}
        classes = {"attn": parts.pop("attn"), "mlp": parts.pop("mlp")}
        found.append(replace(description, classes=classes, inner_norm="mlp.norm", **parts))
    return tuple(found)


VIT = Adapter(
    name="timm ViT",
    layouts=with_hooks(VIT_LAYOUT),
    recommended=recommended.VIT,
    blocks={
        "timm.models.vision_transformer.Block": (
            *lean(TransformerBlock(), {"attn": ATTENTION}),
            PRE_NORM,
        ),
        "timm.models.vision_transformer.ResPostBlock": (
            *lean(TransformerBlock(**post_norms()), {"attn": ATTENTION}),
            POST_NORM,
        ),
        "timm.models.vision_transformer.ParallelThingsBlock": Residual(mixers=(Mixer("attns.*.attn", "attns.*.norm"),)),
        "timm.models.vision_transformer.ParallelScalingBlock": IN_ONE_PIECE,
        "timm.models.vision_transformer.DiffParallelScalingBlock": IN_ONE_PIECE,
    },
)

EVA_ATTENTIONS: tuple[dict[str, Any], ...] = (
    {"attn": EVA_ATTENTION, "qkv_bias": QKV_BIAS},
    {"attn": EVA_ATTENTION, "qkv": ("attn.q_proj", "attn.k_proj", "attn.v_proj")},
)
EVA = Adapter(
    name="timm EVA",
    layouts=with_hooks(like_vit("eva.Eva")),
    recommended=recommended.VIT,
    blocks={
        "timm.models.eva.EvaBlock": (
            *lean(RotaryBlock(scale1="gamma_1", scale2="gamma_2"), *EVA_ATTENTIONS),
            PRE_NORM,
        ),
        "timm.models.eva.EvaBlockPostNorm": (*lean(RotaryBlock(**post_norms()), *EVA_ATTENTIONS), POST_NORM),
    },
)


def beit_bias(block: Any, positions: int, shared_rel_pos_bias: Tensor | None = None) -> Tensor | None:
    return queries.beit_bias(block.attn, shared_rel_pos_bias)


BEIT_BLOCK = BiasedBlock(
    scale1="gamma_1", scale2="gamma_2", score_bias=beit_bias, arguments=("shared_rel_pos_bias",), qkv_bias=QKV_BIAS
)
BEIT = Adapter(
    name="timm BEiT",
    layouts=with_hooks(like_vit("beit.Beit")),
    recommended=recommended.VIT,
    blocks={"timm.models.beit.Block": (*lean(BEIT_BLOCK, {"attn": ("timm.models.beit.Attention",)}), PRE_NORM)},
)


def relative_bias(block: Any, positions: int, shared_rel_pos: Tensor | None = None) -> Tensor | None:
    return queries.relative_bias(block.attn, shared_rel_pos)


RELATIVE: dict[str, Any] = {"score_bias": relative_bias, "arguments": ("shared_rel_pos",)}
RELATIVE_ATTENTION = {"attn": ("timm.models.vision_transformer_relpos.RelPosAttention",)}
RELATIVE_VIT = Adapter(
    name="timm ViT with relative positions",
    layouts=with_hooks(like_vit("vision_transformer_relpos.VisionTransformerRelPos")),
    recommended=recommended.VIT,
    blocks={
        "timm.models.vision_transformer_relpos.RelPosBlock": (
            *lean(BiasedBlock(**RELATIVE), RELATIVE_ATTENTION),
            replace(PRE_NORM, constant=("attn.rel_pos",)),
        ),
        "timm.models.vision_transformer_relpos.ResPostRelPosBlock": (
            *lean(BiasedBlock(**RELATIVE, **post_norms()), RELATIVE_ATTENTION),
            replace(POST_NORM, constant=("attn.rel_pos",)),
        ),
    },
)

MIXER = Adapter(
    name="timm MLP-Mixer",
    layouts=like_vit("mlp_mixer.MlpMixer", entry="stem", prefix=0),
    blocks={
        "timm.models.mlp_mixer.MixerBlock": Residual(mixers=(Mixer("mlp_tokens", "norm1", dim=2),)),
        "timm.models.mlp_mixer.ResBlock": Residual(mixers=(Mixer("linear_tokens", "norm1", dim=2),)),
        "timm.models.mlp_mixer.SpatialGatingBlock": Residual(
            mixers=(Mixer("mlp_channels.gate", "norm mlp_channels.fc1 mlp_channels.act"),)
        ),
    },
)

CONVNEXT = Adapter(
    name="timm ConvNeXt",
    layouts=with_features(
        Layout("timm.models.convnext.ConvNeXt", entry="stem", stages=partial(stages, "stages", None))
    ),
    blocks={
        "timm.models.convnext.ConvNeXtBlock": (
            ConvBlock(
                shortcut="shortcut", idle=("mlp.drop1", "mlp.norm", "mlp.grn", "mlp.drop2"), classes={"mlp": MLP}
            ),
            PointwiseBlock(shortcut="shortcut"),
        )
    },
    default_blocks=early_stages,
    downsample=(Downsample(), Patches()),
    recommended=recommended.CONVNEXT,
)

WINDOWS = Residual(mixers=(Mixer("ls1", "norm1", whole=True),), constant=("attn.rel_pos",))

HEAD_FIRST: dict[str, Any] = {"head_first": "attn.head_first", "scale1": "ls1.gamma", "scale2": "ls2.gamma"}
MAP: dict[str, Any] = {**HEAD_FIRST, "dim": 2, "q_norm": "", "k_norm": ""}
PARTITION: dict[str, Any] = {"sizes": W.partition_sizes, "score_bias": W.relative_bias}
MAP_DROPOUTS = ("attn.attn_drop", "attn.proj_drop", "mlp.norm", "mlp.drop")
MAP_CLASSES = {"attn": ("timm.models.maxxvit.Attention2d",), "mlp": ("timm.layers.mlp.ConvMlp",)}

HYBRID = Adapter(
    name="timm CoAtNet and MaxViT",
    layouts=with_features(Layout("timm.models.maxxvit.MaxxVit", entry="stem", stages=hybrid_stages)),
    blocks={
        "timm.models.maxxvit.TransformerBlock2d": (
            BiasedBlock(**RELATIVE, **MAP, idle=(*MAP_DROPOUTS, "shortcut"), classes=MAP_CLASSES),
            Residual(
                mixers=(Mixer("attn", "norm1", dim=2, whole=True),),
                constant=("attn.rel_pos",),
                shortcut="shortcut",
                dim=2,
            ),
        ),
        "timm.models.maxxvit.PartitionAttentionCl": (
            PartitionBlock(
                **HEAD_FIRST,
                **PARTITION,
                idle=(*DROPOUTS, "mlp.norm"),
                classes={"attn": ("timm.models.maxxvit.AttentionCl",), "mlp": MLP},
            ),
            WINDOWS,
        ),
        "timm.models.maxxvit.PartitionAttention2d": (
            PartitionBlock(**MAP, **PARTITION, idle=MAP_DROPOUTS, classes=MAP_CLASSES),
            replace(WINDOWS, mixers=(Mixer("ls1", "norm1", dim=2, whole=True),), dim=2),
        ),
        "timm.models.maxxvit.ParallelPartitionAttention": replace(
            WINDOWS, constant=("attn_block.rel_pos", "attn_grid.rel_pos")
        ),
        "timm.models.maxxvit.ConvNeXtBlock": ConvBlock(
            pool="down",
            scale="ls.gamma",
            shortcut="shortcut",
            idle=("mlp.norm", "mlp.drop"),
            classes={"mlp": ("timm.layers.mlp.ConvMlp",)},
        ),
        "timm.models.maxxvit.MbConvBlock": Plain(),  # batch norm, squeeze and excitation
    },
    default_blocks=early_stages,
)


def swin(
    name: str, file: str, model: str, block: str, layout: Layout, attention: str, *descriptions: InWindows
) -> Adapter:
    """Return the adapter of a Swin, whose attention is of the class ``attention``, with a linear layer ``qkv``."""
    path = f"timm.models.{file}."
    classes = {"attn": (path + attention,), "attn.qkv": LINEARS, "mlp": MLP}
    return Adapter(
        name=name,
        layouts=with_features(replace(layout, model=path + model)),
        default_blocks=early_stages,
        blocks={path + block: tuple(replace(its, classes=classes) for its in descriptions)},
        recommended=recommended.SWIN,
    )


COSINE_BLOCK = WindowBlock(idle=(*DROPOUTS, "mlp.norm"), logit_scale="attn.logit_scale", **post_norms())
LAYERS = Layout("", grid=channels_last_grid, stages=partial(stages, "layers", halved))

SWIN = swin(
    *("timm Swin", "swin_transformer", "SwinTransformer", "SwinTransformerBlock"),
    *(LAYERS, "WindowAttention", WindowBlock(idle=(*DROPOUTS, "mlp.norm")), Windowed()),
)
SWIN_V2 = swin(
    *("timm Swin v2", "swin_transformer_v2", "SwinTransformerV2", "SwinTransformerV2Block"),
    *(LAYERS, "WindowAttention"),
    replace(COSINE_BLOCK, qkv_bias=QKV_BIAS, score_bias=W.v2_bias),
    Windowed(post_norm=True, kept_query_attention=W.timm_v2_attention),
)
SWIN_V2_CR = swin(
    *("timm Swin v2 CR", "swin_transformer_v2_cr", "SwinTransformerV2Cr", "SwinTransformerV2CrBlock"),
    Layout("", stages=partial(stages, "stages", halved)),
    "WindowMultiHeadAttention",
    replace(COSINE_BLOCK, last="norm3", score_bias=W.timm_cr_bias),
    Windowed(constant=("attn.meta_mlp",), post_norm=True, last="norm3", kept_query_attention=W.timm_cr_attention),
)

ADAPTERS = (VIT, EVA, BEIT, RELATIVE_VIT, MIXER, CONVNEXT, HYBRID, SWIN, SWIN_V2, SWIN_V2_CR)
