"""Blocks run again on maps: CoAtNet, MaxViT, and ConvNeXt of any norm, behind its convolution."""

import copy

import pytest
import timm
import torch
import torch._dynamo
import torch.nn.functional as F

import torchsbp
from torchsbp import SBPConfig
from torchsbp.patching.site import Site

from ..counting import Operators, SavedBytes, counting_backend
from ..models import HYBRIDS, POINTWISE, images
from ..steps import (
    GRID,
    assert_gradients,
    check_compiled,
    check_copies,
    check_left_as_it_was,
    distance,
    sampled_in,
    step,
)

MODELS = HYBRIDS | POINTWISE

LAYERS = tuple(getattr(torch.ops.aten, name).default for name in ("mm", "addmm", "convolution"))


def test_default_blocks_are_the_early_stages():
    def sampled(name: str) -> list[str]:
        with torch.device("meta"):
            model = torchsbp.apply(timm.create_model(name), keep_ratio=0.5)
        return sampled_in(model)

    assert sampled("coatnet_0_224") == [f"stages.2.blocks.{i}" for i in range(3)]
    units = [f"stages.{s}.blocks.{i}.attn_{kind}" for s in range(3) for i in range(2) for kind in ("block", "grid")]
    units += [f"stages.2.blocks.{i}.attn_{kind}" for i in (2, 3) for kind in ("block", "grid")]
    assert sampled("maxvit_tiny_tf_224") == units[:15]
    assert sampled("coatnext_nano_rw_224")[:2] == ["stages.0.blocks.0", "stages.0.blocks.1"]
    assert "stages.0.blocks.0.conv" in sampled("maxxvit_rmlp_nano_rw_256")


def test_locations_agree_across_stages_whose_first_block_shrinks():
    model = torchsbp.apply(MODELS["maxvit tf"].model(), config=GRID)
    step(model, images(1))
    kept = torchsbp.kept(model)
    maps = {}
    for stage, factor in enumerate((4, 2, 1)):
        positions = kept[f"stages.{stage}.blocks.0.attn_grid"][0]
        maps[factor] = torch.zeros(24 * factor**2, dtype=torch.bool).index_fill(0, positions, True)
        maps[factor] = maps[factor].view(4 * factor, 6 * factor)
    assert maps[1].sum() == 12
    for factor, fine in maps.items():
        assert torch.equal(fine, maps[1].repeat_interleave(factor, 0).repeat_interleave(factor, 1))


