"""One table of tiny random models: every family and every kind of block that is known, with an input for each."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import timm
import torch
import torchvision
from timm.layers import GatedMlp, SwiGLU, SwiGLUPacked
from timm.models import metaformer, mlp_mixer
from timm.models import vision_transformer as vit
from timm.models.eva import Eva
from timm.models.focalnet import FocalNet
from timm.models.gcvit import GlobalContextVit
from timm.models.mvitv2 import MultiScaleVit, MultiScaleVitCfg
from timm.models.swin_transformer import SwinTransformer
from timm.models.swin_transformer_v2 import SwinTransformerV2
from timm.models.swin_transformer_v2_cr import SwinTransformerV2Cr
from timm.models.volo import VOLO
from torch import Tensor, nn
from torchvision.models import swin_transformer as vision
from torchvision.models.video.swin_transformer import SwinTransformer3d

ALL, NO_HEAD, QUERY = ("query", "qkv", "head", "exact"), ("query", "qkv", "exact"), ("query",)


@dataclass(frozen=True)
class Tiny:
    """How to build a model; the shape of one sample; what its blocks are.

    - ``kind``: "lean" blocks are known part by part, the others too or run again, on "tokens", on "maps" or in
      "windows"; a "member" of a family has its published options, and lean blocks, or such that run again, by these.
    - ``rules``: those that its blocks have.
    - ``drop_path``: the library's option for stochastic depth; "" where it has none.
    - ``same_bits``: whether a patched model's output is equal bit for bit; otherwise its sums are in another order.
    """

    build: Callable[..., nn.Module]
    kind: str
    shape: tuple[int, ...] = (3, 64, 96)
    rules: tuple[str, ...] = QUERY
    drop_path: str = "drop_path_rate"
    same_bits: bool = True

    def bare(self, drop_path: float | None = None, **options: Any) -> nn.Module:
        """The library's own model: float64, in training, nothing at its initial zero, where errors would hide."""
        if drop_path is not None and self.drop_path:
            options[self.drop_path] = drop_path
        return randomized(self.build, **options)

    def model(self, drop_path: float | None = None, **options: Any) -> nn.Module:
        """The same, as a function to scores."""
        model = self.bare(drop_path, **options)
        return Scores(model) if type(model).__module__.startswith("transformers.") else model

    def images(self, batch: int = 2, size: tuple[int, ...] | None = None) -> Tensor:
        size = size or self.shape[-2:]
        shape = (batch, *self.shape[: len(self.shape) - len(size)], *size)
        return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def randomized(build: Callable[..., nn.Module], **options: Any) -> nn.Module:
    torch.manual_seed(0)
    model = build(**options)
    if getattr(model, "rope_mixed", False):
        model.rope = LearnedRope(model.rope)
    model.double().train()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p) * 0.1)
    return model


def images(batch: int = 3, size: tuple[int, int] = (64, 96)) -> Tensor:
    return torch.randn(batch, 3, *size, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


class Scores(nn.Module):
    """The scores of a transformers model as a plain tensor."""

    def __init__(self, model: nn.Module, **arguments: Any) -> None:
        super().__init__()
        self.model, self.arguments = model, arguments

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x, **self.arguments)[0]


class LearnedRope(nn.Module):
    """The embedding that mixed frequencies give at first, learned as it is: timm computes theirs in float32 only."""

    def __init__(self, rope: nn.Module) -> None:
        super().__init__()
        self.embedding = nn.Parameter(rope.get_embed().detach())

    def get_embed(self, shape: Any = None) -> Tensor:
        return self.embedding


def of_timm(name: str, **sizes: Any) -> Callable[..., nn.Module]:
    def build(**options: Any) -> nn.Module:
        return timm.create_model(name, **sizes | options)

    return build


def of_transformers(cls: str, **sizes: Any) -> Callable[..., nn.Module]:
    def build(**options: Any) -> nn.Module:
        import transformers  # here: its classes take seconds to import, in every process that a test starts

        kind = getattr(transformers, cls)
        return kind._from_config(kind.config_class(**sizes | options))

    return build


def transformers_model(cls: str, **options: Any) -> nn.Module:
    return randomized(of_transformers(cls, **options))


VIT_SIZES = {"depth": 3, "embed_dim": 24, "num_heads": 3, "img_size": (64, 96), "num_classes": 5}
CONVNEXT_SIZES = {"depths": (1, 1, 3, 1), "dims": (8, 12, 16, 20), "num_classes": 5}

