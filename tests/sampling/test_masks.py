"""Masks: one record per sampled module, from one order, read by all."""

import pytest
import torch

from torchsbp.adapters.layouts import halved
from torchsbp.sampling.masks import Kept, Masks, SiteSpec

SITES = (SiteSpec("fine", 0), SiteSpec("fine again", 0), SiteSpec("coarse", 1), SiteSpec("heads", 1, heads=4))


def masks(*ratios: float, prefix: int = 0, per_sample: bool | str = False, per_block: bool = False) -> Masks:
    found = Masks("random", 0, per_sample, per_block, prefix, ((), (halved,)), SITES)
    found.ratios = ratios
    return found


def begun(found: Masks, batch: int = 2, grid: tuple[int, int] = (8, 12)) -> Masks:
    found.begin(batch, grid, torch.tensor(3))
    return found


def positions(found: Masks, site: int) -> torch.Tensor:
    return found.positions_kept(found.drawn, site, torch.device("cpu"))


def test_nothing_is_drawn_where_all_is_kept():
    found = masks(1.0, 1.0, 1.0, 1.0)
    found.sampler = "none that there is"
    assert begun(found).drawn.sites == (Kept(),) * 4
    assert found.kept(0, batch=1, positions=5) == Kept()  # whatever its input: tokens may have been dropped
    assert positions(found, 2).tolist() == [list(range(24))] * 2


def test_modules_of_one_stage_and_ratio_share_their_rows():
    fine, again, coarse, heads = begun(masks(0.5, 0.5, 0.5, 0.5)).drawn.sites
    assert fine.rows is again.rows
    assert coarse.rows is heads.rows
    assert fine.rows.shape == (2 * 48,)
    assert coarse.rows.shape == (2 * 12,)
    assert heads.heads.shape == (2,)
    assert fine.heads is None


def test_all_is_none():
    assert all(record == (None,) * 5 for record in begun(masks(1.0, 1.0, 1.0, 1.0)).drawn.sites)


def test_prefix_tokens_are_always_kept_and_come_first():
    found = begun(masks(0.25, 0.5, 0.25, 0.25, prefix=3))
    for site in range(4):
        assert positions(found, site)[:, :3].tolist() == [[0, 1, 2]] * 2
    few, more = (set(positions(found, site)[0].tolist()) for site in (0, 1))
    assert few < more


@pytest.mark.parametrize("per_sample", [True, False])
def test_samples_have_masks_of_their_own_or_share_one(per_sample):
    kept = positions(begun(masks(0.5, 0.5, 0.5, 0.5, per_sample=per_sample), batch=4), 0)
    assert len(kept.unique(dim=0)) == (4 if per_sample else 1)


def test_balanced_masks_keep_every_position_equally_often():
    found = begun(masks(0.5, 0.25, 0.5, 0.5, prefix=1, per_sample="balanced"), batch=4)
    for site, often in ((0, 2), (1, 1), (2, 2)):
        kept = positions(found, site)
        assert kept[:, 0].tolist() == [0] * 4
        assert kept[:, 1:].flatten().bincount().tolist()[1:] == [often] * (kept[:, 1:].max())


@pytest.mark.parametrize("per_sample", [True, False, "balanced"])
def test_blocks_have_masks_of_their_own_on_their_own_grid(per_sample):
    found = begun(masks(0.5, 0.5, 0.5, 1.0, prefix=1, per_sample=per_sample, per_block=True))
    fine, again, coarse, everything = (positions(found, site) for site in range(4))
    assert fine.shape == again.shape == (2, 1 + 48)
    assert coarse.shape == (2, 1 + 12)
    assert everything.shape == (2, 1 + 24)
    assert fine.tolist() != again.tolist()
    cells = torch.zeros(96).index_fill(0, fine[0, 1:] - 1, 1.0).view(4, 2, 6, 2).sum((1, 3))
    assert not set(cells.unique().tolist()) <= {0.0, 4.0}  # not whole cells of the coarser grid


def test_the_step_is_counted_when_masks_are_drawn():
    found, step = masks(0.5, 0.5, 0.5, 0.5), torch.tensor(3)
    with torch.no_grad():
        found.begin(2, (8, 12), step)
    assert step == 3
    assert found.drawn is None
    found.kept(0, 2, 96)
    assert step == 4
    assert found.drawn is not None


def test_an_error_leaves_no_rows_of_another_grid_behind():
    found = begun(masks(0.5, 0.5, 0.1, 0.1))
    with pytest.raises(ValueError, match=r"keeps none of the 1 cells of grid \(1, 1\)"):
        begun(found, grid=(2, 2))
    assert found.drawn is None


def test_other_positions_than_the_images_are_refused():
    found = begun(masks(0.5, 0.5, 0.5, 0.5, prefix=1))
    with pytest.raises(
        ValueError, match=r"coarse was given 3 samples of 25 positions, but .* 2 samples of 25 \(1 prefix"
    ):
        found.kept(2, 3, 25)
