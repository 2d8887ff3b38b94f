import math
import re
from itertools import pairwise

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from torchsbp.sampling.keys import draw_key
from torchsbp.sampling.samplers import SAMPLERS, balanced, count, enlarge, enlarged_count, first, resolve

IMAGES = [(14, 14), (8, 8), (7, 7), (6, 9), (5, 3), (1, 13), (13, 1), (12,), (7,)]
VIDEOS = [(8, 4, 4), (7, 3, 5), (16, 2, 3), (5, 1, 1), (1, 4, 4)]
RATIOS = [0.5, 0.25, 0.75, 1 / 3, 0.2, 0.3, 0.4, 0.62, 0.9, 1.0]
LATTICES = ["grid", "checkerboard", "frames"]
CASES = [(name, shape) for name in SAMPLERS for shape in VIDEOS + IMAGES * ("frames" not in name)]


def key_of(step=0, *, seed=0, rank=0, samples=1):
    return draw_key(seed, torch.tensor(step), rank, samples)


def masks(name, shape, ratio, key, ratios=None):
    """Kept or not, [samples, *shape]."""
    order = resolve(name)(shape, ratios or (ratio,), key)
    mask = torch.zeros(order.shape, dtype=torch.bool)
    return mask.scatter(1, first(order, count(name, shape, ratio)), True).view(-1, *shape)


def units(name, shape):
    """The number of units that the sampler chooses among, and the positions in each."""
    n = {"grid": math.prod(shape[-2:]), "frames": shape[0], "frames_jitter": shape[0]}.get(name, math.prod(shape))
    return n, math.prod(shape) // n


def possible(name, shape, ratios):
    """Those that keep something: the others are errors, tested at the end."""
    return [r for r in ratios if round(r * units(name, shape)[0]) > 0]


@pytest.mark.parametrize("name, shape", CASES)
def test_orders_are_permutations(name, shape):
    n = math.prod(shape)
    ratios = possible(name, shape, RATIOS)
    for chosen in [*([r] for r in ratios), ratios]:
        order = SAMPLERS[name](shape, chosen, key_of(samples=3))
        assert torch.equal(order.sort().values, torch.arange(n).expand(3, n))


@pytest.mark.parametrize("name, shape, ratio", [(*case, r) for case in CASES for r in possible(*case, RATIOS)])
def test_counts_are_exact_and_whole_units_are_kept(name, shape, ratio):
    n, size = units(name, shape)
    k = round(ratio * n)
    assert count(name, shape, ratio) == k * size
    mask = masks(name, shape, ratio, key_of(samples=4))
    assert mask.flatten(1).sum(1).tolist() == [k * size] * 4
    if name == "grid":
        assert torch.equal(mask, mask[:, :1].expand_as(mask)) or len(shape) < 3
    if name.startswith("frames"):
        assert torch.equal(mask, mask[:, :, :1, :1].expand_as(mask))


def test_the_first_are_sorted():
    assert first(torch.tensor([[3, 0, 2, 1], [1, 2, 0, 3]]), 2).tolist() == [[0, 3], [1, 2]]


@pytest.mark.parametrize("name", SAMPLERS)
def test_same_inputs_same_order(name):
    draws = [SAMPLERS[name]((16, 6, 6), (0.3,), key_of(7, seed=3, rank=2, samples=4)) for _ in range(2)]
    assert torch.equal(*draws)


@pytest.mark.parametrize("other", [{"step": 8}, {"seed": 4}, {"rank": 3}])
def test_another_step_seed_or_rank_is_another_order(other):
    orders = [SAMPLERS["random"]((6, 6), (0.3,), key_of(**{"step": 7, "seed": 3, "rank": 2} | o)) for o in ({}, other)]
    assert not torch.equal(*orders)


def test_samples_differ():
    assert len(SAMPLERS["random"]((6, 6), (0.3,), key_of(samples=8)).unique(dim=0)) == 8