tiny_vit = of_timm("vit_tiny_patch16_224", **VIT_SIZES)
tiny_convnext = of_timm("convnext_tiny", **CONVNEXT_SIZES)


def torchvision_convnext(**options: Any) -> nn.Module:
    config = torchvision.models.convnext.CNBlockConfig
    blocks = [config(8, 12, 1), config(12, 16, 1), config(16, 20, 3), config(20, None, 1)]
    return torchvision.models.ConvNeXt(blocks, num_classes=5, layer_scale=0.5, **options)


def torchvision_vit(**options: Any) -> nn.Module:
    sizes = {"image_size": 64, "patch_size": 16, "num_layers": 3, "num_heads": 3, "hidden_dim": 24, "mlp_dim": 48}
    return torchvision.models.VisionTransformer(**sizes | {"num_classes": 5} | options)


def lean_vit(**options: Any) -> Tiny:
    return Tiny(partial(tiny_vit, **options), "lean", rules=ALL)


LEAN = {
    "vit": lean_vit(),
    "vit layer scale, drop path": lean_vit(init_values=0.5, drop_path_rate=0.5),
    "vit qk norm, no bias": lean_vit(qk_norm=True, qkv_bias=False),
    "vit registers, no class token": lean_vit(class_token=False, reg_tokens=2, global_pool="avg"),
    "vit rms norm, quick gelu": lean_vit(norm_layer="rmsnorm", act_layer="quick_gelu"),
    "convnext": Tiny(partial(tiny_convnext, ls_init_value=0.5), "lean"),
    # A matrix product sums in another order than a 1×1 convolution.
    "convnext 1×1 conv, drop path": Tiny(
        partial(tiny_convnext, conv_mlp=True, drop_path_rate=0.5), "lean", same_bits=False
    ),
    "convnext no layer scale": Tiny(partial(tiny_convnext, ls_init_value=None), "lean"),
    "torchvision convnext": Tiny(
        partial(torchvision_convnext, stochastic_depth_prob=0.5), "lean", drop_path="stochastic_depth_prob"
    ),
}
TORCHVISION = {"torchvision vit": Tiny(torchvision_vit, "lean", (3, 64, 64), ALL, drop_path="")}

LAYERS = {"hidden_size": 24, "num_hidden_layers": 3, "num_attention_heads": 3, "image_size": 64, "patch_size": 16}
VIT = {**LAYERS, "intermediate_size": 48, "num_labels": 5}
DINOV2 = {**LAYERS, "mlp_ratio": 2, "num_labels": 5, "layerscale_value": 0.5}
TOWER = {"vision_config": {**LAYERS, "intermediate_size": 48}, "num_labels": 5}
VIDEOMAE = {**VIT, "num_frames": 4, "tubelet_size": 2}
PREDICTOR = {"pred_hidden_size": 24, "pred_num_attention_heads": 3, "pred_num_hidden_layers": 1}
VJEPA2 = {
    **{name: LAYERS[name] for name in ("hidden_size", "num_hidden_layers", "num_attention_heads", "patch_size")},
    **{"crop_size": 64, "frames_per_clip": 4, "mlp_ratio": 2, "num_pooler_layers": 1, "num_labels": 5, **PREDICTOR},
}
CONVNEXT = {"hidden_sizes": [8, 12, 16, 20], "depths": [1, 1, 3, 1], "num_labels": 5, "layer_scale_init_value": 0.5}


def lean_transformers(cls: str, *, same_bits: bool = True, drop_path: str = "", **sizes: Any) -> Tiny:
    shape = (4, 3, 64, 64) if "Video" in cls else (3, 64, 64)
    rules = QUERY if "ConvNext" in cls else ALL
    return Tiny(of_transformers(cls, **sizes), "lean", shape, rules, drop_path, same_bits)


