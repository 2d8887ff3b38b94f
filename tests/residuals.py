"""Tiny models whose blocks are run again on kept rows, and their oracle: the library's own forward, gated by hooks."""

import inspect
from functools import partial

import timm
import torch
from timm.layers import GatedMlp, SwiGLU, SwiGLUPacked
from timm.models import mlp_mixer
from timm.models import vision_transformer as vit
from timm.models.eva import Eva
from torch import nn

from torchsbp import SBPConfig
from torchsbp.ops.reference import gate

from .families import check_gated
from .oracle import rows_of

EVA = inspect.signature(Eva).parameters  # newer releases of timm have more options
GROUPED = {"num_kv_heads": 1} if "num_kv_heads" in EVA else {}
NORMED = {"qk_norm": True} if "qk_norm" in EVA else {}
SIZES = {"depth": 3, "embed_dim": 24, "num_heads": 3, "img_size": (32, 48), "patch_size": 8, "num_classes": 5}


def tiny(name: str, **options: object):
    """A function that builds the model of that name, small."""
    return partial(timm.create_model, name, **SIZES | options)


def tiny_mixer(**options: object):
    sizes = {"num_blocks": 3, "embed_dim": 24, "img_size": 32, "patch_size": 8, "num_classes": 5}
    return partial(mlp_mixer.MlpMixer, **sizes | options)


MODELS = {
    "swiglu": tiny("vit_tiny_patch16_224", mlp_layer=SwiGLU, init_values=0.5),
    "packed swiglu": tiny("vit_tiny_patch16_224", mlp_layer=SwiGLUPacked, scale_attn_norm=True, scale_mlp_norm=True),
    "differential attention": tiny("vit_tiny_patch16_224", attn_layer="diff", qk_norm=True, embed_dim=48),
    "parallel": tiny("vit_tiny_patch16_224", block_fn=vit.ParallelThingsBlock, init_values=0.5),
    "one piece": tiny("vit_tiny_patch16_224", block_fn=vit.ParallelScalingBlock, qk_norm=True),
    "post norm": tiny("vit_tiny_patch16_224", block_fn=vit.ResPostBlock, init_values=0.5),
    "eva": tiny("eva_giant_patch14_224"),
    "eva02": tiny("eva02_tiny_patch14_224"),
    "eva post norm": tiny("eva_giant_patch14_224", use_post_norm=True, use_rot_pos_emb=True, scale_attn_inner=True),
    "dinov3": tiny("vit_small_patch16_dinov3", init_values=0.5),
    "dinov3 split qkv": tiny("vit_small_plus_patch16_dinov3", qkv_fused=False, attn_type="rope", **GROUPED),
    "mixed rope": tiny("vit_small_patch16_rope_mixed_224", init_values=0.5),
    "gated rope": tiny("vit_small_patch16_rope_ape_224", attn_type="rope", **NORMED),
    "beit": tiny("beitv2_base_patch16_224", init_values=0.5),
    "beit shared bias": tiny(
        "beit_base_patch16_224", init_values=None, use_rel_pos_bias=True, use_shared_rel_pos_bias=True
    ),
    "relative": tiny("vit_relpos_small_patch16_224", init_values=0.5),
    "relative class token": tiny("vit_relpos_base_patch16_clsgap_224", qk_norm=True, rel_pos_type="bias"),
    "relative post norm": tiny("vit_relpos_small_patch16_rpn_224"),
    "shared relative": tiny("vit_srelpos_small_patch16_224", init_values=0.5),
    "mixer": tiny_mixer(),
    "resmlp": tiny_mixer(block_layer=mlp_mixer.ResBlock, mlp_ratio=4, norm_layer=mlp_mixer.Affine),
    "gmlp": tiny_mixer(block_layer=mlp_mixer.SpatialGatingBlock, mlp_ratio=4, mlp_layer=GatedMlp),
}
# PyTorch takes another attention kernel where it need not differentiate a bias: forward is equal to rounding.
LEARNED_BIAS = ("beit", "beit shared bias", "relative", "relative class token", "relative post norm", "shared relative")


class LearnedRope(nn.Module):
    """The embedding that mixed frequencies give at first, learned as it is: timm computes theirs in float32 only."""

    def __init__(self, rope: nn.Module) -> None:
        super().__init__()
        self.embedding = nn.Parameter(rope.get_embed().detach())

    def get_embed(self) -> torch.Tensor:
        return self.embedding


def model_of(name: str, **options: object) -> nn.Module:
    torch.manual_seed(0)
    model = MODELS[name](**options)
    if getattr(model, "rope_mixed", False):
        model.rope = LearnedRope(model.rope)
    model.double().train()
    with torch.no_grad():
        for p in model.parameters():  # nothing at its initial zero or 1e-6, where errors would hide
            p.add_(torch.randn_like(p) * 0.1)
    return model


def images_for(model: nn.Module, batch: int = 3) -> torch.Tensor:
    embed = getattr(model, "patch_embed", None) or model.stem
    return torch.randn(batch, 3, *embed.img_size, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def install(model: nn.Module, kept: dict[str, torch.Tensor], scope: str) -> None:
    """Gate the end of every branch of the sampled blocks, or in scope "block" their output."""
    for name, positions in kept.items():
        block = model.get_submodule(name)
        branches = [m for path, m in block.named_modules() if path.rpartition(".")[2].startswith("drop_path")]
        assert branches
        for module in branches if scope == "branch" else [block]:
            module.register_forward_hook(lambda m, x, y, p=positions: gate(y, rows_of(p, y.shape[1])))


def check_against_oracle(model: nn.Module, config: SBPConfig, x: torch.Tensor) -> None:
    _, gradients = check_gated(model, config, x, partial(install, scope=config.scope))
    assert gradients.keys() == {name for name, p in model.named_parameters() if p.requires_grad}
