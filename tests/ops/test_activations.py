import pytest
import timm.layers
import torch
import transformers.activations
from torch import nn

from torchsbp.ops import reference
from torchsbp.ops.activations import ACTIVATIONS, GATED, Activation, activate, activation_named, activation_of
from torchsbp.ops.mlp import MLPSpec, mlp_branch

from .helpers import assert_same_gradients, gradients, kept_rows, mlp_params

SOFTSIGN = Activation(
    "softsign",
    lambda x: x / (1 + x.abs()),
    lambda dy, x: dy / (1 + x.abs()).square(),
    ("torch.nn.modules.activation.Softsign",),
)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_backward_is_that_of_autograd(name):
    torch.manual_seed(0)
    x, dy = torch.randn(2, 50, dtype=torch.float64) * 2
    x.requires_grad_()
    activation = ACTIVATIONS[name]
    assert activation.name == name
    (expected,) = torch.autograd.grad(activation.forward(x), x, dy)
    torch.testing.assert_close(activation.backward(dy, x.detach()), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", [*ACTIVATIONS, *(GATED + name for name in ACTIVATIONS)])
def test_in_little_memory_it_has_the_same_bits(name, dtype):
    torch.manual_seed(0)
    x = (torch.randn(70, 48) * 2).to(dtype)
    expected, before = activation_named(name).forward(x), x.clone()
    assert torch.equal(activate(x, name, overwrite=False), expected)
    assert torch.equal(x, before)
    y = activate(x, name, overwrite=True)
    assert torch.equal(y, expected)
    assert name.startswith(GATED) or y.data_ptr() == x.data_ptr()


@pytest.mark.parametrize(
    "module, name",
    [
        (nn.GELU(), "gelu"),
        (nn.GELU("tanh"), "gelu_tanh"),
        (nn.SiLU(), "silu"),
        (nn.ReLU(), "relu"),
        (timm.layers.GELU(), "gelu"),
        (timm.layers.GELUTanh(), "gelu_tanh"),
        (timm.layers.QuickGELU(), "quick_gelu"),
        (transformers.activations.GELUActivation(), "gelu"),
        (transformers.activations.GELUTanh(), "gelu_tanh"),
        (transformers.activations.QuickGELUActivation(), "quick_gelu"),
        (transformers.activations.SiLUActivation(), "silu"),
        (nn.Tanh(), None),
        (nn.Identity(), None),
    ],
    ids=str,
)
def test_modules_are_known_by_class_and_compute_what_is_said(module, name):
    assert activation_of(module) == name
    if name is not None:
        x = torch.linspace(-4, 4, 33, dtype=torch.float64)
        torch.testing.assert_close(module(x), ACTIVATIONS[name].forward(x), rtol=1e-12, atol=1e-12)


def test_one_more_activation_is_one_entry(monkeypatch):
    monkeypatch.setitem(ACTIVATIONS, "softsign", SOFTSIGN)
    assert activation_of(nn.Softsign()) == "softsign"
    torch.manual_seed(0)
    x = torch.randn(2, 6, 4, dtype=torch.float64, requires_grad=True)
    p, rows, spec, dy = mlp_params(4, 8), kept_rows(2, 6, 0.5), MLPSpec(act="softsign"), torch.randn_like(x)
    ours, theirs = mlp_branch(x, rows, p, spec), reference.mlp_branch(x, rows, p, spec)
    assert_same_gradients(gradients(ours, dy, (x, *p)), gradients(theirs, dy, (x, *p)))
