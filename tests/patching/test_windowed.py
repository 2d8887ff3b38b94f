"""Attention in windows: which positions are kept, what is saved, how it composes, what is refused."""

import copy

import pytest
import torch
import torch._dynamo
import torch.nn.functional as F
import transformers
from torch import nn
from transformers.models.donut.modeling_donut_swin import DonutSwinModel

import torchsbp
from torchsbp import SBPConfig
from torchsbp.patching.lean import TransformerBlock
from torchsbp.patching.site import Site

from ..counting import PRODUCTS, Operators, SavedBytes, counting_backend
from ..models import MODELS, WINDOWS
from ..oracle import check_definition
from ..steps import (
    GRID,
    assert_gradients,
    check_compiled,
    check_copies,
    check_left_as_it_was,
    distance,
    gradients_of,
    step,
)

SMALL = [
    "swin", "swin v2, own norm", "swin CR, padded, norms", "torchvision swin v2, padded", "video swin, padded",
    "transformers swin",
]  # fmt: skip


def test_kept_positions_are_equally_many_in_every_window():
    model = torchsbp.apply(WINDOWS["swin"].model(), keep_ratio=0.25)
    model(WINDOWS["swin"].images())
    for i, grid in enumerate((16, 8)):
        for j, shift in enumerate((0, 2)):
            kept = torchsbp.kept(model)[f"layers.{i}.blocks.{j}"]
            mask = torch.zeros(2, grid**2).scatter(1, kept, 1).view(2, grid, grid).roll((-shift, -shift), (1, 2))
            assert (mask.unflatten(1, (-1, 4)).unflatten(3, (-1, 4)).sum((2, 4)) == 4).all()


def test_masks_of_stages_and_shifts_are_one_mask():
    """Windows of 4×4 are whole cells of the last stage's grid, so no position is marginal."""
    model = torchsbp.apply(WINDOWS["swin"].model(), config=GRID)
    for _ in range(3):
        model(WINDOWS["swin"].images())
        fine, shifted, coarse, _ = (
            torch.zeros(2, n**2).scatter(1, kept, 1).view(2, 1, n, n)
            for n, kept in zip((16, 16, 8, 8), torchsbp.kept(model).values(), strict=True)
        )
        assert torch.equal(fine, shifted)
        assert torch.equal(fine, F.interpolate(coarse, scale_factor=2))


def test_default_blocks_of_video_and_whole_frames():
    family = WINDOWS["video swin"]
    model = family.model(depths=(2, 2, 6, 2), num_heads=(1, 1, 2, 2), window_size=[4, 4, 4])
    torchsbp.apply(model, keep_ratio=0.25, sampler="frames_jitter")
    model(family.images())
    kept = torchsbp.kept(model)
    assert list(kept) == [f"features.{i}.{j}" for i, depth in ((0, 2), (2, 2), (4, 4)) for j in range(depth)]
    frames = kept["features.0.0"].view(2, -1, 64) // 64
    assert (frames == frames[:, :, :1]).all()
    assert frames.shape[1] == 1


@pytest.mark.parametrize(
    "name", ["swin, padded", "torchvision swin v2, padded", "video swin, padded", "transformers swin, padded"]
)
def test_image_sizes_may_change(name):
    family = WINDOWS[name]
    model = torchsbp.apply(family.model(), keep_ratio=0.5)
    for more in (0, 8):
        torchsbp.set_step(model, 0)
        size = (*family.shape[1:-1], family.shape[-1] + more)
        x = torch.randn(2, 3, *size, dtype=torch.float64)
        _, found = step(model, x)
        fresh = family.model()
        check_definition(fresh, SBPConfig(keep_ratio=0.5), x)
        assert_gradients(found, gradients_of(fresh))


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("name", ["torchvision maxvit", "maxvit channels first", "coatnet"])
def test_maps_lie_in_memory_as_they_were_given(name, layout):
    """So that the convolutions that follow are those of the plain model."""
    model = torchsbp.apply(MODELS[name].model().to(memory_format=layout), keep_ratio=0.5)
    blocks = [its for its in model.modules() if isinstance(its, Site) and isinstance(its.sbp, TransformerBlock)]
    found = []
    for block in blocks:
        block.register_forward_hook(lambda block, given, y: found.append((given[0], y)))
    model(MODELS[name].images().to(memory_format=layout))
    maps = [pair for pair in found if pair[0].dim() == 4]
    assert maps
    assert all(y.is_contiguous(memory_format=layout) for x, y in maps if x.is_contiguous(memory_format=layout))