# In another order are sums where attention is written out, keys have a bias of zero, drop path is one factor.
TRANSFORMERS = {
    "transformers vit": lean_transformers("ViTForImageClassification", **VIT),
    "transformers deit": lean_transformers("DeiTForImageClassification", **VIT),
    "transformers dinov2": lean_transformers(
        "Dinov2ForImageClassification", same_bits=False, drop_path="drop_path_rate", **DINOV2
    ),
    "transformers dinov2 eager, no bias": lean_transformers(
        "Dinov2ForImageClassification", same_bits=False, attn_implementation="eager", qkv_bias=False, **DINOV2
    ),
    "transformers dinov2 with registers": lean_transformers(
        "Dinov2WithRegistersForImageClassification", num_register_tokens=2, **DINOV2
    ),
    "transformers beit": lean_transformers(
        "BeitForImageClassification",
        same_bits=False,
        drop_path="drop_path_rate",
        use_relative_position_bias=True,
        layer_scale_init_value=0.5,
        **VIT,
    ),
    "transformers data2vec": lean_transformers(
        "Data2VecVisionForImageClassification",
        same_bits=False,
        drop_path="drop_path_rate",
        use_relative_position_bias=True,
        use_shared_relative_position_bias=True,
        layer_scale_init_value=0.5,
        **VIT,
    ),
    "transformers clip": lean_transformers("CLIPForImageClassification", **TOWER),
    "transformers siglip": lean_transformers("SiglipForImageClassification", **TOWER),
    "transformers videomae": lean_transformers("VideoMAEForVideoClassification", same_bits=False, **VIDEOMAE),
    "transformers vjepa2": lean_transformers(
        "VJEPA2ForVideoClassification", same_bits=False, drop_path="drop_path_rate", **VJEPA2
    ),
    "transformers convnext": lean_transformers(
        "ConvNextForImageClassification", same_bits=False, drop_path="drop_path_rate", **CONVNEXT
    ),
}

IMAGES = {**LAYERS, "intermediate_size": 48}
SQUARES = {"image_size": [64, 64], "patch_size": [16, 16]}
SIBLINGS = {  # model class, its own options beside those of its kind
    "ViTMSNForImageClassification": VIT,
    "IJepaForImageClassification": VIT,
    "VivitForVideoClassification": {**VIT, "num_frames": 4, "tubelet_size": [2, 16, 16]},
    "DPTModel": VIT,
    "AltCLIPVisionModel": IMAGES,
    "ChineseCLIPVisionModel": IMAGES,
    "MetaClip2ForImageClassification": TOWER,
    "OwlViTVisionModel": IMAGES,
    "Owlv2VisionModel": IMAGES,
    "Idefics3VisionTransformer": IMAGES,
    "SmolVLMVisionTransformer": IMAGES,
    "BlipVisionModel": IMAGES,
    "Blip2VisionModel": IMAGES,
    "InstructBlipVisionModel": IMAGES,
    "InstructBlipVideoVisionModel": IMAGES,
    "PixioModel": {**LAYERS, "mlp_ratio": 2, "n_cls_tokens": 3},
    "JanusVisionModel": {**LAYERS, "mlp_ratio": 2.0},
    "InternVLVisionModel": {**IMAGES, **SQUARES, "layer_scale_init_value": 0.5},
}


def sibling(cls: str, **sizes: Any) -> Tiny:
    shape = (4, 3, 64, 64) if cls.endswith("ForVideoClassification") else (3, 64, 64)
    # BLIP's attention is written out.
    return Tiny(of_transformers(cls, **sizes), "member", shape, drop_path="", same_bits=cls != "BlipVisionModel")


MEMBERS = {
    "deit_tiny_patch16_224": {"img_size": 64},
    "deit_tiny_distilled_patch16_224": {"img_size": 64},
    "deit3_small_patch16_224": {"img_size": 64},
    "vit_small_patch14_dinov2": {"img_size": 56},
    "vit_small_patch14_reg4_dinov2": {"img_size": 56},
    "vit_base_patch32_clip_224": {"img_size": 128},
    "vit_base_patch32_clip_quickgelu_224": {"img_size": 128},
    "vit_base_patch16_siglip_224": {"img_size": 64},
    "vit_tiny_r_s16_p8_224": {"img_size": 64},
    "vit_wee_patch16_reg1_gap_256": {"img_size": 64},
    "convnext_atto": {"depths": (1, 1, 3, 1)},
    "convnext_tiny_hnf": {"depths": (1, 1, 3, 1), "dims": (16, 24, 32, 48)},
}


def member(name: str, img_size: int = 64, **sizes: Any) -> Tiny:
    if not name.startswith("convnext"):
        sizes = {"img_size": img_size, "depth": 2, "embed_dim": 48, "num_heads": 3}
        return Tiny(of_timm(name, num_classes=5, **sizes), "member", (3, img_size, img_size))
    return Tiny(of_timm(name, num_classes=5, **sizes), "member", same_bits=False)


