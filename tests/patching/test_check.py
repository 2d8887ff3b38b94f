"""check: passes what is right, finds what is wrong, leaves the model alone."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

import torchsbp
from torchsbp import SBPConfig
from torchsbp.adapters import queries
from torchsbp.patching import replay
from torchsbp.patching.check import Gate, gradient_errors, install_gate

from ..models import LEAN, MODELS, TOKENS, images
from ..steps import step


@pytest.mark.parametrize("name", TOKENS)
def test_blocks_that_run_again_pass(name):
    model = TOKENS[name].model(drop_path=0.5)
    found = torchsbp.check(torchsbp.apply(model, keep_ratio=0.5, per_sample=True), TOKENS[name].images())
    assert found.passed
    assert found.forward <= 1e-14
    assert found.gradient <= 1e-12


@pytest.mark.parametrize("options", [{}, {"scope": "block", "recompute": False}], ids=str)
@pytest.mark.parametrize("name", LEAN)
def test_lean_blocks_pass(name, options):
    assert torchsbp.check(torchsbp.apply(LEAN[name].model(), keep_ratio=0.5, **options), images()).passed


def test_a_block_without_drop_path_and_a_model_in_a_model_pass():
    tiny = MODELS["torchvision vit"]
    assert torchsbp.check(torchsbp.apply(nn.Sequential(tiny.model(), nn.Tanh()), 0.5), tiny.images()).passed


def test_a_model_that_was_wrapped_after_it_was_patched_passes():
    assert torchsbp.check(nn.Sequential(torchsbp.apply(LEAN["vit"].model(), 0.5)), images()).passed


def test_a_missing_gradient_is_found(monkeypatch):
    def forgetful(m, x, everything, positions, **masks):
        return queries.attend(m, x, *queries.projections(m, x, everything.detach()))

    monkeypatch.setitem(queries.KEPT_QUERY_ATTENTION, "timm.layers.attention.Attention", forgetful)
    model = torchsbp.apply(TOKENS["vit, own norm"].model(), keep_ratio=0.5)
    found = torchsbp.check(model, TOKENS["vit, own norm"].images())
    assert not found.passed
    assert found.forward == 0
    assert found.gradient > 1e-3
    assert found.worst in dict(model.named_parameters())


def test_a_changed_forward_is_found(monkeypatch):
    model, run = torchsbp.apply(TOKENS["eva02, own norm"].model(), keep_ratio=0.5), replay.Residual.run
    monkeypatch.setattr(replay.Residual, "run", lambda *args, **kwargs: run(*args, **kwargs) * (1 + 1e-6))
    assert 1e-8 < torchsbp.check(model, TOKENS["eva02, own norm"].images()).forward < 1e-4


def test_gradients_are_compared_with_zeros_where_one_has_none_and_nan_is_an_error():
    one = torch.ones(4)
    errors = gradient_errors({"a": one, "b": one, "d": one * torch.nan}, {"a": one, "c": one, "d": one})
    assert errors["a"] == 0
    torch.testing.assert_close(errors["b"].item(), 1e4, rtol=1e-6, atol=0)
    torch.testing.assert_close(errors["c"].item(), 1 / (1 + 1e-4), rtol=1e-6, atol=0)
    assert errors["d"].isnan()


def test_the_model_and_the_random_numbers_are_left_alone():
    model = torchsbp.apply(LEAN["vit layer scale, drop path"].model().float(), keep_ratio=0.5)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    torchsbp.check(model, images().float())
    assert torch.rand(1) == expected
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(p.grad is None and p.dtype == torch.float32 for p in model.parameters())
    assert not any(m._forward_hooks for m in model.modules())
    step(model, images().float())


@pytest.mark.parametrize(
    "options, message",
    [
        ({"attention": "qkv"}, r"attention='query' with scale='none' or 'rows', found attention='qkv' with"),
        ({"scale": "weight"}, r"found attention='query' with scale='weight'; call torchsbp.remove\(model\), then"),
    ],
    ids=str,
)
def test_what_it_does_not_know_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        torchsbp.check(torchsbp.apply(LEAN["vit"].model(), **options), images())


def test_a_model_that_is_not_patched_or_not_training_is_refused():
    with pytest.raises(ValueError, match="the model is not patched"):
        torchsbp.check(LEAN["vit"].model(), images())
    with pytest.raises(RuntimeError, match="no forward has run in training mode"):
        torchsbp.check(torchsbp.apply(LEAN["vit"].model()).eval(), images())


def test_a_layout_that_can_be_read_twice_is_refused():
    gate = Gate(torch.tensor([[0]]), (4, 4), 0)
    with pytest.raises(ValueError, match=r"shape \(1, 4, 4, 4\) fits the grid \(4, 4\) as channels first and last"):
        gate(torch.randn(1, 4, 4, 4))
    with pytest.raises(ValueError, match=r"shape \(1, 4, 5, 6\) fits the grid \(4, 4\) as neither tokens nor a"):
        gate(torch.randn(1, 4, 5, 6))


@pytest.mark.parametrize("shape", [(1, 6, 5), (1, 2, 3, 5), (1, 5, 2, 3)], ids=str)
def test_the_gate_lets_kept_positions_through_and_sends_the_rest_past(shape):
    y, past = (torch.randn(shape, requires_grad=True) for _ in range(2))
    out = Gate(torch.tensor([[1, 4]]), (2, 3), 0)(y, past)
    assert torch.equal(out, y)
    out.sum().backward()
    kept = torch.tensor([0, 1, 0, 0, 1, 0.0])
    rows = y.grad if shape[-1] == 5 else y.grad.movedim(1, -1)
    assert torch.equal(rows.reshape(6, 5), kept[:, None].expand(6, 5))
    assert torch.equal(past.grad, 1 - y.grad)


class Ended(nn.Module):
    """``last(shortcut(x) + response(f(x)))`` with linear parts, each of which multiplies."""

    def __init__(self) -> None:
        super().__init__()
        self.shortcut, self.f, self.response, self.last = (nn.Linear(1, 1, bias=False) for _ in range(4))
        for layer, weight in zip(self.children(), (2, 3, 5, 7), strict=True):
            nn.init.constant_(layer.weight, weight)

    def forward(self, x):
        return self.last(self.shortcut(x) + self.response(self.f(x)))


@pytest.mark.parametrize("scale, counts", [("none", 1), ("rows", 2)])
def test_parts_name_the_shortcut_what_is_last_and_a_norm_over_positions(scale, counts):
    block, x = Ended(), torch.ones(1, 2, 1, requires_grad=True)
    names = SimpleNamespace(shortcut="shortcut", last="last", response="response")
    install_gate(block, Gate(torch.tensor([[0]]), (1, 2), 0), names, SBPConfig(scale=scale))
    block(x).sum().backward()
    assert x.grad.flatten().tolist() == [7 * (2 + counts * 15), 7 * 2]
    assert block.f.weight.grad.item() == 7 * counts * 5  # of the kept position
    assert block.last.weight.grad.item() == 2 * 17  # of both


def test_a_list_is_gated_at_its_last_member():
    chain, x = nn.ModuleList([nn.Identity(), nn.Linear(1, 3, bias=False)]), torch.ones(1, 2, 1, requires_grad=True)
    install_gate(chain, Gate(torch.tensor([[1]]), (1, 2), 0), SimpleNamespace(), SBPConfig(scale="none"))
    chain[1](chain[0](x)).sum().backward()
    assert x.grad.flatten().tolist() == [0, chain[1].weight.sum().item()]
