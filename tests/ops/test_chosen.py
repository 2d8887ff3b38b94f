"""Rows chosen in backward: which, how often they count, and that every op takes the gradients that this defines."""

import pytest
import torch

from torchsbp.ops import reference
from torchsbp.ops.block import transformer_block
from torchsbp.ops.chosen import choose as definition
from torchsbp.ops.chosen import marks, probabilities
from torchsbp.ops.conv_block import ConvParams, ConvSpec, conv_block
from torchsbp.ops.device import device_of
from torchsbp.ops.heads import AttentionSpec
from torchsbp.ops.layers import NO_NORM, BackwardOptions, Norm
from torchsbp.ops.mlp import MLPSpec, mlp_branch
from torchsbp.ops.rows import RowWeight, inverse
from torchsbp.ops.rules import RULES

from .helpers import assert_same_gradients, attention_params, gradients, mlp_params, param, post_norm

B, N, C, HEADS, K = 3, 20, 24, 3, 5
FACTORS = torch.tensor([[0.0, 1.0, 2.0], [2.0, 0.0, 1.0]], dtype=torch.float64).unbind()


def block_of():
    torch.manual_seed(0)
    x = torch.randn(B, N, C, dtype=torch.float64, requires_grad=True)
    return x, uneven(B, N, C), attention_params(C, HEADS), mlp_params(C, 4 * C)


def uneven(*shape):
    """A cotangent whose rows differ in length, some a hundredfold."""
    torch.manual_seed(1)
    return torch.randn(*shape, dtype=torch.float64) * torch.randn(*shape[:-1], 1, dtype=torch.float64).exp().square()