EVA = inspect.signature(Eva).parameters  # newer releases of timm have more options
GROUPED = {"num_kv_heads": 1} if "num_kv_heads" in EVA else {}
NORMED = {"qk_norm": True} if "qk_norm" in EVA else {}


class OwnNorm(nn.LayerNorm):
    """One that no description knows: blocks with it run again."""


OWN = {"norm_layer": OwnNorm}


def tokens(name: str, *, same_bits: bool = True, rules: tuple[str, ...] = QUERY, **options: Any) -> Tiny:
    sizes = VIT_SIZES | {"img_size": (32, 48), "patch_size": 8}
    return Tiny(of_timm(name, **sizes | options), "tokens", (3, 32, 48), rules, same_bits=same_bits)


def mixer(**options: Any) -> Tiny:
    sizes = {"num_blocks": 3, "embed_dim": 24, "img_size": 32, "patch_size": 8, "num_classes": 5}
    return Tiny(partial(mlp_mixer.MlpMixer, **sizes | options), "tokens", (3, 32, 32))


# PyTorch takes another attention kernel where it need not differentiate a bias: forward is equal to rounding.
learned_bias = partial(tokens, same_bits=False, rules=ALL)
TOKENS = {
    "swiglu": tokens("vit_tiny_patch16_224", mlp_layer=SwiGLU, init_values=0.5, rules=ALL, same_bits=False),
    "packed swiglu": tokens(
        "vit_tiny_patch16_224", mlp_layer=SwiGLUPacked, scale_attn_norm=True, scale_mlp_norm=True, rules=NO_HEAD
    ),
    "differential attention": tokens("vit_tiny_patch16_224", attn_layer="diff", qk_norm=True, embed_dim=48),
    "parallel": tokens("vit_tiny_patch16_224", block_fn=vit.ParallelThingsBlock, init_values=0.5),
    "one piece": tokens("vit_tiny_patch16_224", block_fn=vit.ParallelScalingBlock, qk_norm=True),
    "post norm": tokens("vit_tiny_patch16_224", block_fn=vit.ResPostBlock, init_values=0.5, rules=NO_HEAD),
    "eva": tokens("eva_giant_patch14_224"),
    "eva02": tokens("eva02_tiny_patch14_224", rules=ALL),
    "eva02, inner norm": tokens("eva02_tiny_patch14_224", scale_attn_inner=True, rules=NO_HEAD),
    "eva post norm": tokens(
        "eva_giant_patch14_224", use_post_norm=True, use_rot_pos_emb=True, scale_attn_inner=True, rules=NO_HEAD
    ),
    "dinov3": tokens("vit_small_patch16_dinov3", init_values=0.5),
    "dinov3 split qkv": tokens("vit_small_plus_patch16_dinov3", qkv_fused=False, attn_type="rope", **GROUPED),
    "mixed rope": tokens("vit_small_patch16_rope_mixed_224", init_values=0.5),
    "mixed rope, inner norm": tokens("vit_small_patch16_rope_mixed_224", scale_attn_inner=True),
    "gated rope": tokens("vit_small_patch16_rope_ape_224", attn_type="rope", **NORMED),
    "beit": learned_bias("beitv2_base_patch16_224", init_values=0.5),
    "beit shared bias": learned_bias(
        "beit_base_patch16_224", init_values=None, use_rel_pos_bias=True, use_shared_rel_pos_bias=True
    ),
    "relative": learned_bias("vit_relpos_small_patch16_224", init_values=0.5),
    "relative class token": learned_bias("vit_relpos_base_patch16_clsgap_224", qk_norm=True, rel_pos_type="bias"),
    "relative post norm": learned_bias("vit_relpos_small_patch16_rpn_224", rules=NO_HEAD),
    "shared relative": learned_bias("vit_srelpos_small_patch16_224", init_values=0.5),
    "vit, own norm": tokens("vit_tiny_patch16_224", init_values=0.5, **OWN),
    "eva02, own norm": tokens("eva02_tiny_patch14_224", **OWN),
    "eva post norm, own norm": tokens("eva_giant_patch14_224", use_post_norm=True, use_rot_pos_emb=True, **OWN),
    "mixed rope, own norm": tokens("vit_small_patch16_rope_mixed_224", **OWN),
    "beit, own norm": tokens("beitv2_base_patch16_224", init_values=0.5, same_bits=False, **OWN),
    "beit shared bias, own norm": tokens(
        "beit_base_patch16_224", use_rel_pos_bias=True, use_shared_rel_pos_bias=True, same_bits=False, **OWN
    ),
    "relative, own norm": tokens("vit_relpos_small_patch16_224", init_values=0.5, same_bits=False, **OWN),
    "mixer": mixer(),
    "resmlp": mixer(block_layer=mlp_mixer.ResBlock, mlp_ratio=4, norm_layer=mlp_mixer.Affine),
    "gmlp": mixer(block_layer=mlp_mixer.SpatialGatingBlock, mlp_ratio=4, mlp_layer=GatedMlp),
}


