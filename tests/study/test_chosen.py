"""Rows chosen in backward: which, how often they count, what that makes of gradients, and that these are unbiased."""

import copy
from itertools import product

import pytest
import torch
import torch.nn.functional as F

import torchsbp
from torchsbp.ops.chosen import probabilities
from torchsbp.study.chosen import apply_chosen, drawn, even, largest, weighed
from torchsbp.study.models import build


def random():
    return torch.Generator().manual_seed(0)


def pair(name, image=32, **options):
    """A toy as it is, and one whose rows are chosen in backward."""
    torch.manual_seed(0)
    plain = build(name, "toy", image, 2, drop_path_rate=0.0).double().train()
    chosen = copy.deepcopy(plain)
    return plain, chosen, apply_chosen(chosen, **options)


def batch(size=2, image=32):
    x = torch.randn(size, 3, image, image, generator=random(), dtype=torch.float64)
    return x, torch.arange(size) % 2


def gradients(model, x, targets):
    model.zero_grad()
    F.cross_entropy(model(x), targets).backward()
    return {name: p.grad for name, p in model.named_parameters()}


def cells(p):
    """The stretches of ``start`` that keep the same rows, their widths and middles."""
    cuts = torch.cat([torch.zeros(1), -p.cumsum(1)[0] % 1, torch.ones(1)]).sort().values
    return cuts.diff(), (cuts[1:] + cuts[:-1]) / 2


def test_rows_are_kept_as_often_as_their_probability_says():
    p = probabilities(torch.rand(1, 7, generator=random()), 3)
    widths, starts = cells(p)
    kept = torch.cat([drawn(p, start.view(1, 1)) for start in starts])
    assert torch.allclose(widths @ kept.double(), p, rtol=1e-12)
    assert set(kept.sum(1).tolist()) == {3}


def test_equal_norms_make_any_rows_equally_likely():
    counts = even(torch.rand(6000, 4), 2, random())
    assert set(counts.flatten().tolist()) == {0, 2}
    _, times = torch.unique(counts, dim=0, return_counts=True)
    assert len(times) == 6
    assert float((times - 1000).abs().max()) < 4 * (6000 * 5 / 36) ** 0.5  # standard deviations


def test_every_sample_keeps_as_many_and_the_largest_are_the_largest():
    norms = torch.rand(50, 12, generator=random())
    assert set((weighed(norms, 5, random()) > 0).sum(1).tolist()) == {5}
    assert torch.equal(largest(norms, 3, random()), (norms >= norms.sort(1).values[:, -3:-2]).float())


@pytest.mark.parametrize("name, rows", [("vit", (4, 4)), ("convnext", (4, 16))])
def test_over_all_draws_gradients_are_the_full_ones(name, rows, monkeypatch):
    """Of the upper two of the sampled blocks. Which rows of the lower one are likely follows from the upper's draw."""
    plain, chosen, draw = pair(name, 8, keep_ratio=0.5)
    x, targets = batch(1, 8)
    full, left, widths = gradients(plain, x, targets), [], []
    mean = {parameter: torch.zeros_like(g) for parameter, g in full.items()}

    def choice(norms, k, _):
        if not left:
            return torch.ones_like(norms)
        p = probabilities(norms, k)
        cell = left.pop(0)
        width, start = (its[cell] for its in cells(p))
        widths.append(width)
        return torch.where(drawn(p, start.view(1, 1)), 1 / p, 0)

    monkeypatch.setattr(draw, "choice", choice)
    for path in product(*(range(n + 1) for n in rows)):
        left[:], widths[:] = path, []
        for parameter, g in gradients(chosen, x, targets).items():
            mean[parameter] += widths[0] * widths[1] * g
    assert all(torch.allclose(mean[parameter], g, rtol=1e-9, atol=1e-12) for parameter, g in full.items())


