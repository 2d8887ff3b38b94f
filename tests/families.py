"""Tiny random models of every family, and the checks that the model tests share."""

import copy
import pickle
from dataclasses import dataclass
from typing import Any

import timm
import torch
import torch._dynamo
import torchvision
from torch import nn

import torchsbp
from torchsbp import SBPConfig

from .oracle import install

RATIOS = (1.0, 0.75, 0.5, 0.25, 0.1)


def tiny_vit(**options) -> nn.Module:
    options = {"depth": 3, "embed_dim": 24, "num_heads": 3, "img_size": (64, 96), "num_classes": 5} | options
    return timm.create_model("vit_tiny_patch16_224", **options)


def tiny_convnext(**options) -> nn.Module:
    options = {"depths": (1, 1, 3, 1), "dims": (8, 12, 16, 20), "num_classes": 5} | options
    return timm.create_model("convnext_tiny", **options)


def tiny_torchvision(**options) -> nn.Module:
    config = torchvision.models.convnext.CNBlockConfig
    blocks = [config(8, 12, 1), config(12, 16, 1), config(16, 20, 3), config(20, None, 1)]
    return torchvision.models.ConvNeXt(blocks, num_classes=5, layer_scale=0.5, **options)


@dataclass
class Family:
    """A tiny random model of one library, with what its library can vary."""

    build: object
    options: dict
    attention: bool = False

    def model(self, **options) -> nn.Module:
        torch.manual_seed(0)
        model = self.build(**self.options, **options).double().train()
        with torch.no_grad():
            for p in model.parameters():  # nothing at its initial zero or 1e-6, where errors would hide
                p.add_(torch.randn_like(p) * 0.1)
        return model


FAMILIES = {
    "vit": Family(tiny_vit, {}, attention=True),
    "vit layer scale, drop path": Family(tiny_vit, {"init_values": 0.5, "drop_path_rate": 0.5}, attention=True),
    "vit qk norm, no bias": Family(tiny_vit, {"qk_norm": True, "qkv_bias": False}, attention=True),
    "vit registers, no class token": Family(
        tiny_vit, {"class_token": False, "reg_tokens": 2, "global_pool": "avg"}, attention=True
    ),
    "vit rms norm, quick gelu": Family(tiny_vit, {"norm_layer": "rmsnorm", "act_layer": "quick_gelu"}, attention=True),
    "convnext": Family(tiny_convnext, {"ls_init_value": 0.5}),
    "convnext 1×1 conv, drop path": Family(tiny_convnext, {"conv_mlp": True, "drop_path_rate": 0.5}),
    "convnext no layer scale": Family(tiny_convnext, {"ls_init_value": None}),
    "torchvision convnext": Family(tiny_torchvision, {"stochastic_depth_prob": 0.5}),
}


def images(batch: int = 3) -> torch.Tensor:
    return torch.randn(batch, 3, 64, 96, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def step(model: nn.Module, x: torch.Tensor, run: Any = None) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Output and gradients of one training step, with the same randomness each time; ``run``: the model, compiled."""
    model.zero_grad()
    torch.manual_seed(2)
    y = (model if run is None else run)(x)
    weights = torch.linspace(-1, 1, y.numel(), dtype=y.dtype, device=y.device).view_as(y)
    (y * weights + y.square()).sum().backward()
    return y.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def assert_gradients(ours, theirs, rtol=1e-9) -> None:
    assert ours.keys() == theirs.keys()
    scale = max(g.norm() for g in theirs.values())
    for name, expected in theirs.items():
        error = (ours[name] - expected).norm()
        assert error <= rtol * expected.norm() + 1e-13 * scale, f"{name}: {error:.2e} of {expected.norm():.2e}"


def check_against_oracle(model: nn.Module, config: SBPConfig, x: torch.Tensor) -> None:
    plain = copy.deepcopy(model)
    torchsbp.apply(model, config=config)
    y, gradients = step(model, x)
    kept = torchsbp.kept(model)
    heads = next(m for m in model.modules() if isinstance(m, torchsbp.sites.EntrySite)).sbp.masks.kept_heads[0]
    install(plain, kept, config, heads)
    expected_y, expected = step(plain, x)
    torch.testing.assert_close(y, expected_y, rtol=1e-12, atol=1e-12)
    assert_gradients(gradients, expected)


def check_gated(model: nn.Module, config: SBPConfig, x: torch.Tensor, install: Any) -> tuple[nn.Module, dict]:
    """Patched here, the model has output and gradients of its plain copy gated by ``install(plain, kept)``: that copy,
    and the gradients."""
    plain = copy.deepcopy(model)
    torchsbp.apply(model, config=config)
    y, gradients = step(model, x)
    install(plain, torchsbp.kept(model))
    expected_y, expected = step(plain, x)
    torch.testing.assert_close(y, expected_y, rtol=1e-12, atol=1e-12)
    assert_gradients(gradients, expected)
    return plain, gradients


def check_compiled(eager: nn.Module, x: torch.Tensor, backend: Any, steps: int) -> None:
    """A full graph, new masks in every step, no recompilation; output and gradients are those of the eager model."""
    torch._dynamo.reset()
    model = copy.deepcopy(eager)
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for i in range(steps):
            (y, found), (expected_y, expected) = step(model, x + i, compiled), step(eager, x + i)
            torch.testing.assert_close(y, expected_y, rtol=1e-10, atol=1e-10)
            assert_gradients(found, expected)
    torch._dynamo.reset()


def check_copies(model: nn.Module, x: torch.Tensor) -> None:
    """Copies of a patched model train their own weights, to the same gradients."""
    _, expected = step(model, x)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        torchsbp.set_step(twin, 0)
        model.zero_grad()
        _, found = step(twin, x)
        assert all(p.grad is None for p in model.parameters())
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], g) for name, g in expected.items())


def check_left_as_it_was(plain: nn.Module, x: torch.Tensor, **options: Any) -> None:
    """Patched, the model has its state; under no_grad and in eval mode it computes the same; ``remove`` undoes all."""
    model = copy.deepcopy(plain)
    keys, classes = list(model.state_dict()), [type(m) for m in model.modules()]
    attributes = [set(m.__dict__) for m in model.modules()]
    torchsbp.apply(model, **options)
    assert list(model.state_dict()) == keys
    with torch.no_grad():
        torch.manual_seed(2)
        expected_y = plain(x)
        torch.manual_seed(2)
        assert torch.equal(model(x), expected_y)
    (y, gradients), (expected_y, expected) = step(model.eval(), x), step(plain.eval(), x)
    assert torch.equal(y, expected_y)
    assert all(torch.equal(gradients[name], g) for name, g in expected.items())
    assert entry_of(model).sbp_step == 0
    step(model.train(), x)
    torchsbp.remove(model)
    assert [type(m) for m in model.modules()] == classes
    assert [set(m.__dict__) for m in model.modules()] == attributes


def entry_of(model: nn.Module) -> nn.Module:
    return next(m for m in model.modules() if isinstance(m, torchsbp.sites.EntrySite))
