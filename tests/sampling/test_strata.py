import pytest
import torch

from torchsbp.sampling.keys import draw_key
from torchsbp.sampling.samplers import SAMPLERS, balanced, count, first

SAMPLES = 64


def masks(name, shape, ratio, samples=SAMPLES, spread=False):
    """1 where a position is kept, [samples, *shape]; one order for all samples if it is ``spread`` over them."""
    k = count(name, shape, ratio)
    order = SAMPLERS[name](shape, (ratio,), draw_key(0, torch.tensor(5), 0, 1 if spread else samples))
    if spread:
        order = balanced(order, [k], samples)
    return torch.zeros(order.shape).scatter(1, first(order, k), 1.0).view(-1, *shape)


def cells(mask, size):
    """[samples, cells, size, size]"""
    samples, h, w = mask.shape
    return mask.view(samples, h // size, size, w // size, size).transpose(2, 3).reshape(samples, -1, size, size)


@pytest.mark.parametrize("spread", [False, True])
@pytest.mark.parametrize("shape", [(8, 8), (14, 14), (16, 24), (2, 6)])
def test_half_is_one_diagonal_of_every_cell(shape, spread):
    found = cells(masks("stratified", shape, 0.5, spread=spread), 2)
    assert torch.equal(found[..., 0, 0], found[..., 1, 1])
    assert torch.equal(found[..., 0, 1], found[..., 1, 0])
    assert torch.equal(found[..., 0, 0] + found[..., 0, 1], torch.ones(found.shape[:2]))
    assert 0 < found[..., 0, 0].mean() < 1


@pytest.mark.parametrize("spread", [False, True])
@pytest.mark.parametrize("ratio", [0.25, 0.75])
def test_a_quarter_is_one_of_every_cell_and_one_in_every_row_and_column_of_four(ratio, spread):
    mask = masks("stratified", (8, 16), ratio, spread=spread)
    kept = mask if ratio == 0.25 else 1 - mask
    assert (cells(kept, 2).sum((2, 3)) == 1).all()
    for dim in (2, 3):
        assert (cells(kept, 4).sum(dim) == 1).all()


def test_a_sixteenth_is_one_of_every_cell_of_cells():
    assert (cells(masks("stratified", (8, 16), 1 / 16), 4).sum((2, 3)) == 1).all()


@pytest.mark.parametrize("ratio", [0.1, 0.3, 0.4, 0.6])
def test_any_share_is_as_even_as_whole_numbers_allow(ratio):
    """No cell has two positions more than another."""
    found = cells(masks("stratified", (16, 16), ratio), 2).sum((2, 3))
    assert (found.amax(1) - found.amin(1)).max() <= 1


def test_half_of_a_clip_is_every_other_corner_of_its_cells():
    mask = masks("stratified", (4, 8, 8), 0.5)
    cubes = mask.view(SAMPLES, 2, 2, 4, 2, 4, 2)
    assert torch.equal(cubes.sum((2, 4, 6)), torch.full((SAMPLES, 2, 4, 4), 4.0))
    for dim in (2, 4, 6):
        assert (cubes.sum(dim) == 1).all()


def test_cells_choose_their_diagonals_without_correlation():
    """So that the variance of a sum is that of its cells, added up (docs/method.md, section 4)."""
    diagonal = cells(masks("stratified", (8, 8), 0.5, samples=4000), 2)[..., 0, 0] * 2 - 1
    correlation = diagonal.T @ diagonal / len(diagonal)
    assert (correlation - torch.eye(16)).abs().max() < 4 / 4000**0.5


def test_the_variance_of_half_is_that_of_mixed_second_differences():
    torch.manual_seed(0)
    a = torch.randn(8, 8)
    found = (2 * masks("stratified", (8, 8), 0.5, samples=20_000) * a).sum((1, 2)).var()
    inside = cells(a[None], 2)[0]
    expected = (inside[:, 0, 0] + inside[:, 1, 1] - inside[:, 0, 1] - inside[:, 1, 0]).square().sum()
    torch.testing.assert_close(found, expected, rtol=0.05, atol=0)


@pytest.mark.parametrize("ratio, bound", [(0.5, 0.02), (0.25, 0.05)])
@pytest.mark.parametrize("shape", [(8, 8), (14, 14)])
def test_sums_of_what_changes_slowly_hardly_vary(shape, ratio, bound):
    """Against random masks, of a hill on the grid."""
    h, w = (torch.linspace(-1, 1, side) for side in shape)
    hill = torch.exp(-(h[:, None] ** 2) - (w - 0.3) ** 2)
    variance = {name: (masks(name, shape, ratio, 2000) * hill).sum((1, 2)).var() for name in ("random", "stratified")}
    assert variance["stratified"] < bound * variance["random"]