def hybrid(name: str, **options: Any) -> Tiny:
    sizes = {"img_size": (64, 96), "depths": (1, 1, 3, 1), "embed_dim": (16, 16, 32, 32), "stem_width": 16}
    sizes |= {"transformer_dim_head": 8, "num_classes": 5}
    return Tiny(of_timm(name, **sizes | options), "maps", same_bits=False)


def pointwise(name: str, **options: Any) -> Tiny:
    return Tiny(of_timm(name, **CONVNEXT_SIZES | options), "maps")


MISH = {"transformer_act_layer": "mish"}  # no description knows it: blocks run again
HYBRIDS = {
    "coatnet": hybrid("coatnet_0_rw_224", transformer_init_values=0.5),
    "coatnet relative mlp": hybrid("coatnet_rmlp_nano_rw_224"),
    "coatnet mixed stages": hybrid("coatnet_nano_cc_224", depths=(1, 1, 3, 2)),
    "coatnet max pool": hybrid("coatnet_0_224", transformer_pool_type="max", transformer_head_first=False),
    "coatnext": hybrid("coatnext_nano_rw_224", conv_init_values=0.5),
    "maxvit": hybrid("maxvit_tiny_rw_224", transformer_init_values=0.5),
    "maxvit tf": hybrid("maxvit_tiny_tf_224", head_hidden_size=32),
    "coatnet, own activation": hybrid("coatnet_0_rw_224", **MISH),
    "maxvit, own activation": hybrid("maxvit_tiny_rw_224", **MISH),
    "maxvit channels first, own activation": hybrid("maxvit_tiny_rw_224", transformer_use_nchw_attn=True, **MISH),
    "maxvit parallel": hybrid("maxvit_tiny_pm_256", transformer_dim_head=4),
    "maxvit channels first": hybrid("maxvit_tiny_rw_224", transformer_use_nchw_attn=True),
    "maxxvit relative mlp": hybrid("maxxvit_rmlp_nano_rw_256", conv_init_values=0.5),
    "maxxvit v2": hybrid("maxxvitv2_nano_rw_256", conv_init_values=0.5, head_hidden_size=None),
}


def torchvision_maxvit(**options: Any) -> nn.Module:
    sizes = {"input_size": (64, 64), "stem_channels": 8, "partition_size": 4, "block_channels": [8, 16], "head_dim": 8}
    return torchvision.models.MaxVit(**sizes | {"block_layers": [1, 2], "stochastic_depth_prob": 0.0} | options)


HYBRIDS["torchvision maxvit"] = Tiny(
    torchvision_maxvit, "maps", (3, 64, 64), drop_path="stochastic_depth_prob", same_bits=False
)
POINTWISE = {
    "convnext v2": pointwise("convnextv2_tiny"),
    "convnext v2 1×1 conv, layer scale": pointwise("convnextv2_atto", ls_init_value=0.5),
    "convnext simple norm": pointwise("convnext_zepto_rms", ls_init_value=0.5),
    "convnext simple norm, overlapping stem": pointwise(
        "convnext_zepto_rms_ols", conv_mlp=False, act_layer="hard_swish"
    ),
    "convnext rms norm": pointwise("convnext_atto_rms"),
    "convnext patches of 2": pointwise("convnext_tiny", patch_size=2),
}


SWIN = {"depths": (2, 2), "num_heads": (2, 3), "embed_dim": 12}