@pytest.mark.parametrize("recompute", [True, False])
@pytest.mark.parametrize("name, block, exact", [("coatnet", 0, "shortcut"), ("convnext v2", 2, "conv_dw")])
def test_scale_weight_is_the_inverse_ratio_inside_the_branches(name, block, exact, recompute):
    options = {"config": GRID, "keep_ratio": 0.25, "blocks": [block], "recompute": recompute}
    model = torchsbp.apply(MODELS[name].model(), **options)
    scaled = torchsbp.apply(MODELS[name].model(), scale="weight", **options)
    (_, a), (_, b) = step(model, images(2)), step(scaled, images(2))
    branch = [n for n in a if n.startswith("stages.2.blocks.0.") and exact not in n]
    assert len(branch) > 5
    for n in a:
        factor = 4 if n in branch or n.startswith("stages.2.downsample") else 1
        torch.testing.assert_close(b[n], factor * a[n], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("recompute", [True, False])
@pytest.mark.parametrize("name", ["coatnet", "maxxvit v2", "convnext v2", "convnext simple norm"])
def test_autocast_gradients_are_as_close_as_plain_ones(name, recompute):
    plain = MODELS[name].model().float()
    model = torchsbp.apply(copy.deepcopy(plain), keep_ratio=1.0, recompute=recompute)
    sampled = torchsbp.apply(copy.deepcopy(plain), keep_ratio=0.5, recompute=recompute)
    _, exact = step(copy.deepcopy(plain), images(2).float())
    with torch.autocast("cpu", torch.bfloat16):
        y, found = step(model, images(2).float())
        sampled_y, sampled_found = step(sampled, images(2).float())
        expected_y, expected = step(plain, images(2).float())
    torch.testing.assert_close(y, expected_y, rtol=0, atol=1e-5 if name in POINTWISE else 2e-2)
    torch.testing.assert_close(sampled_y, y, rtol=0, atol=0 if name in POINTWISE else 2e-2)
    assert sampled_found.keys() == exact.keys()
    assert all(g.dtype == torch.float32 and g.norm() > 0 for g in sampled_found.values())
    assert distance(found, exact) <= 1.5 * distance(expected, exact)


def saved(name: str, depth: int, blocks: list[str]) -> int:
    model = torchsbp.apply(MODELS[name].model(depths=(1, 1, depth, 1)), config=GRID, blocks=blocks)
    x = images(2)
    with SavedBytes(model, x) as count:
        model(x)
    return count.total


@pytest.mark.parametrize(
    "name, blocks, numbers",
    [
        ("coatnet, own activation", ["stages.2.*"], 24 * 32),  # the input of the block
        (
            "convnext v2",
            ["stages.2.*"],
            24 * 16 + 12 * 16 + 64,
        ),  # that of its convolution, kept rows of the output, a statistic
        ("convnext simple norm", ["stages.2.*"], 24 * 16 + 12 * 16),
    ],
)
def test_one_more_block_saves_what_the_docs_say(name, blocks, numbers):
    assert saved(name, 3, blocks) - saved(name, 2, blocks) == 8 * 2 * numbers


def test_one_more_lean_block_saves_its_input_and_kept_rows_of_attention():
    """Also the bias, where rows are in its one window, and the projection to queries, keys and values, whose outputs
    come head by head."""
    rows, kept, channels, heads = 2 * 24, 2 * 12, 32, 4
    numbers = rows * channels + kept * (channels + heads) + heads * 24**2 + 24 + kept + 3 * channels * (channels + 1)
    assert saved("coatnet", 3, ["stages.2.*"]) - saved("coatnet", 2, ["stages.2.*"]) == 8 * numbers


def test_what_dropped_rows_save_in_windows():
    """Sampled, the two units of a MaxViT block don't save the attention output and log-sum-exp of dropped rows."""
    sampled, exact = (
        saved("maxvit", 3, [stage]) - saved("maxvit", 2, [stage]) for stage in ("stages.2.*", "stages.1.*")
    )
    assert exact - sampled == 8 * 2 * (2 * 24 - 2 * 12) * (32 + 4)


@pytest.mark.parametrize(
    "name", ["coatnet relative mlp", "maxxvit relative mlp", "convnext v2", "convnext simple norm"]
)
def test_copies_train_their_own_weights(name):
    check_copies(torchsbp.apply(MODELS[name].model(drop_path=0.5), keep_ratio=0.5), images(2))


@pytest.mark.parametrize("name", ["coatnet", "maxvit", "convnext v2", "convnext simple norm"])
def test_eval_no_grad_and_remove_leave_the_model_as_it_was(name):
    check_left_as_it_was(MODELS[name].model(drop_path=0.5), images(2), keep_ratio=0.5)


@pytest.mark.parametrize("name", ["coatnext", "maxxvit v2", "convnext v2"])
def test_checkpointing_repeats_the_same_masks(name):
    model = torchsbp.apply(MODELS[name].model(drop_path=0.5), keep_ratio=0.5)
    _, expected = step(model, images(2))
    torchsbp.set_step(model, 0)
    model.set_grad_checkpointing()
    assert_gradients(step(model, images(2))[1], expected)


def test_estimate_counts_what_is_saved():
    config = SBPConfig(keep_ratio=0.5)
    model = MODELS["convnext v2"].model().float()
    x = images(2).float()
    found = torchsbp.estimate(model, x.shape, config, precision="float32", device="cpu")
    torchsbp.apply(model, config=config)
    with SavedBytes(model, x) as expected:
        F.cross_entropy(model(x), torch.zeros(2, dtype=torch.long))
    assert found.saved_bytes == expected.total


@pytest.mark.parametrize("name", ["coatnet", "convnext v2"])
def test_compiled_forward_has_no_second_run(name):
    """Full graph, new masks in every step, no recompilation; forward has no more layers than plain training."""
    backend, layers = counting_backend(LAYERS)
    model = MODELS[name].model(drop_path=0.5, depths=(1, 1, 1, 1))
    with Operators() as plain:
        model(images(2))
    check_compiled(torchsbp.apply(model, keep_ratio=0.5), images(2), backend, steps=2)
    assert layers == [plain.count(LAYERS)]


@pytest.mark.parametrize(
    "name, options, message",
    [
        (
            "coatnet_bn_0_rw_224",
            {},
            r"stages.2.blocks.0: norm1.norm is BatchNorm2d, whose statistics would be those of",
        ),
        (
            "coatnet_0_rw_224",
            {"transformer_proj_drop": 0.1},
            r"stages.2.blocks.0: mlp.drop is Dropout\(p=0.1\), which is",
        ),
        (
            "maxvit_tiny_rw_224",
            {"transformer_attn_drop": 0.1},
            r"attn_block: attn.attn_drop is Dropout\(p=0.1\), which is",
        ),
        (
            "coatnet_0_rw_224",
            {"block_type": ("C",) * 4},
            r"nothing to sample, none of the blocks is one of timm.models.max",
        ),
        (
            "convnext_atto",
            {"norm_layer": "batchnorm2d"},
            r"stages.0.blocks.0: norm is BatchNorm2d, whose statistics would",
        ),
    ],
)
def test_what_cannot_run_again_is_refused_by_name(name, options, message):
    with torch.device("meta"):
        model = timm.create_model(name, **options)
    with pytest.raises(ValueError, match=message):
        torchsbp.apply(model)
    assert not any(isinstance(m, Site) for m in model.modules())


def test_hooks_run_on_blocks_and_are_refused_inside():
    model = MODELS["convnext v2"].model()
    calls = []
    for module in (model.stages[0].blocks[0], model.stages[0].blocks[0].conv_dw):
        module.register_forward_hook(lambda *args: calls.append(1))
    handle = model.stages[0].blocks[0].mlp.grn.register_forward_hook(lambda *args: None)
    with pytest.raises(ValueError, match=r"stages.0.blocks.0: mlp.grn has hooks, which would run twice in training"):
        torchsbp.apply(model)
    handle.remove()
    step(torchsbp.apply(model, 0.5), images(2))
    assert len(calls) == 2
