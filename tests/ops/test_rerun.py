"""Blocks that run again on kept rows, against the dense reference, in float64."""

import pytest
import torch
from torch import Tensor

from torchsbp.ops import reference
from torchsbp.ops import rows as R
from torchsbp.ops.layers import BackwardOptions
from torchsbp.ops.rerun import graft, inner, rerun

from .helpers import RATIOS, assert_same_gradients, gradients, kept_rows, param

B, SIDE, C = 3, (4, 5), 6
N = SIDE[0] * SIDE[1]


def block(x: Tensor, mix: Tensor, weight: Tensor) -> Tensor:
    """On ``[B, ..., C]``; rows meet in their mean."""
    mean = x.flatten(1, -2).mean(1).view(B, *[1] * (x.dim() - 2), C)
    return x + torch.tanh(mean @ mix) * (x @ weight)


def run(x: Tensor, dim: int, *tensors: Tensor) -> Tensor:
    """The block in the layout of x."""
    y = block(R.channels_last(x, dim), *tensors)
    return y if dim == 1 else y.movedim(-1, 1)


def by_rerun(x, residual, rows, tensors, options, dim):
    def again(x, rows, *tensors):
        return R.take(R.channels_last(run(x, dim, *tensors), dim), rows).view(B, -1, C)

    with torch.no_grad():
        y = run(x, dim, *tensors)
    return rerun(again, y, x, residual, rows, tensors, options, dim)


def by_graft(x, residual, rows, tensors, options, dim):
    with torch.no_grad():
        y = run(x, dim, *tensors)
    kept = R.take(R.channels_last(run(inner(x, options), dim, *tensors), dim), rows).view(B, -1, C)
    return graft(y, kept, residual, rows, options, dim)


def inputs(dim: int) -> tuple[Tensor, tuple[Tensor, Tensor], Tensor]:
    torch.manual_seed(0)
    x = torch.randn(B, *SIDE, C, dtype=torch.float64)
    x = (x if dim == 1 else x.movedim(-1, 1).contiguous()).requires_grad_()
    return x, (param(C, C), param(C, C)), torch.randn_like(x)


def dense(x: Tensor, residual: Tensor | None, rows: Tensor | None, tensors, scope: str, dim: int) -> Tensor:
    path = None if residual is None else R.channels_last(residual, dim)
    y = reference.rerun(lambda x: block(x, *tensors), R.channels_last(x, dim), path, rows, scope)
    return y if dim == 1 else y.movedim(-1, 1)


@pytest.mark.parametrize("dim", [1, 2])
@pytest.mark.parametrize("scope", ["branch", "block"])
@pytest.mark.parametrize("ratio", [r for r in RATIOS if r < 1])
@pytest.mark.parametrize("way", [by_rerun, by_graft])
def test_equals_reference(way, ratio, scope, dim):
    x, tensors, dy = inputs(dim)
    rows = kept_rows(B, N, ratio)
    ours = way(x, x, rows, tensors, BackwardOptions(scope), dim)
    theirs = dense(x, x, rows, tensors, scope, dim)
    assert torch.equal(ours, theirs)
    assert_same_gradients(gradients(ours, dy, (x, *tensors)), gradients(theirs, dy, (x, *tensors)))


@pytest.mark.parametrize("way", [by_rerun, by_graft])
def test_without_a_residual_path_dropped_rows_have_no_gradient(way):
    x, tensors, dy = inputs(1)
    rows = kept_rows(B, N, 0.25)
    ours = way(x, None, rows, tensors, BackwardOptions(), 1)
    theirs = dense(x, None, rows, tensors, "branch", 1)
    assert_same_gradients(gradients(ours, dy, (x, *tensors)), gradients(theirs, dy, (x, *tensors)))


@pytest.mark.parametrize("way", [by_rerun, by_graft])
def test_weight_scale_multiplies_the_gradients_of_tensors_only(way):
    x, tensors, dy = inputs(1)
    rows = kept_rows(B, N, 0.5)
    plain, scaled = (
        gradients(way(x, x, rows, tensors, BackwardOptions(weight_scale=scale), 1), dy, (x, *tensors))
        for scale in (1.0, 2.0)
    )
    expected = [plain[0], *(2 * grad for grad in plain[1:])]
    assert_same_gradients(scaled, expected, 1e-14)


def test_rerun_at_ratio_one_is_the_block():
    x, tensors, dy = inputs(1)

    def again(x, rows, *tensors):
        return block(x, *tensors)

    with torch.no_grad():
        y = block(x, *tensors)
    ours = rerun(again, y, x, x, None, tensors, BackwardOptions())
    theirs = block(x, *tensors)
    assert_same_gradients(gradients(ours, dy, (x, *tensors)), gradients(theirs, dy, (x, *tensors)))


def test_rerun_saves_its_input_the_rows_and_the_tensors():
    x, tensors, _ = inputs(1)
    rows, saved = kept_rows(B, N, 0.5), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        by_rerun(x, x, rows, tensors, BackwardOptions(), 1)
    assert [t.data_ptr() for t in saved] == [t.data_ptr() for t in (rows, x, *tensors)]


@pytest.mark.parametrize("frozen", [0, 1, 2])
def test_what_is_frozen_gets_no_gradient(frozen):
    x, tensors, dy = inputs(1)
    rows, leaves = kept_rows(B, N, 0.5), (x, *tensors)
    everything = gradients(by_rerun(x, x, rows, tensors, BackwardOptions(), 1), dy, leaves)
    leaves[frozen].requires_grad_(False)
    found = gradients(by_rerun(x, x, rows, tensors, BackwardOptions(), 1), dy, leaves)
    assert found[frozen] is None
    assert all(i == frozen or torch.equal(a, b) for i, (a, b) in enumerate(zip(found, everything, strict=True)))