def spec_of(rule="query"):
    return AttentionSpec(HEADS, (C // HEADS) ** -0.5, rule=RULES[rule])


def options_of(prefix=0, recompute=True):
    return BackwardOptions(recompute=recompute, row_weight=RowWeight((N - prefix) / K, prefix))


def choose(dy, marks, options):
    return device_of(dy).choose(dy, marks, options)


def starts(samples=B):
    return torch.rand(samples, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def cells(p):
    """The stretches of ``start`` that keep the same rows, their widths and middles; not those that rounding makes."""
    cuts = torch.cat([torch.zeros(1), -p.cumsum(1)[0] % 1, torch.ones(1)]).sort().values
    widths, middles = cuts.diff(), (cuts[1:] + cuts[:-1]) / 2
    return widths[widths > 1e-12], middles[widths > 1e-12]


def test_probabilities_follow_norms_and_add_up():
    norms = [[1.0, 2.0, 3.0, 4.0], [1.0, 1.0, 2.0, 96.0], [0.0, 0.0, 0.0, 5.0], [0.0] * 4]
    expected = [[0.2, 0.4, 0.6, 0.8], [0.25, 0.25, 0.5, 1.0], [1 / 3, 1 / 3, 1 / 3, 1.0], [0.5] * 4]
    found = probabilities(torch.tensor(norms), 2)
    assert torch.allclose(found, torch.tensor(expected, dtype=torch.float64), rtol=1e-12)


@pytest.mark.parametrize("prefix", [0, 2])
def test_rows_are_kept_as_often_as_their_probability_says(prefix):
    dy = uneven(1, N, C)
    p = probabilities(dy.norm(dim=2)[:, prefix:], K)
    assert int((p == 1).sum()) >= 1
    widths, middles = cells(p)
    often = torch.zeros(N, dtype=torch.float64)
    for width, start in zip(widths, middles, strict=True):
        rows, place, counts = choose(dy[0], marks(start.view(1), K), options_of(prefix))
        assert place is None
        assert rows.tolist() == sorted(set(rows.tolist()))
        assert rows[:prefix].tolist() == list(range(prefix))
        assert torch.allclose(counts, torch.cat([torch.ones(prefix), 1 / p[0, rows[prefix:] - prefix]]), rtol=1e-12)
        often[rows] += width
    assert torch.allclose(often, torch.cat([torch.ones(prefix, dtype=p.dtype), p[0]]), rtol=1e-9)


def test_every_sample_keeps_as_many_whatever_its_cotangent():
    dy = uneven(50, N, C)
    dy[0], dy[1, 1:], dy[2, 3:] = 0, 0, 0
    for start in (1e-10, 0.5, 1 - 1e-10):
        rows = choose(
            dy.flatten(0, 1), marks(torch.full((50,), start, dtype=torch.float64), K), options_of()
        ).rows.view(50, K)
        assert all(row.tolist() == sorted(set(row.tolist())) for row in rows)
        assert torch.equal(rows // N, torch.arange(50)[:, None].expand(50, K))
        assert int(rows[1, 0]) == 20  # alone, it is kept always


def test_what_is_not_finite_stays_so():
    """A scaler of gradients has to see it."""
    x, dy, p1, p2 = block_of()
    for value in (torch.nan, torch.inf):
        dy[0, 3, 2] = value
        y = transformer_block(x, None, p1, spec_of(), p2, MLPSpec(), marks=marks(starts(), K), options=options_of())
        assert not gradients(y, dy, (p2.weight2,))[0].isfinite().all()


@pytest.mark.parametrize("recompute", [True, False])
@pytest.mark.parametrize("rule", ["query", "exact"])
@pytest.mark.parametrize("behind", [False, True])
@pytest.mark.parametrize("prefix", [0, 2])
def test_block_equals_reference(prefix, behind, rule, recompute):
    x, dy, p1, p2 = block_of()
    spec1, spec2, options = spec_of(rule), MLPSpec(), options_of(prefix, recompute)
    if behind:
        p1, p2 = post_norm(p1), post_norm(p2)
        spec1, spec2 = spec1._replace(norm=NO_NORM, post_norm=Norm()), MLPSpec(NO_NORM, post_norm=Norm())
    at = marks(starts(), K)
    ours = transformer_block(x, None, p1, spec1, p2, spec2, marks=at, factors=FACTORS, options=options)
    rows, _, counts = choose(dy.flatten(0, 1), at, options)
    theirs = reference.transformer_block(x, rows, p1, spec1, p2, spec2, FACTORS, weight=counts)
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    leaves = (x, *p1, *p2)
    assert_same_gradients(gradients(ours, dy, leaves), gradients(theirs, dy, leaves))


@pytest.mark.parametrize("recompute", [True, False])
@pytest.mark.parametrize("residual", [True, False])
def test_mlp_equals_reference(residual, recompute):
    x, dy, _, p = block_of()
    at, options = marks(starts(), K), options_of(1, recompute)
    ours = mlp_branch(x, None, p, marks=at, factor=FACTORS[0], residual=residual, options=options)
    rows, _, counts = choose(dy.flatten(0, 1), at, options)
    theirs = reference.mlp_branch(x, rows, p, MLPSpec(), FACTORS[0], weight=counts) - (0 if residual else x)
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    assert_same_gradients(gradients(ours, dy, (x, *p)), gradients(theirs, dy, (x, *p)))


def test_conv_block_equals_reference():
    torch.manual_seed(0)
    x, p = param(B, C, 5, 4), mlp_params(C, 9)
    conv, spec = ConvParams(param(C, 1, 7, 7), param(C)), ConvSpec((3, 3), (1, 1), C)
    dy, at, options = uneven(B, 5, 4, C).permute(0, 3, 1, 2), marks(starts(), K), options_of()
    ours = conv_block(x, None, conv, spec, p, MLPSpec(), marks=at, factor=FACTORS[0], options=options)
    rows, _, counts = choose(dy.permute(0, 2, 3, 1).reshape(B * N, C), at, options)
    u = torch.nn.functional.conv2d(x, conv.weight, conv.bias, 1, *spec).permute(0, 2, 3, 1)
    branch = reference.per_sample(reference.mlp(u, p, MLPSpec()), FACTORS[0])
    theirs = reference.gate(branch, rows, counts).permute(0, 3, 1, 2) + x
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    leaves = (x, *conv, *p)
    assert_same_gradients(gradients(ours, dy, leaves), gradients(theirs, dy, leaves))


@pytest.mark.parametrize("rule", ["query", "exact"])
def test_over_all_draws_gradients_are_exact(rule):
    x, dy, p1, p2 = block_of()
    x, dy = x[:1].detach().requires_grad_(), dy[:1]
    leaves, options, mean = (x, *p1, *p2), options_of(1), None
    exact = gradients(transformer_block(x, None, p1, spec_of(rule), p2, MLPSpec()), dy, leaves)
    for width, start in zip(*cells(probabilities(dy.norm(dim=2)[:, 1:], K)), strict=True):
        at = marks(start.view(1), K)
        found = gradients(
            transformer_block(x, None, p1, spec_of(rule), p2, MLPSpec(), marks=at, options=options), dy, leaves
        )
        found = [None if g is None else width * g for g in found]
        mean = found if mean is None else [None if a is None else a + b for a, b in zip(mean, found, strict=True)]
    assert_same_gradients(mean, exact)


@pytest.mark.parametrize("recompute", [True, False])
def test_saved_bytes_are_those_of_exact_gradients_and_the_marks(recompute):
    x, _, p1, p2 = block_of()
    given = {t.data_ptr() for t in (*p1, *p2) if t is not None}
    found = []
    for at in (None, marks(starts(), K)):
        storages = {}

        def pack(t, storages=storages):
            if t.data_ptr() not in given:
                storages[t.untyped_storage()._cdata] = t.untyped_storage().nbytes()
            return t

        options = options_of(recompute=recompute) if at is not None else BackwardOptions(recompute=recompute)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            y = transformer_block(x, None, p1, spec_of(), p2, MLPSpec(), marks=at, options=options)
        found.append(sum(storages.values()))
        assert y.requires_grad
    assert found[1] == found[0] + 8 * B * K


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("prefix", [0, 2])
def test_a_gpu_chooses_the_same_rows(prefix):
    dy, at = uneven(B * N, C), marks(starts(), K)
    rows, _, counts = choose(dy, at, options_of(prefix))
    found, place, found_counts = choose(dy.cuda(), at.cuda(), options_of(prefix))
    assert torch.equal(found.cpu(), rows)
    assert torch.allclose(found_counts.cpu(), counts, rtol=1e-9)
    assert torch.equal(place[found].cpu(), torch.arange(len(rows), dtype=torch.int32))


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "n, k, prefix", [(1, 1, 0), (3, 1, 2), (197, 98, 1), (197, 196, 1), (3136, 784, 0), (4096, 4096, 0)]
)
def test_kernels_choose_the_rows_of_the_definition(n, k, prefix, dtype):
    """Lengths are summed in another order: where a mark lies on the edge of two rows, it may be the other one."""
    samples, options = 32, BackwardOptions(row_weight=RowWeight(1.0, prefix))
    dy, at = uneven(samples * n, C).to(dtype), marks(starts(samples), k)
    rows, _, counts = choose(dy, at, options)
    found, place, found_counts = (its.cpu() for its in choose(dy.cuda(), at.cuda(), options))
    same = found == rows
    assert float(same.float().mean()) > 0.998
    torch.testing.assert_close(found_counts[same], counts[same], rtol=1e-5, atol=0)
    assert torch.equal(place, inverse(found, samples * n))
    assert bool((found.diff() > 0).all())


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_definition_compiled_for_a_gpu_chooses_the_same_rows():
    """It runs where a sample has more rows than a program of a kernel can hold."""
    dy, at = uneven(2 * 5000, C).float(), marks(starts(2), 1250)
    rows, _, counts = definition(dy, at, 1)
    torch._dynamo.reset()
    found, _, found_counts = torch.compile(definition, fullgraph=True)(dy.cuda(), at.cuda(), 1)
    same = found.cpu() == rows
    assert float(same.float().mean()) > 0.998
    torch.testing.assert_close(found_counts.cpu()[same], counts[same], rtol=1e-5, atol=0)