@pytest.mark.parametrize("name", ["vit", "convnext"])
def test_blocks_count_rows_as_the_product_does(name, monkeypatch):
    """With its masks: they have the gradients of ``scale="rows"``."""
    plain, chosen, draw = pair(name, keep_ratio=0.5)
    options = {"sampler": "random", "per_sample": True, "per_block": True, "exact_downsampling": True}
    torchsbp.apply(plain, 0.5, scale="rows", **options)
    expected = gradients(plain, *batch())
    kept = list(torchsbp.kept(plain).values())

    def counts(norms):
        mine = torch.zeros_like(norms).flatten(1)
        n, positions = mine.shape[1] - draw.prefix, kept.pop()
        mine.scatter_(1, positions, n / (positions.shape[1] - draw.prefix))[:, : draw.prefix] = 1
        return mine.view_as(norms)

    monkeypatch.setattr(draw, "counts", counts)
    found = gradients(chosen, *batch())
    assert not kept
    assert all(torch.allclose(found[parameter], g, rtol=1e-9, atol=1e-12) for parameter, g in expected.items())


def test_the_largest_alone_written_out():
    """x + gate(f(x)), where what is kept is known from the cotangent: of the upper block first."""
    plain, chosen, _ = pair("vit", keep_ratio=0.25, by="largest")
    x, targets = batch()
    kept = [torch.ones(2, 65, 1, dtype=torch.bool) for _ in range(2)]
    outputs = []

    def gated(block, args, y):
        outputs.append(torch.where(kept[len(outputs)], y, (y - args[0]).detach() + args[0]))
        return outputs[-1]

    for block in plain.blocks[1:]:
        block.register_forward_hook(gated)
    for which in (1, 0):
        outputs.clear()
        (dy,) = torch.autograd.grad(F.cross_entropy(plain(x), targets), outputs[which])
        norms = dy.norm(dim=2, keepdim=True)
        norms[:, 0] = torch.inf
        kept[which] = norms >= norms.sort(1).values[:, -17:-16]
    outputs.clear()
    expected, found = gradients(plain, x, targets), gradients(chosen, x, targets)
    assert int(kept[0].sum()) == 2 * 17
    assert all(torch.allclose(found[parameter], g, rtol=1e-9, atol=1e-12) for parameter, g in expected.items())


@pytest.mark.parametrize("name, layers", [("vit", 8), ("convnext", 6), ("swin", 16)])
def test_of_weights_alone_all_else_is_exact(name, layers, monkeypatch):
    """And they are sums over kept rows, weighed, of exact cotangents and inputs."""
    plain, chosen, draw = pair(name, keep_ratio=0.5, of="weights")
    hooked = [its for its, module in chosen.named_modules() if module._forward_hooks]
    exact, counted, counts = {}, [], draw.counts
    monkeypatch.setattr(draw, "counts", lambda norms: counted.append(counts(norms)) or counted[-1])
    for its in hooked:
        layer = plain.get_submodule(its)
        layer.register_full_backward_hook(lambda layer, _, dy, its=its: exact.update({its: (inputs[its], dy[0])}))
        layer.register_forward_pre_hook(lambda layer, args, its=its: inputs.update({its: args[0].detach()}))
    inputs = {}
    full, found = gradients(plain, *batch()), gradients(chosen, *batch())
    assert len(exact) == len(counted) == layers
    for (its, (x, dy)), times in zip(exact.items(), counted, strict=True):
        expected = torch.einsum("...o,...i->oi", times * dy, x)
        assert torch.allclose(found.pop(f"{its}.weight"), expected, rtol=1e-9, atol=1e-12)
    assert all(torch.allclose(g, full[parameter], rtol=1e-9, atol=1e-12) for parameter, g in found.items())


def test_draws_follow_from_the_step_alone():
    _, chosen, draw = pair("vit", keep_ratio=0.5)
    x, targets = batch()
    first, second = gradients(chosen, x, targets), gradients(chosen, x, targets)
    draw.step, state = 0, torch.get_rng_state()
    again = gradients(chosen, x, targets)
    assert torch.equal(torch.get_rng_state(), state)  # stochastic depth is the same in every arm
    weight = "blocks.1.mlp.fc1.weight"
    assert torch.equal(again[weight], first[weight])
    assert not torch.equal(second[weight], first[weight])
