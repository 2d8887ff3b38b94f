"""The named members of supported families: patched, forward exact, gradients equal the oracle."""

import pytest
import timm
import torch
import torchvision

import torchsbp
from torchsbp import SBPConfig

from .families import check_against_oracle

MEMBERS = {
    "deit_tiny_patch16_224": {"img_size": 64, "depth": 2},
    "deit_tiny_distilled_patch16_224": {"img_size": 64, "depth": 2},
    "deit3_small_patch16_224": {"img_size": 64, "depth": 2},
    "vit_small_patch14_dinov2": {"img_size": 56, "depth": 2},
    "vit_small_patch14_reg4_dinov2": {"img_size": 56, "depth": 2},
    "vit_base_patch32_clip_224": {"img_size": 128, "depth": 2, "embed_dim": 96, "num_heads": 3},
    "vit_base_patch32_clip_quickgelu_224": {"img_size": 128, "depth": 2, "embed_dim": 96, "num_heads": 3},
    "vit_base_patch16_siglip_224": {"img_size": 64, "depth": 2, "embed_dim": 96, "num_heads": 3},
    "vit_tiny_r_s16_p8_224": {"img_size": 64, "depth": 2},
    "vit_wee_patch16_reg1_gap_256": {"img_size": 64, "depth": 2},
    "convnext_atto": {"depths": (1, 1, 3, 1)},
    "convnext_tiny_hnf": {"depths": (1, 1, 3, 1), "dims": (16, 24, 32, 48)},
}


@pytest.mark.parametrize("name", MEMBERS)
def test_member_of_the_family(name):
    torch.manual_seed(0)
    model = timm.create_model(name, num_classes=5, **MEMBERS[name]).double().train()
    options = MEMBERS[name]
    size = options.get("img_size", 64)
    x = torch.randn(2, 3, size, size, dtype=torch.float64)
    check_against_oracle(model, SBPConfig(keep_ratio=0.5), x)


def torchvision_vit(**options):
    torch.manual_seed(0)
    sizes = {"image_size": 64, "patch_size": 16, "num_layers": 3, "num_heads": 3, "hidden_dim": 24, "mlp_dim": 48}
    model = torchvision.models.VisionTransformer(**sizes, num_classes=5, **options).double().train()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p) * 0.1)
    return model, torch.randn(2, 3, 64, 64, dtype=torch.float64)


@pytest.mark.parametrize("ratio", [1.0, 0.5, 0.25])
@pytest.mark.parametrize("rule", ["query", "qkv", "head"])
@pytest.mark.parametrize("scope", ["branch", "block"])
def test_torchvision_vit(rule, ratio, scope):
    """Attention is ``nn.MultiheadAttention``: one packed projection, a parameter of the module itself."""
    model, x = torchvision_vit()
    check_against_oracle(model, SBPConfig(keep_ratio=ratio, attention=rule, scope=scope), x)


def test_torchvision_vit_keeps_its_class_token_and_refuses_dropout():
    model, x = torchvision_vit()
    torchsbp.apply(model, keep_ratio=0.5)
    model(x)
    kept = torchsbp.kept(model)
    assert list(kept) == ["encoder.layers.encoder_layer_1", "encoder.layers.encoder_layer_2"]
    assert all(positions.shape == (2, 9) and (positions[:, 0] == 0).all() for positions in kept.values())
    message = r"self_attention.dropout is 0.1, which is not supported"
    with pytest.raises(ValueError, match=message):
        torchsbp.apply(torchvision_vit(attention_dropout=0.1)[0])
