"""Windows: slots and regions are the libraries' own; equally many kept positions in each, by one order."""

import math
from itertools import pairwise, product

import pytest
import torch
from timm.models.swin_transformer import SwinTransformerBlock, window_partition

from torchsbp.sampling import samplers
from torchsbp.sampling.keys import draw_key
from torchsbp.sampling.windows import Partition, first_in_each

CASES = [
    Partition((8, 8), (4, 4), (0, 0), False),
    Partition((8, 12), (4, 4), (2, 2), True),
    Partition((9, 13), (5, 4), (2, 1), False),
    Partition((9, 13), (5, 4), (2, 1), True),
    Partition((3, 5), (7, 7), (3, 3), True),
    Partition((5, 6, 7), (4, 3, 5), (2, 0, 2), True),
]


def order_of(partition: Partition, samples: int = 3, ratio: float = 0.5) -> torch.Tensor:
    key = draw_key(0, torch.tensor(5), 0, samples)
    return samplers.SAMPLERS["random"](partition.grid, (ratio,), key)


def positions_in(partition: Partition) -> torch.Tensor:
    """The positions of every window, ``[windows, area]``, by where each position goes; -1 is padding."""
    found = torch.full((math.prod(partition.counts), partition.area), -1)
    for position, place in enumerate(product(*map(range, partition.grid))):
        window = slot = 0
        for i, n, w, count, shift in zip(
            place, partition.grid, partition.window, partition.counts, partition.shift, strict=True
        ):
            i = (i - shift) % (count * w if partition.pads_first else n)
            window, slot = window * count + i // w, slot * w + i % w
        found[window, slot] = position
    return found


@pytest.mark.parametrize("partition", CASES, ids=str)
def test_positions_are_where_shift_and_window_put_them(partition):
    expected, n = positions_in(partition), math.prod(partition.grid)
    places = partition.places(torch.device("cpu"))
    assert torch.equal(places.where(places < n, -1), expected)
    assert torch.equal(places.flatten().sort().values, torch.arange(expected.numel()))
    slots = first_in_each(order_of(partition), partition, 0.5)[1].slot_of_row
    assert torch.equal(expected.flatten()[slots], torch.arange(n))


@pytest.mark.parametrize("grid", [(8, 12), (9, 13)])
def test_unequal_regions_are_where_timm_masks(grid):
    block = SwinTransformerBlock(8, grid, 1, window_size=(5, 4), shift_size=(2, 1))
    regions = Partition(grid, (5, 4), (2, 1), False).regions(torch.device("cpu"))
    assert torch.equal(regions.unsqueeze(1) != regions.unsqueeze(2), block.attn_mask == -100)
    assert Partition(grid, (5, 4), (0, 0), False).regions(torch.device("cpu")) is None


@pytest.mark.parametrize("ratio", [0.01, 0.25, 0.5, 0.9])
@pytest.mark.parametrize("partition", CASES, ids=str)
def test_every_window_keeps_its_first_positions_by_the_order(partition, ratio):
    order = order_of(partition)
    kept, _ = first_in_each(order, partition, ratio)
    for sample, rank in zip(kept, order.argsort(1), strict=True):
        expected = []
        for window in positions_in(partition):
            real = window[window >= 0]
            share = max(1, round(ratio * len(real)))  # of what is no padding
            expected.append(real[rank[real].argsort()][:share])
        assert torch.equal(sample, torch.cat(expected))


@pytest.mark.parametrize("partition", CASES, ids=str)
def test_unequal_ratios_are_nested(partition):
    order = order_of(partition)
    kept = [first_in_each(order, partition, ratio)[0] for ratio in (0.1, 0.25, 0.5, 0.75, 1.0)]
    masks = [torch.zeros(order.shape, dtype=torch.bool).scatter(1, positions, True) for positions in kept]
    assert all((small <= large).all() for small, large in pairwise(masks))
    assert masks[-1].all()


def test_slots_filled_and_windows_are_consistent():
    partition = CASES[3]
    kept, w = first_in_each(order_of(partition), partition, 0.5)
    inside = positions_in(partition).expand(3, -1, -1).gather(2, w.slots).flatten(1)
    assert torch.equal(inside[:, w.filled], kept)
    assert (inside >= 0).sum() == kept.numel()


def test_shuffling_keeps_the_sets_of_the_given_counts():
    order, key = order_of(Partition((8, 8), (4, 4), (0, 0), False)), draw_key(0, torch.tensor(1), 0, 3)
    shuffled = samplers.shuffle(order, (16, 40), key)
    for start, end in ((0, 16), (16, 40), (40, 64)):
        assert torch.equal(shuffled[:, start:end].sort().values, order[:, start:end].sort().values)
    assert not torch.equal(shuffled, order)


@pytest.mark.parametrize("shift", [0, 3])
@pytest.mark.parametrize("ratio, agreeing", [(0.5, 0.999), (0.25, 0.7)])
def test_stages_of_swin_keep_what_the_common_order_says_and_visit_every_position(ratio, agreeing, shift):
    """Drawn on 14×14 cells, enlarged to 56×56, in windows of 7×7: cells and windows do not match."""
    coarse, fine, key = (14, 14), (56, 56), draw_key(0, torch.tensor(0), 0, 256)
    order = samplers.enlarge(samplers.SAMPLERS["grid"](coarse, (ratio,), key), coarse, fine)
    k = round(ratio * 56**2)
    kept, _ = first_in_each(samplers.shuffle(order, (k,), key), Partition(fine, (7, 7), (shift, shift), False), ratio)
    windowed, common = (torch.zeros(256, 56**2).scatter(1, chosen, 1) for chosen in (kept, order[:, :k]))
    assert (windowed * common).sum() / windowed.sum() > agreeing
    assert windowed.mean(0).min() > 0.1


def test_timm_partitions_alike():
    x = torch.randn(2, 8, 12, 3)
    partition = Partition((8, 12), (4, 3), (2, 1), False)
    expected = window_partition(x.roll((-2, -1), (1, 2)), (4, 3)).flatten(1, 2)
    found = torch.zeros(2, 96, 3).index_copy(
        1, first_in_each(order_of(partition), partition, 0.5)[1].slot_of_row, x.flatten(1, 2)
    )
    assert torch.equal(found.view(-1, 12, 3), expected)