def timm_swin(cls: type, size: tuple[int, int] = (64, 64), **options: Any) -> Tiny:
    sizes = SWIN | {"img_size": 64, "patch_size": 4, "window_size": 4, "drop_path_rate": 0.0, "num_classes": 5}
    # Cosines are multiplied by their scale before their sum, not behind it.
    same_bits = cls is SwinTransformer or "norm_layer" in options
    return Tiny(partial(cls, **sizes | options), "windows", (3, *size), same_bits=same_bits)


def torchvision_swin(window: tuple[int, ...], size: tuple[int, ...] = (64, 64), **options: Any) -> Tiny:
    cls = SwinTransformer3d if len(window) == 3 else vision.SwinTransformer
    sizes = {"patch_size": [2, 4, 4][-len(window) :], "window_size": list(window), "num_classes": 5}
    build = partial(cls, **SWIN | sizes | {"stochastic_depth_prob": 0.0} | options)
    same_bits = "block" not in options or "norm_layer" in options
    return Tiny(build, "windows", (3, *size), drop_path="stochastic_depth_prob", same_bits=same_bits)


def transformers_swin(name: str, size: tuple[int, int] = (64, 64), **options: Any) -> Tiny:
    sizes = {"image_size": 64, "patch_size": 4, "window_size": 4, "num_labels": 5, "drop_path_rate": 0.0}
    lists = {"depths": [2, 2], "num_heads": [2, 3], "embed_dim": 12}
    build = of_transformers(f"{name}ForImageClassification", **sizes | lists | options)
    # Its attention is another kernel of PyTorch where that need not differentiate the bias.
    return Tiny(build, "windows", (3, *size), same_bits=False)


def transformers_sam(name: str, window: int) -> Tiny:
    sizes = {"hidden_size": 24, "num_hidden_layers": 3, "num_attention_heads": 3, "mlp_dim": 48, "output_channels": 8}
    sizes |= {"image_size": 64, "patch_size": 8, "window_size": window, "global_attn_indexes": [1], "num_pos_feats": 4}
    return Tiny(of_transformers(f"{name}VisionModel", **sizes), "windows", (3, 64, 64), drop_path="", same_bits=False)


SAM2 = {
    **{"image_size": [64, 64], "hidden_size": 12, "num_attention_heads": 1, "blocks_per_stage": [1, 2, 3, 2]},
    **{"embed_dim_per_stage": [12, 24, 36, 48], "num_attention_heads_per_stage": [1, 2, 3, 4]},
    **{"window_size_per_stage": [8, 6, 4, 2], "global_attention_blocks": [5]},
}
V2 = {"block": vision.SwinTransformerBlockV2, "downsample_layer": vision.PatchMergingV2}
FREE = {"strict_img_size": False, "always_partition": True}
WINDOWS = {
    "swin": timm_swin(SwinTransformer),
    "swin, padded": timm_swin(SwinTransformer, (36, 52), window_size=5, **FREE),
    "swin, window of the grid": timm_swin(SwinTransformer, (32, 32), window_size=8, img_size=32),
    "swin, own norm": timm_swin(SwinTransformer, **OWN),
    "swin v2": timm_swin(SwinTransformerV2),
    "swin v2, padded": timm_swin(SwinTransformerV2, (36, 52), window_size=(5, 3), **FREE),
    "swin v2, own norm": timm_swin(SwinTransformerV2, (36, 52), window_size=(5, 3), **OWN, **FREE),
    "swin CR": timm_swin(SwinTransformerV2Cr, init_values=0.5),
    "swin CR, padded, norms": timm_swin(
        SwinTransformerV2Cr, (36, 52), window_size=(3, 5), extra_norm_stage=True, init_values=None, **FREE
    ),
    "swin CR, own norm": timm_swin(SwinTransformerV2Cr, extra_norm_stage=True, init_values=0.5, **OWN),
    "torchvision swin": torchvision_swin((4, 4)),
    "torchvision swin, padded": torchvision_swin((5, 5), (36, 52)),
    "torchvision swin v2": torchvision_swin((4, 4), **V2),
    "torchvision swin v2, padded": torchvision_swin((5, 3), (36, 20), **V2),
    "torchvision swin v2, own norm": torchvision_swin((4, 4), **V2, **OWN),
    "video swin": torchvision_swin((2, 4, 4), (8, 32, 32)),
    "video swin, padded": torchvision_swin((4, 3, 5), (10, 36, 28)),
    "video swin, own norm": torchvision_swin((4, 3, 5), (10, 36, 28), **OWN),
    "transformers swin": transformers_swin("Swin"),
    "transformers swin, padded": transformers_swin("Swin", (36, 52), window_size=3),
    "transformers swin v2": transformers_swin("Swinv2"),
    "transformers swin v2, padded": transformers_swin("Swinv2", (36, 52), window_size=3),
    "transformers swin v2, own activation": transformers_swin("Swinv2", hidden_act="mish"),
    "transformers sam": transformers_sam("Sam", 4),
    "transformers sam-hq, padded": transformers_sam("SamHQ", 3),
    "transformers sam 2": Tiny(of_transformers("Sam2HieraDetModel", **SAM2), "windows", (3, 64, 64), drop_path=""),
}