def test_keys_are_distinct_32_bit_numbers_for_every_seed_step_rank_and_sample():
    keys = torch.cat([key_of(t, seed=s, rank=r, samples=8) for t in range(20) for s in (0, 1, 20) for r in range(8)])
    assert len(keys.unique()) == len(keys)
    assert 0 <= keys.min() < 2**26
    assert 2**32 - 2**26 < keys.max() < 2**32


@pytest.mark.parametrize("other", [{"step": 1}, {"seed": 1}, {"rank": 1}])
def test_bits_of_neighbouring_keys_agree_half_of_the_time(other):
    differ = key_of(samples=20_000) ^ key_of(**other, samples=20_000)
    flips = (differ[:, None] >> torch.arange(32) & 1).double().mean(0)
    assert (flips - 0.5).abs().max() < 0.02


def test_the_first_samples_do_not_depend_on_how_many_are_drawn():
    assert torch.equal(key_of(5, samples=3), key_of(5, samples=7)[:3])


@pytest.mark.parametrize("seed", [-1, 2**40 + 5])
def test_seeds_are_taken_modulo_32_bits(seed):
    assert torch.equal(key_of(seed=seed), key_of(seed=seed % 2**32))


@pytest.mark.parametrize("ratios", [(0.5,), (0.25,), (0.75,), (0.4,), (0.3, 0.62), (0.25, 0.5, 0.75, 1.0)])
@pytest.mark.parametrize("name, shape", [case for case in CASES if case[0] in LATTICES])
def test_lattices_visit_every_position_equally_often(name, shape, ratios):
    n, _ = units(name, shape)
    ratios = possible(name, shape, ratios) or [1.0]
    counts = [round(r * n) for r in ratios]
    starts = n // math.gcd(n, *counts)  # the start is key mod starts, so these keys are all of them, once
    for k, ratio in zip(counts, ratios, strict=True):
        visits = masks(name, shape, ratio, torch.arange(starts), ratios).sum(0)
        assert visits.unique().tolist() == [starts * k // n]


@pytest.fixture(scope="module")
def many_steps():
    return torch.cat([key_of(step) for step in range(3000)])


@pytest.mark.parametrize("ratios", [(0.5,), (0.3,), (0.25, 0.5), (0.25, 0.4, 0.7)])
@pytest.mark.parametrize(
    "name, shape",
    [
        ("random", (4, 5)),
        ("frames_jitter", (8, 1, 1)),
        ("frames_jitter", (7, 1, 2)),
        *(("stratified", shape) for shape in [(4, 5), (7, 7), (6, 10), (8, 8), (3, 4, 6), (9,)]),
    ],
)
def test_random_samplers_visit_every_position_equally_often(name, shape, ratios, many_steps):
    for ratio in ratios:
        visits = masks(name, shape, ratio, many_steps, ratios).double().mean(0)
        p = count(name, shape, ratio) / math.prod(shape)
        assert (visits - p).abs().max() < 4 * math.sqrt(p * (1 - p) / len(many_steps))


def test_random_visits_every_pair_equally_often():
    kept = masks("random", (12,), 0.5, key_of(samples=20_000)).double()
    pairs = (kept.T @ kept / len(kept))[~torch.eye(12, dtype=torch.bool)]
    p = 6 / 12 * 5 / 11
    assert (pairs - p).abs().max() < 4 * math.sqrt(p * (1 - p) / len(kept))


@pytest.mark.parametrize("samples", [4, 6, 7, 64])
@pytest.mark.parametrize("ratios", [(0.5,), (0.3,), (0.25, 0.4, 0.7)])
@pytest.mark.parametrize(
    "name, shape",
    [("grid", (14, 14)), ("grid", (4, 6, 7)), ("random", (5, 8)), ("stratified", (7, 8)), ("frames", (8, 2, 2))],
)
def test_balanced_orders_keep_every_position_equally_often(name, shape, ratios, samples):
    n, counts = math.prod(shape), [count(name, shape, r) for r in ratios]
    order = balanced(SAMPLERS[name](shape, ratios, key_of(3)), counts, samples)
    assert torch.equal(order.sort().values, torch.arange(n).expand(samples, n))
    for k in counts:
        kept = torch.zeros(samples, n).scatter(1, first(order, k), 1.0).sum(0)
        assert set(kept.tolist()) <= {samples * k // n, -(-samples * k // n)}


def test_balanced_lattices_keep_whole_classes():
    (phases,) = [balanced(SAMPLERS["grid"]((8, 8), (0.25,), key_of(3)), [16], 6)]
    found = {int(classes((8, 8), 4).flatten()[kept].unique()) for kept in first(phases, 16)}
    assert found == {0, 1, 2, 3}


def classes(shape, s):
    return sum(torch.meshgrid(*map(torch.arange, shape), indexing="ij")) % s


@pytest.mark.parametrize(
    "name, shape, s",
    [
        ("grid", (14, 14), 2),
        ("grid", (8, 8), 4),
        ("grid", (6, 9), 3),
        ("grid", (12,), 3),
        ("checkerboard", (4, 4, 8), 4),
    ],
)
def test_lattice_masks_are_the_classes_of_the_sum_or_their_complements(name, shape, s):
    phases = [classes(shape, s) == phase for phase in range(s)]
    for ratio, expected in [(1 / s, phases), (1 - 1 / s, [~phase for phase in phases])]:
        found = {tuple(mask.flatten().tolist()) for mask in masks(name, shape, ratio, torch.arange(s))}
        assert found == {tuple(mask.flatten().tolist()) for mask in expected}


def test_an_odd_grid_is_a_checkerboard_but_for_the_seam():
    for mask in masks("grid", (7, 7), 0.5, torch.arange(49)):
        phase = classes((7, 7), 2) == 0
        # The window follows one class and then the other in raster order: at most one row has both.
        rows = [row for row in range(7) if not (mask[row] <= phase[row]).all() and not (mask[row] <= ~phase[row]).all()]
        assert len(rows) <= 1


def test_grid_shares_its_pattern_between_frames_and_checkerboard_alternates():
    assert torch.equal(*masks("grid", (2, 4, 4), 0.5, torch.tensor([0]))[0])
    assert torch.equal(
        *masks("checkerboard", (2, 4, 4), 0.5, torch.tensor([0]))[0] ^ torch.tensor([0, 1]).view(2, 1, 1)
    )


@pytest.mark.parametrize(
    "T, k, sets",
    [
        (8, 2, {(0, 4), (1, 5), (2, 6), (3, 7)}),
        (8, 3, {tuple(sorted((a + b) % 8 for b in (0, 3, 6))) for a in range(8)}),
    ],
)
def test_frames_are_evenly_strided(T, k, sets):
    order = SAMPLERS["frames"]((T, 1, 1), (k / T,), torch.arange(T))
    assert {tuple(frames) for frames in first(order, k).tolist()} == sets


@pytest.mark.parametrize("T, k", [(8, 2), (12, 4), (16, 8)])
def test_frames_jitter_keeps_one_frame_in_each_stretch(T, k):
    kept = masks("frames_jitter", (T, 1, 1), k / T, key_of(samples=200)).view(200, k, T // k)
    assert (kept.sum(2) == 1).all()
    assert kept.any(0).all()


@pytest.mark.parametrize("T, k", [(8, 3), (7, 2), (9, 5)])
def test_frames_jitter_leaves_no_long_gap_when_stretches_are_unequal(T, k):
    frames = first(SAMPLERS["frames_jitter"]((T, 1, 1), (k / T,), key_of(samples=200)), k)
    gaps = (frames.roll(-1, 1) - frames) % T
    assert gaps.max() <= 2 * math.ceil(T / k) - 1


@pytest.mark.parametrize("name, shape", CASES)
def test_unequal_ratios_are_nested(name, shape):
    ratios = possible(name, shape, RATIOS)
    key = key_of(samples=5)
    nested = [masks(name, shape, r, key, ratios) for r in sorted(ratios)]
    assert all((small <= large).all() for small, large in pairwise(nested))


def test_keeping_all_in_some_blocks_does_not_change_the_pattern_of_the_others():
    key = key_of(samples=5)
    assert torch.equal(masks("grid", (8, 8), 0.5, key, (0.5, 1.0)), masks("grid", (8, 8), 0.5, key))


@pytest.mark.parametrize("ratios", [(0.4,), (0.25, 0.4, 0.75)])
def test_low_discrepancy_masks_are_even_in_every_quarter(ratios):
    for ratio in ratios:
        quarters = masks("grid", (16, 16), ratio, torch.arange(256), ratios).view(256, 2, 8, 2, 8).sum((2, 4))
        assert (quarters - 64 * ratio).abs().max() <= 3


@pytest.mark.parametrize(
    "coarse, fine", [((7, 7), (14, 14)), ((7, 7), (56, 56)), ((3, 5), (6, 20)), ((2, 3, 3), (4, 6, 9))]
)
def test_an_enlarged_mask_is_the_coarse_mask_enlarged(coarse, fine):
    order = SAMPLERS["grid"](coarse, (0.4,), key_of(samples=3))
    k = count("grid", coarse, 0.4)
    mask = torch.zeros(order.shape, dtype=torch.bool).scatter(1, order[:, :k], True).view(-1, *coarse)
    for dim, (h, H) in enumerate(zip(coarse, fine, strict=True), start=1):
        mask = mask.repeat_interleave(H // h, dim)
    kept = first(enlarge(order, coarse, fine), enlarged_count(k, coarse, fine))
    assert torch.equal(kept, mask.flatten(1).nonzero()[:, 1].view(3, -1))


@pytest.mark.parametrize(
    "coarse, fine", [((7, 7), (15, 29)), ((25, 42), (50, 84)), ((25, 42), (200, 334)), ((3,), (5,))]
)
def test_enlarging_with_remainders_keeps_counts_exact_and_sets_nested(coarse, fine):
    order = SAMPLERS["random"](coarse, (0.5,), key_of(samples=2))
    large = enlarge(order, coarse, fine)
    n = math.prod(fine)
    assert torch.equal(large.sort().values, torch.arange(n).expand(2, n))
    assert enlarged_count(math.prod(coarse), coarse, fine) == n


def test_the_last_cell_takes_the_remainder():
    assert enlarge(torch.tensor([[2, 0, 1]]), (3,), (7,)).tolist() == [[4, 5, 6, 0, 1, 2, 3]]


@pytest.mark.parametrize("coarse, fine", [((7, 7), (14, 6)), ((7, 7), (2, 7, 7))])
def test_enlarging_to_a_smaller_grid_is_refused(coarse, fine):
    text = f"cannot enlarge a mask from grid {coarse} to grid {fine}: no dimension may shrink or be added"
    with pytest.raises(ValueError, match=re.escape(text)):
        enlarge(torch.arange(49)[None], coarse, fine)


@pytest.mark.parametrize("ratios", [(0.5,), (0.25, 0.4, 1.0)])
@pytest.mark.parametrize("name", SAMPLERS)
def test_compiled_equals_eager_without_recompilation(name, ratios):
    def draw(step):
        order = SAMPLERS[name]((8, 4, 6), ratios, draw_key(3, step, 1, 2))
        return [first(order, count(name, (8, 4, 6), r)) for r in ratios], enlarge(order, (8, 4, 6), (8, 8, 13))

    torch.compiler.reset()
    compiled = torch.compile(draw, fullgraph=True, backend="eager")
    with torch._dynamo.config.patch(error_on_recompile=True):
        for step in map(torch.tensor, (0, 1, 2, 1000)):
            torch.testing.assert_close(compiled(step), draw(step), rtol=0, atol=0)


@pytest.mark.parametrize("name", SAMPLERS)
def test_compiled_equals_eager_when_ratio_and_size_change(name):
    """The compiler makes numbers that change symbolic; the sampler must turn them into constants again."""

    def draw(step, shape, ratio):
        return first(SAMPLERS[name](shape, (ratio,), draw_key(0, step, 0, 2)), count(name, shape, ratio))

    torch.compiler.reset()
    compiled = torch.compile(draw, fullgraph=True, backend="eager")
    for shape, ratio in [((8, 4, 6), 0.5), ((8, 4, 6), 0.4), ((9, 4, 6), 0.75)]:
        assert torch.equal(compiled(torch.tensor(3), shape, ratio), draw(torch.tensor(3), shape, ratio))


@pytest.mark.parametrize("name", SAMPLERS)
def test_numbers_that_meet_an_index_have_32_bits(name):
    """Inductor computes sums and products of an arange and numbers as a 32-bit index on a GPU."""

    def draw(step):
        return SAMPLERS[name]((8, 14, 14), (0.25, 0.4), draw_key(3, step, 1, 4))

    nodes = make_fx(draw)(torch.tensor(9)).graph.nodes
    sums = [node for node in nodes if node.target in (torch.ops.aten.add.Tensor, torch.ops.aten.mul.Tensor)]
    numbers = [arg for node in sums for arg in node.args if isinstance(arg, int)]
    assert len(numbers) > 8
    assert all(-(2**31) <= number < 2**31 for number in numbers)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("name", SAMPLERS)
def test_orders_are_the_same_on_every_device(name, compiled):
    for ratios in [(0.5,), (0.3,), (0.25, 0.4)]:

        def draw(step, ratios=ratios):
            return SAMPLERS[name]((8, 14, 14), ratios, draw_key(3, step, 1, 4))

        torch.compiler.reset()
        on_gpu = torch.compile(draw, fullgraph=True) if compiled else draw
        assert torch.equal(on_gpu(torch.tensor(9, device="cuda")).cpu(), draw(torch.tensor(9)))


def test_a_callable_is_a_sampler_of_positions():
    def ascending(shape, ratios, key):
        return torch.arange(math.prod(shape)).expand(len(key), -1)

    assert resolve(ascending) is ascending
    assert count(ascending, (3, 4, 5), 0.33) == 20
    assert masks(ascending, (2, 3), 0.5, key_of()).tolist() == [[[True] * 3, [False] * 3]]


def test_an_unknown_sampler_names_the_known_ones():
    with pytest.raises(
        ValueError, match=re.escape(f"unknown sampler 'gird'; use one of {list(SAMPLERS)} or a callable")
    ):
        resolve("gird")


@pytest.mark.parametrize("name", ["frames", "frames_jitter"])
@pytest.mark.parametrize("shape", [(14, 14), (12,)])
def test_frames_of_an_image_name_the_samplers_for_images(name, shape):
    names = ["grid", "random", "stratified", "checkerboard"]
    text = f"samplers of frames need a video grid (t, h, w), found {shape}; for images use one of {names}"
    with pytest.raises(ValueError, match=re.escape(text)):
        count(name, shape, 0.5)
    with pytest.raises(ValueError, match=re.escape(text)):
        SAMPLERS[name](shape, (0.5,), key_of())


@pytest.mark.parametrize(
    "name, shape, ratio, grid",
    [("grid", (2, 2), 0.1, (2, 2)), ("random", (7,), 0.05, (7,)), ("frames", (4, 9, 9), 0.1, (4, 1, 1))],
)
def test_too_small_an_image_says_what_would_do(name, shape, ratio, grid):
    cells = math.prod(grid)
    text = (
        f"image too small for the mask: ratio {ratio} keeps none of the {cells} cells of grid {grid}; "
        f"use a larger image, or a ratio above 1/{2 * cells} ({0.5 / cells:.4g}), which keeps one"
    )
    with pytest.raises(ValueError, match=re.escape(text)):
        count(name, shape, ratio)
    assert count(name, shape, 0.5 / cells + 1e-9) == math.prod(shape) // cells
