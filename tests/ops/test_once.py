"""Double backward: refused in our words, whether the cotangent is constant or not."""

import pytest
import timm
import torch
from torch import nn

import torchsbp
from torchsbp.errors import UsageError
from torchsbp.ops.frames import encode_frames
from torchsbp.ops.gate import gate

from ..models import MODELS

REFUSED = r"made with create_graph=True and is now differentiated again .* Call torchsbp.remove\(model\)"


KINDS = {
    "lean": "vit",
    "lean, with down-sampling": "convnext",
    "run again on tokens": "eva02, own norm",
    "run again, a bias from outside": "beit shared bias, own norm",
    "run again, without attention": "mixer",
    "run again on maps": "coatnet",
    "lean, a bias from outside": "beit shared bias",
    "lean, in windows": "swin",
    "lean, a norm behind": "swin CR",
    "windowed": "swin, own norm",
    "windowed, a norm behind": "swin CR, own norm",
    "pointwise": "convnext v2",
    "patches": "convnext patches of 2",
}
COTANGENTS = {"constant": lambda y: y.sum(), "not constant": lambda y: y.square().sum()}


@pytest.mark.parametrize("recompute", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_a_penalty_on_a_gradient_is_refused(kind, recompute):
    """Of the images, and of every weight in sampled blocks but for a norm that is applied behind them."""
    tiny = MODELS[KINDS[kind]]
    model = torchsbp.apply(tiny.model(), 0.5, blocks=1.0, recompute=recompute)
    for loss_of in COTANGENTS.values():
        x = tiny.images().requires_grad_()
        loss = loss_of(model(x))
        sites = tuple(f"{site}." for site in torchsbp.kept(model))
        weights = [p for name, p in model.named_parameters() if name.startswith(sites) and ".norm3." not in name]
        for gradient in torch.autograd.grad(loss, [x, *weights], create_graph=True):
            with pytest.raises(UsageError, match=REFUSED):
                gradient.square().sum().backward(retain_graph=True)


@pytest.mark.parametrize("kind", KINDS)
def test_a_product_with_the_jacobian_is_refused(kind):
    """PyTorch takes it as the derivative of a backward pass for its cotangent: without an error it would be zero."""
    tiny = MODELS[KINDS[kind]]
    x, model = tiny.images(), torchsbp.apply(tiny.model(), 0.5, blocks=1.0)
    with pytest.raises(UsageError, match=REFUSED):
        torch.autograd.functional.jvp(model, x, x)


def test_the_gate_alone_is_refused_too():
    x = torch.randn(2, 6, 4, requires_grad=True)
    (gradient,) = torch.autograd.grad(gate(x, torch.tensor([0, 7])).sum(), x, create_graph=True)
    assert gradient.sum() == 8
    with pytest.raises(UsageError, match=REFUSED):
        gradient.sum().backward()


@pytest.mark.parametrize("loss_of", COTANGENTS.values(), ids=COTANGENTS)
def test_frames_of_a_patched_encoder_are_refused_too(loss_of):
    tiny = MODELS["eva02, own norm"]
    encoder = torchsbp.apply(tiny.model(), 0.5, blocks=1.0, recompute=False)
    video = tiny.images(6).unflatten(0, (2, 3)).requires_grad_()
    loss = loss_of(torchsbp.sbp_frames(encoder, video, step=0))
    (gradient,) = torch.autograd.grad(loss, video, create_graph=True)
    with pytest.raises(UsageError, match=REFUSED):
        gradient.square().sum().backward()


@pytest.mark.parametrize("loss_of", COTANGENTS.values(), ids=COTANGENTS)
def test_frames_and_positions_of_plain_functions_have_the_second_derivative_of_their_definition(loss_of):
    """They are autograd's own operations: a penalty sees kept frames, the others are constants."""
    encoder = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    video, keep = torch.randn(2, 6, 4, dtype=torch.float64, requires_grad=True), torch.tensor([1, 4])
    dropped = [0, 2, 3, 5]

    def definition() -> torch.Tensor:
        y = encoder(video)
        return y.index_copy(1, torch.tensor(dropped), y[:, dropped].detach())

    found = []
    for encoded in (
        definition(),
        encode_frames(encoder, video, keep),
        torchsbp.sbp(encoder, video, keep),
        torchsbp.sbp(encoder, video, keep, recompute=True),
    ):
        (gradient,) = torch.autograd.grad(loss_of(encoded), video, create_graph=True)
        found.append(torch.autograd.grad(gradient.square().sum(), [video, *encoder.parameters()], allow_unused=True))
    for other in found[1:]:
        for a, b in zip(found[0], other, strict=True):
            assert (a is None) == (b is None)
            assert a is None or torch.allclose(a, b, rtol=1e-12)


def test_gradients_of_a_graph_that_nobody_differentiates_are_the_same():
    model = torchsbp.apply(timm.create_model("test_vit"), 0.5, blocks=1.0)
    images, found = torch.randn(2, 3, 160, 160), []
    for create_graph in (False, True):
        torchsbp.set_step(model, 0)
        weights = list(model.blocks.parameters())
        found.append(torch.autograd.grad(model(images).sum(), weights, create_graph=create_graph))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_a_penalty_on_what_comes_behind_the_blocks_is_allowed():
    model = torchsbp.apply(timm.create_model("test_vit"), 0.5, blocks=1.0)
    weight: nn.Parameter = model.head.weight
    (gradient,) = torch.autograd.grad(model(torch.randn(2, 3, 160, 160)).square().sum(), weight, create_graph=True)
    gradient.square().sum().backward()
    assert weight.grad.abs().sum() > 0