TRANSFORMERS_POINTWISE = {
    "transformers convnext v2": Tiny(
        of_transformers("ConvNextV2ForImageClassification", **{k: v for k, v in CONVNEXT.items() if "scale" not in k}),
        "maps",
        same_bits=False,
    ),
}

SMALL = {"depth": 3, "embed_dim": 24, "num_heads": 3, "num_classes": 5, "patch_size": 8}
WIDE = (32, 48)


def of_family(
    build: str | Callable[..., nn.Module], kind: str, size: tuple[int, int], same_bits: bool = True, **sizes: Any
) -> Tiny:
    build = of_timm(build, **sizes) if isinstance(build, str) else partial(build, **sizes)
    return Tiny(build, kind, (3, *size), same_bits=same_bits)


def deepseek(**options: Any) -> nn.Module:
    """With norms in the precision of their input: timm computes them in float32 only."""
    from timm.layers.norm import RmsNorm, RmsNormFp32  # of releases that have the model

    model = timm.create_model("deepseek_vit_412m", **options)
    for module in [*model.modules()]:
        for name, norm in module.named_children():
            if isinstance(norm, RmsNormFp32):
                setattr(module, name, RmsNorm(*norm.normalized_shape, eps=norm.eps))
    return model


NAFLEX = {"pos_embed_grid_size": (4, 6)}  # that of the image: timm interpolates in float32 only
GEMMA = {"head_dim": 8, "intermediate_size": 48, "position_embedding_size": 16, "img_size": (48, 72)}
CONVIT = {"depth": 4, "local_up_to_layer": 3, "img_size": 32}
PIT = {"base_dims": (8, 8, 8), "depth": (1, 2, 2), "heads": (1, 2, 4), "num_classes": 5, "img_size": (64, 96)}
HIERA = {"embed_dim": 8, "num_heads": 1, "stages": (2, 2, 3, 1), "num_classes": 5}
# Lean blocks sum in another order where a bias of zero is added, or none.
VITS = {
    "naflex": of_family("naflexvit_base_patch16_gap", "member", WIDE, **SMALL, **NAFLEX),
    "naflex rope": of_family(
        "naflexvit_base_patch16_gap", "member", WIDE, False, **SMALL, **NAFLEX, rope_type="axial", swiglu_mlp=True
    ),
    "cait": of_family("cait_xxs24_224", "tokens", WIDE, **SMALL, img_size=WIDE),
    "convit": of_family("convit_tiny", "tokens", (32, 32), **SMALL | CONVIT | {"embed_dim": 8}),
    "pit": of_family("pit_s_distilled_224", "member", (64, 96), **PIT),
    "hiera": of_family("hiera_tiny_224", "tokens", (64, 96), False, **HIERA, img_size=(64, 96)),
}
NEWER = {  # than timm 1.0.29
    "qwen3_vit_88m": of_family(
        "qwen3_vit_88m", "member", (32, 32), False, **SMALL | {"embed_dim": 48}, pos_embed_grid_size=4
    ),
    "deepseek_vit_412m": of_family(deepseek, "member", WIDE, **SMALL | {"embed_dim": 48}),
    "gemma4_vit_167m": of_family("gemma4_vit_167m", "tokens", (48, 72), **SMALL | GEMMA),
}
VITS |= {name: tiny for name, tiny in NEWER.items() if timm.is_model(name)}

