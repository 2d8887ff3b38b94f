"""Double backward: refused in our words, whether the cotangent is constant or not."""

import pytest
import timm
import torch
from torch import nn

import torchsbp
from torchsbp.errors import UsageError
from torchsbp.ops.gate import gate

from ..models import MODELS

REFUSED = r"made with create_graph=True and is now differentiated again .* Call torchsbp.remove\(model\)"


@pytest.mark.parametrize("name", ["vit", "convnext", "convnext v2", "mixer"])
@pytest.mark.parametrize("recompute", [True, False])
@pytest.mark.parametrize("of", [lambda y: y.sum(), lambda y: y.square().sum()], ids=["constant", "not constant"])
def test_a_penalty_on_a_gradient_is_refused(name, recompute, of):
    tiny = MODELS[name]
    model = torchsbp.apply(tiny.bare(), blocks=1.0, recompute=recompute)
    x = tiny.images(2).requires_grad_()
    (gradient,) = torch.autograd.grad(of(model(x)), x, create_graph=True)
    with pytest.raises(UsageError, match=REFUSED):
        gradient.square().sum().backward()


def test_the_gate_alone_is_refused_too():
    x = torch.randn(2, 6, 4, requires_grad=True)
    (gradient,) = torch.autograd.grad(gate(x, torch.tensor([0, 7])).sum(), x, create_graph=True)
    assert gradient.sum() == 8
    with pytest.raises(UsageError, match=REFUSED):
        gradient.sum().backward()


def test_gradients_of_a_graph_that_nobody_differentiates_are_the_same():
    model = torchsbp.apply(timm.create_model("test_vit"), blocks=1.0)
    images, found = torch.randn(2, 3, 160, 160), []
    for create_graph in (False, True):
        torchsbp.set_step(model, 0)
        weights = list(model.blocks.parameters())
        found.append(torch.autograd.grad(model(images).sum(), weights, create_graph=create_graph))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_a_penalty_on_what_comes_behind_the_blocks_is_allowed():
    model = torchsbp.apply(timm.create_model("test_vit"), blocks=1.0)
    weight: nn.Parameter = model.head.weight
    (gradient,) = torch.autograd.grad(model(torch.randn(2, 3, 160, 160)).square().sum(), weight, create_graph=True)
    gradient.square().sum().backward()
    assert weight.grad.abs().sum() > 0
