"""Backward belongs to the forward that was: what is called between the two does not change it."""

import pytest
import torch

import torchsbp

from ..models import MODELS
from ..steps import gradients_of, loss_of, step


@pytest.mark.parametrize("ratio", [1.0, 0.5])
@pytest.mark.parametrize("recompute", [True, False])
@pytest.mark.parametrize(
    "name", ["swin CR", "swin CR, padded, norms", "eva", "eva02", "convnext v2", "coatnet", "swin", "vit", "convnext"]
)
def test_eval_between_forward_and_backward_changes_no_gradient(name, ratio, recompute):
    tiny = MODELS[name]
    model = torchsbp.apply(tiny.model(drop_path=0.5), keep_ratio=ratio, recompute=recompute)
    x = tiny.images()
    _, expected = step(model, x)
    expected = {name: g.clone() for name, g in expected.items()}
    torchsbp.set_step(model, 0)
    model.zero_grad()
    torch.manual_seed(2)
    y = model(x)
    model.eval()
    loss_of(y).backward()
    found = gradients_of(model)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], g) for name, g in expected.items())
    assert not any(module.training for module in model.modules())


@pytest.mark.parametrize("name", ["swin CR", "eva02", "convnext v2", "vit"])
def test_a_forward_in_eval_mode_between_forward_and_backward_changes_no_gradient(name):
    """As a validation inside of gradient accumulation does."""
    tiny = MODELS[name]
    model = torchsbp.apply(tiny.model(drop_path=0.5), keep_ratio=0.5)
    x = tiny.images()
    expected = {name: g.clone() for name, g in step(model, x)[1].items()}
    torchsbp.set_step(model, 0)
    model.zero_grad()
    torch.manual_seed(2)
    y = model(x)
    with torch.no_grad():
        model.eval()(x + 1)
    model.train()
    loss_of(y).backward()
    assert all(torch.equal(gradients_of(model)[name], g) for name, g in expected.items())