MVIT = MultiScaleVitCfg(depths=(1, 2, 2, 1), embed_dim=8, stride_kv_adaptive=(2, 2))
STAGES = {"num_classes": 5, "depths": (1, 1, 2, 1)}
SAM = SMALL | {"img_size": (48, 64), "window_size": 4, "global_attn_indexes": [1], "neck_chans": 8}
HIERA_DET = HIERA | {"stages": (2, 1, 3, 1), "global_att_blocks": (5,), "window_spec": (4, 2, 4, 2)}
TWINS = STAGES | {"embed_dims": (8, 8, 16, 16), "num_heads": (1, 1, 2, 2), "img_size": (64, 96)}
CONVOLUTION, ATTENTION = metaformer.SepConv, metaformer.Attention
MIXERS = {"token_mixers": [CONVOLUTION, CONVOLUTION, ATTENTION, ATTENTION], "dims": (8, 16, 32, 32)}
MIXERS |= {"norm_layers": [metaformer.LayerNorm2dNoBias] * 2 + [metaformer.LayerNormNoBias] * 2}
POST_NORM = {"use_post_norm": True, "use_post_norm_in_modulation": True, "use_overlap_down": True}
EDGENEXT = {"dims": (8, 16, 32, 64), "depths": (1, 2, 3, 2), "heads": (2, 2, 2, 2), "num_classes": 5}
GCVIT = {"depths": (2, 2, 2, 2), "num_heads": (1, 1, 2, 2), "embed_dim": 8, "num_classes": 5, "img_size": (64, 96)}
GCVIT |= {"window_ratio": (16, 16, 16, 32), "layer_scale": 0.5}
VOLO_SIZES = {"layers": (1, 1, 2, 1), "embed_dims": (8, 16, 16, 16), "num_heads": (1, 2, 2, 2), "num_classes": 5}
PYRAMIDS = {
    "hieradet": of_family("hieradet_small", "maps", (64, 96), False, **HIERA_DET),
    "hieradet, own norm": of_family("hieradet_small", "maps", (64, 96), **HIERA_DET, **OWN),
    "sam": of_family("samvit_base_patch16", "windows", (48, 64), False, **SAM),
    "sam rope": of_family("samvit_base_patch16", "windows", (48, 64), **SAM, use_rel_pos=False, use_rope=True),
    "gcvit": of_family(GlobalContextVit, "maps", (64, 96), **GCVIT),
    "twins svt": of_family("twins_svt_small", "tokens", (64, 96), **TWINS | {"depths": (1, 2, 2, 1)}, wss=(4, 4, 4, 4)),
    "twins pcpvt": of_family("twins_pcpvt_small", "member", (64, 96), **TWINS),
    "volo": of_family(VOLO, "maps", (64, 96), False, **VOLO_SIZES, img_size=(64, 96), stem_hidden_dim=8),
    "mvit": of_family(MultiScaleVit, "tokens", (64, 64), cfg=MVIT, num_classes=5, img_size=64),
    "mvit class token": of_family(
        MultiScaleVit,
        "member",
        (64, 64),
        cfg=replace(MVIT, depths=(2, 1, 3, 1), use_cls_token=True, expand_attn=False),
        img_size=64,
    ),
    "caformer": of_family(metaformer.MetaFormer, "maps", (64, 96), **STAGES, **MIXERS),
    "caformer, no scales": of_family(
        metaformer.MetaFormer, "maps", (64, 96), **STAGES, **MIXERS, res_scale_init_values=(None,) * 4
    ),
    "focalnet": of_family(FocalNet, "maps", (64, 96), **STAGES, embed_dim=8),
    "focalnet post norm": of_family(FocalNet, "member", (64, 96), **STAGES, **POST_NORM, embed_dim=8),
    "mambaout": of_family("mambaout_tiny", "maps", (64, 96), **STAGES, dims=(8, 12, 16, 20)),
    "edgenext": of_family("edgenext_small", "maps", (64, 96), **EDGENEXT),
    "edgenext, own activation": of_family("edgenext_small", "maps", (64, 96), **EDGENEXT, act_layer=nn.Mish),
    "edgenext without layers between stages": of_family("edgenext_small_rw", "member", (64, 96), **EDGENEXT),
}

MODELS: dict[str, Tiny] = {
    **LEAN, **TORCHVISION, **TRANSFORMERS, **{name: member(name, **sizes) for name, sizes in MEMBERS.items()},
    **TOKENS, **HYBRIDS, **POINTWISE, **TRANSFORMERS_POINTWISE, **WINDOWS, **VITS, **PYRAMIDS,
    **{f"transformers {cls}": sibling(cls, **sizes) for cls, sizes in SIBLINGS.items()},
}  # fmt: skip