@pytest.mark.parametrize("recompute", [True, False])
def test_scale_weight_is_the_inverse_ratio(recompute):
    family = WINDOWS["swin"]
    options = {"keep_ratio": 0.25, "blocks": [1], "recompute": recompute}
    model, scaled = (torchsbp.apply(family.model(), scale=scale, **options) for scale in ("none", "weight"))
    (_, a), (_, b) = step(model, family.images()), step(scaled, family.images())
    for name in a:
        factor = 4 if name.startswith("layers.0.blocks.1.") else 1
        torch.testing.assert_close(b[name], factor * a[name], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("recompute", [True, False])
@pytest.mark.parametrize("name", SMALL)
def test_autocast_is_as_close_as_plain(name, recompute):
    family = WINDOWS[name]
    plain = family.model().float()
    if name.startswith("swin CR"):  # its own dropout would hide what is compared
        for block in [b for stage in plain.stages for b in stage.blocks]:
            block.attn.meta_mlp.drop1.p = 0.0
    # 0.999 of a window is the whole window, run on kept rows like any other part of it.
    model, sampled = (torchsbp.apply(copy.deepcopy(plain), keep_ratio=r, recompute=recompute) for r in (0.999, 0.5))
    ours = theirs = torch.zeros(2)
    for shift in range(3):  # of one input, errors of outputs and gradients are a matter of chance
        x = family.images().float() + 0.1 * shift
        exact_y, exact = step(plain, x)
        with torch.autocast("cpu", torch.bfloat16):
            y, found = step(model, x)
            sampled_y, sampled_found = step(sampled, x)
            expected_y, expected = step(plain, x)
        assert torch.equal(sampled_y, y)
        assert all(g.dtype == torch.float32 and g.norm() > 0 for g in sampled_found.values())
        ours = ours + torch.stack([(y - exact_y).norm(), distance(found, exact)])
        theirs = theirs + torch.stack([(expected_y - exact_y).norm(), distance(expected, exact)])
    assert (ours <= 1.5 * theirs).all()


def saved(model: nn.Module, x: torch.Tensor) -> int:
    with SavedBytes(model, x) as count:
        model(x)
    return count.total


@pytest.mark.parametrize("name", ["swin", "swin v2", "torchvision swin", "torchvision swin v2"])
def test_a_recomputed_block_saves_its_input_and_kept_rows_of_attention(name):
    """Two more blocks, with and without shift: B N C numbers more for each, of attention the kept rows of its output
    and log-sum-exp (C + H numbers each), and the bias. In version 2 that is a network's, whose hidden layer and table
    are saved, and there is the scale of cosines, and a bias of queries, keys and values that is put together."""
    family, rows = WINDOWS[name], 2 * 256
    for blocks, ratio in (([0, 1], 1), ([0, 1, 2, 3], 0.5)):
        short = torchsbp.apply(family.model(depths=(2, 2)), config=GRID, blocks=[0, 1])
        long = torchsbp.apply(family.model(depths=(4, 2)), config=GRID, blocks=blocks)
        attention = int(ratio * rows) * (12 + 2) + 2 * 16 * 16
        network = 7 * 7 * (512 + 2) + 2 + 3 * 12 if "v2" in name else 0
        more = (saved(long, family.images()) - saved(short, family.images())) // 8
        assert more == 2 * (rows * 12 + attention + network)


@pytest.mark.parametrize("name", SMALL)
def test_copies_train_their_own_weights(name):
    model = torchsbp.apply(WINDOWS[name].model(drop_path=0.5), keep_ratio=0.5)
    check_copies(model, WINDOWS[name].images())


@pytest.mark.parametrize("name", SMALL)
def test_eval_no_grad_and_remove_leave_the_model_as_it_was(name):
    check_left_as_it_was(WINDOWS[name].model(drop_path=0.5), WINDOWS[name].images(), keep_ratio=0.5)


@pytest.mark.parametrize("name", ["swin", "swin CR, padded, norms"])
def test_checkpointing_repeats_the_same_masks(name):
    model = torchsbp.apply(WINDOWS[name].model(drop_path=0.5), keep_ratio=0.5)
    x = WINDOWS[name].images()
    _, expected = step(model, x)
    torchsbp.set_step(model, 0)
    model.set_grad_checkpointing()
    assert_gradients(step(model, x)[1], expected)


@pytest.mark.parametrize("name", SMALL)
def test_frozen_parts_get_nothing_and_leave_the_rest_as_it_is(name):
    x = WINDOWS[name].images()
    model = torchsbp.apply(WINDOWS[name].model(drop_path=0.5), keep_ratio=0.5)
    _, everything = step(model, x)
    torchsbp.set_step(model, 0)
    for i, p in enumerate(model.parameters()):
        p.requires_grad_(i % 3 == 1)
    _, found = step(model, x)
    assert 0 < len(found) < len(everything)
    assert_gradients(found, {key: everything[key] for key in found})


@pytest.mark.parametrize("recompute", [True, False])
def test_estimate_counts_what_is_saved(recompute):
    config = SBPConfig(keep_ratio=0.5, recompute=recompute)
    model = WINDOWS["swin, padded"].model().float()
    x = WINDOWS["swin, padded"].images().float()
    found = torchsbp.estimate(model, x.shape, config, precision="float32", device="cpu")
    torchsbp.apply(model, config=config)
    with SavedBytes(model, x) as expected:
        F.cross_entropy(model(x), torch.zeros(2, dtype=torch.long))
    assert found.saved_bytes == expected.total


@pytest.mark.parametrize(
    "name, options, message",
    [
        ("swin", {"proj_drop_rate": 0.1}, r"attn.proj_drop is Dropout\(p=0.1\), which is not supported"),
        ("swin v2", {"attn_drop_rate": 0.1}, r"attn.attn_drop is Dropout\(p=0.1\), which is not supported"),
        ("torchvision swin", {"attention_dropout": 0.1}, r"attn.attention_dropout is 0.1, which is not supported"),
        ("video swin", {"dropout": 0.1}, r"attn.dropout is 0.1, which is not supported"),
        (
            "transformers swin",
            {"attention_probs_dropout_prob": 0.1},
            r"attention.attention_dropout is 0.1, which is not",
        ),
        ("transformers swin v2", {"hidden_dropout_prob": 0.1}, r"output.dropout is Dropout\(p=0.1\), which is not"),
    ],
)
def test_dropout_is_refused_by_name(name, options, message):
    model = WINDOWS[name].model(**options)
    with pytest.raises(ValueError, match=message):
        torchsbp.apply(model)
    assert not any(isinstance(m, Site) for m in model.modules())


@pytest.mark.parametrize(
    "name, rule, allowed", [("swin v2", "head", "'query', 'qkv', 'exact'"), ("swin v2, own norm", "qkv", "'query'")]
)
def test_rules_that_windows_do_not_have(name, rule, allowed):
    message = rf"layers.0.blocks.0: attention='{rule}' is not allowed here; allowed: {allowed}\n"
    with pytest.raises(ValueError, match=message):
        torchsbp.apply(WINDOWS[name].model(), attention=rule)


def test_another_attention_is_refused_by_name():
    model = WINDOWS["swin"].model()
    model.layers[0].blocks[1].attn = nn.Identity()
    with pytest.raises(ValueError, match=r"layers.0.blocks.1: attn is torch.nn.*Identity; supported: timm.*Attention"):
        torchsbp.apply(model)


def test_transformers_backbone_and_windows_it_does_not_adapt():
    sizes = {"image_size": 32, "patch_size": 4, "window_size": 4, "embed_dim": 12, "out_features": ["stage1", "stage2"]}
    config = transformers.SwinConfig(depths=[2, 2], num_heads=[2, 3], **sizes)
    model = torchsbp.apply(transformers.SwinBackbone(config).train(), 0.5, blocks=[0, 1])
    x = torch.randn(2, 3, 32, 32)
    sum(y.square().sum() for y in model(x).feature_maps).backward()
    assert all(positions.shape == (2, 32) for positions in torchsbp.kept(model).values())
    torchsbp.apply(torchsbp.remove(model), 0.5, blocks=1.0)
    with pytest.raises(ValueError, match=r"called with always_partition=True for a grid \(4, 4\) no larger than"):
        model(x)


@pytest.mark.parametrize("act", ["gelu", "mish"])  # known part by part, or run again
def test_windows_that_donut_does_not_adapt(act):
    """Its stages pass ``always_partition`` on by position."""
    torch.manual_seed(0)
    sizes = {"image_size": 32, "patch_size": 4, "window_size": 8, "embed_dim": 12, "depths": [2], "num_heads": [2]}
    plain = DonutSwinModel(transformers.DonutSwinConfig(**sizes, hidden_act=act, drop_path_rate=0.0)).double().train()
    model = torchsbp.apply(copy.deepcopy(plain), 1.0)

    def states(model):
        x = torch.randn(2, 3, 24, 40, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
        return model.encoder(*model.embeddings(x), always_partition=True).last_hidden_state

    torch.testing.assert_close(states(model), states(plain), rtol=1e-12, atol=1e-12)
    torchsbp.apply(torchsbp.remove(model), 0.5, blocks=1.0)
    with pytest.raises(ValueError, match=r"called with always_partition=True for a grid \(6, 10\) no larger than"):
        states(model)


def test_compiled_forward_has_no_second_run():
    """Full graph, new masks in every step, no recompilation; forward has no more products than plain training."""
    backend, products = counting_backend(PRODUCTS)
    family = WINDOWS["torchvision swin, padded"]
    model, x = family.model(depths=(2, 1), drop_path=0.5), family.images()
    with Operators() as plain:
        model(x)
    check_compiled(torchsbp.apply(model, keep_ratio=0.5, blocks=[0, 1]), x, backend, steps=3)
    assert products == [plain.count(PRODUCTS)]
