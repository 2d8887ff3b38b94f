import pytest
import torch
from torch import nn

import torchsbp
from torchsbp.study.models import MODELS, build
from torchsbp.study.optimizer import Muon, optimizers, orthogonal


def test_orthogonal_has_singular_values_around_one_and_the_same_directions():
    torch.manual_seed(0)
    for shape in ((3, 24, 16), (2, 16, 40)):
        x = torch.randn(shape)
        found, (u, _, v) = orthogonal(x), torch.linalg.svd(x, full_matrices=False)
        inner = u.mT @ found @ v.mT
        values = inner.diagonal(dim1=-2, dim2=-1)
        assert 0.6 < values.min() < values.max() < 1.3
        assert (inner - torch.diag_embed(values)).abs().max() < 0.05  # rounding of bfloat16


def test_steps_are_those_of_pytorch():
    """A rate that changes, weight decay, two shapes, one of them twice; convolutions are matrices."""
    torch.manual_seed(0)
    ours = [nn.Parameter(torch.randn(shape)) for shape in ((24, 16), (24, 16), (8, 4, 3, 3))]
    theirs = [nn.Parameter(its.detach().flatten(1).clone()) for its in ours]
    rate = torch.zeros(())
    muon = Muon(ours, rate, 0.1)
    expected = torch.optim.Muon(theirs, 1.0, 0.1, 0.95, nesterov=True, adjust_lr_fn="match_rms_adamw")
    for value in (0.1, 0.02, 0.05):
        expected.param_groups[0]["lr"] = value
        for a, b in zip(ours, theirs, strict=True):
            a.grad = torch.randn_like(a)
            b.grad = a.grad.flatten(1)
        before = [its.detach().clone() for its in theirs]
        rate.fill_(value)
        muon.step()
        expected.step()
        for a, b, old in zip(ours, theirs, before, strict=True):
            assert (a.flatten(1) - b).norm() < 1e-3 * (b - old).norm()
            b.data.copy_(a.data.flatten(1))


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("patched", [False, True])
def test_every_parameter_is_of_one_optimizer(name, patched):
    model = build(name, "toy", 32, 10, drop_path_rate=0.0)
    if patched and name != "video":
        torchsbp.apply(model)
    adamw, muon = optimizers("muon", model, torch.zeros(()), 0.1)
    found = [[its for group in each.param_groups for its in group["params"]] for each in (adamw, muon)]
    assert sorted(map(id, found[0] + found[1])) == sorted(map(id, model.parameters()))
    names = {id(its): name for name, its in model.named_parameters()}
    chosen = {names[id(its)] for its in found[1]}
    assert all(its.dim() > 1 for its in found[1])
    assert not any(word in its for its in chosen for word in ("head", "conv_dw", "table", "pos_embed", "token"))
    assert sum(its.numel() for its in found[1]) > 0.6 * sum(its.numel() for its in model.parameters())
    assert len(optimizers("adamw", model, torch.zeros(()), 0.1)) == 1
