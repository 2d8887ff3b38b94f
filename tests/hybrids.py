"""Tiny models that mix attention and convolution, or rows by a norm, and their oracle: the library's own, by hooks."""

from functools import partial

import timm
import torch
from torch import nn

from torchsbp import SBPConfig
from torchsbp.ops.reference import gate

from .families import check_gated
from .oracle import gate_map, rows_of

SIZES = {"img_size": (64, 96), "depths": (1, 1, 3, 1), "embed_dim": (16, 16, 32, 32), "stem_width": 16}
CONVNEXT = {"depths": (1, 1, 3, 1), "dims": (8, 12, 16, 20)}


def tiny(name: str, **options: object):
    """A function that builds the model of that name, small."""
    hybrid = SIZES | {"transformer_dim_head": 8, "num_classes": 5}
    return partial(timm.create_model, name, **hybrid | options)


def tiny_convnext(name: str, **options: object):
    return partial(timm.create_model, name, **CONVNEXT | {"num_classes": 5} | options)


HYBRIDS = {
    "coatnet": tiny("coatnet_0_rw_224", transformer_init_values=0.5),
    "coatnet relative mlp": tiny("coatnet_rmlp_nano_rw_224"),
    "coatnet mixed stages": tiny("coatnet_nano_cc_224", depths=(1, 1, 3, 2)),
    "coatnet max pool": tiny("coatnet_0_224", transformer_pool_type="max", transformer_head_first=False),
    "coatnext": tiny("coatnext_nano_rw_224", conv_init_values=0.5),
    "maxvit": tiny("maxvit_tiny_rw_224", transformer_init_values=0.5),
    "maxvit tf": tiny("maxvit_tiny_tf_224", head_hidden_size=32),
    "maxvit parallel": tiny("maxvit_tiny_pm_256", transformer_dim_head=4),
    "maxvit channels first": tiny("maxvit_tiny_rw_224", transformer_use_nchw_attn=True),
    "maxxvit relative mlp": tiny("maxxvit_rmlp_nano_rw_256", conv_init_values=0.5),
    "maxxvit v2": tiny("maxxvitv2_nano_rw_256", conv_init_values=0.5, head_hidden_size=None),
}
CONVNEXTS = {
    "v2": tiny_convnext("convnextv2_tiny"),
    "v2 1×1 conv, layer scale": tiny_convnext("convnextv2_atto", ls_init_value=0.5),
    "simple norm": tiny_convnext("convnext_zepto_rms", ls_init_value=0.5),
    "simple norm, overlapping stem": tiny_convnext("convnext_zepto_rms_ols", conv_mlp=False, act_layer="hard_swish"),
    "rms norm": tiny_convnext("convnext_atto_rms"),
    "patches of 2": tiny_convnext("convnext_tiny", patch_size=2),
}
MODELS = HYBRIDS | CONVNEXTS


def model_of(name: str, **options: object) -> nn.Module:
    torch.manual_seed(0)
    model = MODELS[name](**options).double().train()
    with torch.no_grad():
        for p in model.parameters():  # nothing at its initial zero or 1e-6, where errors would hide
            p.add_(torch.randn_like(p) * 0.1)
    return model


def images(batch: int = 2, size: tuple[int, int] = (64, 96)) -> torch.Tensor:
    return torch.randn(batch, 3, *size, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def install(model: nn.Module, kept: dict[str, torch.Tensor], scope: str) -> None:
    """Gate the end of every branch of the sampled modules, or in scope "block" their output, and what a norm sees."""
    for name, positions in kept.items():
        block = model.get_submodule(name)
        parts = dict(block.named_modules())
        for path in parts:
            if path.endswith("grn"):
                parts[path].register_forward_pre_hook(lambda m, x, p=positions: gated(x[0], p, m.channel_dim == -1))
        ends = [m for path, m in parts.items() if path.startswith("drop_path")]
        last = type(block).__name__ in ("PartitionAttentionCl", "ParallelPartitionAttention")
        for module in ends if scope == "branch" and ends else [block]:
            module.register_forward_hook(lambda m, x, y, p=positions, last=last: gated(y, p, last))


def gated(y: torch.Tensor, positions: torch.Tensor, channels_last: bool) -> torch.Tensor:
    return gate(y, rows_of(positions, y[0, ..., 0].numel())) if channels_last else gate_map(y, positions)


def check_against_oracle(model: nn.Module, config: SBPConfig, x: torch.Tensor) -> None:
    plain, _ = check_gated(model, config, x, partial(install, scope=config.scope))
    statistics = dict(plain.named_buffers())
    for name, buffer in model.named_buffers():
        if name in statistics:
            torch.testing.assert_close(buffer, statistics[name], rtol=1e-12, atol=1e-12)
