"""The issue's models at full size: forward in float32, gradients in float64 against the oracle."""

import copy

import pytest
import timm
import torch
import torchvision

import torchsbp
from torchsbp import SBPConfig

from .oracle import check_rule

RATIOS = (1.0, 0.75, 0.5, 0.25, 0.1)
MODELS = {
    "vit_tiny": lambda: timm.create_model("vit_tiny_patch16_224"),
    "vit_base": lambda: timm.create_model("vit_base_patch16_224"),
    "convnext_tiny": lambda: timm.create_model("convnext_tiny", drop_path_rate=0.1),
    "torchvision convnext_tiny": lambda: torchvision.models.convnext_tiny(),
}


def build(name: str) -> torch.nn.Module:
    torch.manual_seed(0)
    return MODELS[name]().train()


@pytest.mark.parametrize("name", MODELS)
def test_forward_is_exact(name):
    plain = build(name)
    model = torchsbp.apply(copy.deepcopy(plain), keep_ratio=0.5)
    x = torch.randn(2, 3, 224, 224)
    torch.manual_seed(1)
    expected = plain(x)
    torch.manual_seed(1)
    assert (model(x) - expected).abs().max() == 0


CASES = [(name, rule) for name in MODELS for rule in (["query", "qkv", "head"] if "vit" in name else ["query"])]


@pytest.mark.slow
@pytest.mark.parametrize("ratio", RATIOS)
@pytest.mark.parametrize("name, rule", CASES)
def test_gradients_equal_the_oracle(name, rule, ratio):
    x = torch.randn(1, 3, 224, 224, dtype=torch.float64)
    check_rule(build(name).double(), SBPConfig(keep_ratio=ratio, attention=rule), x)
