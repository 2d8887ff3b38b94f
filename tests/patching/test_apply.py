"""apply and remove on lean models: state untouched, masks by step, copies, checkpointing, frozen parts."""

import copy
import io
import pickle

import pytest
import timm
import torch
from torch import nn

import torchsbp
from torchsbp import SBPConfig, schedules

from ..counting import SavedBytes
from ..models import LEAN, Tiny, images, tiny_vit
from ..oracle import check_step
from ..steps import (
    GRID,
    assert_gradients,
    check_left_as_it_was,
    entry_of,
    gradients_of,
    loss_of,
    sampled_in,
    step,
)


@pytest.fixture(params=LEAN)
def family(request) -> Tiny:
    return LEAN[request.param]


def test_ratio_one_equals_plain_training_step_by_step(family):
    plain = family.model()
    model = torchsbp.apply(copy.deepcopy(plain), keep_ratio=1.0)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-3) for m in (plain, model)]
    for _ in range(3):
        (y, g), (expected_y, expected_g) = step(model, images()), step(plain, images())
        torch.testing.assert_close(y, expected_y, rtol=1e-10, atol=1e-10)
        assert_gradients(g, expected_g, rtol=1e-8)
        for optimizer in optimizers:
            optimizer.step()


def test_eval_no_grad_and_remove_leave_the_model_as_it_was(family):
    check_left_as_it_was(family.model(), images(), keep_ratio=0.25)


@pytest.mark.parametrize("how", ["deepcopy", "pickle", "torch.save"])
def test_copies_train_their_own_weights(family, how):
    model = torchsbp.apply(family.model(), keep_ratio=0.5)
    _, gradients = step(model, images())
    torchsbp.set_step(model, 0)
    if how == "deepcopy":
        twin = copy.deepcopy(model)
    elif how == "pickle":
        twin = pickle.loads(pickle.dumps(model))
    else:
        buffer = io.BytesIO()
        torch.save(model, buffer)
        twin = torch.load(io.BytesIO(buffer.getvalue()), weights_only=False)
    model.zero_grad()
    _, twin_gradients = step(twin, images())
    assert all(p.grad is None for p in model.parameters())
    assert all(torch.equal(twin_gradients[name], g) for name, g in gradients.items())
    assert entry_of(twin).sbp.masks is not entry_of(model).sbp.masks


def test_masks_are_a_pure_function_of_seed_and_step(family):
    def masks(seed, start):
        model = torchsbp.apply(family.model(), keep_ratio=0.25, seed=seed, sampler="random")
        torchsbp.set_step(model, start)
        found = []
        for _ in range(3):
            step(model, images(1))
            found.append(torch.cat([k.flatten() for k in torchsbp.kept(model).values()]))
        return found

    first, again, later, other = masks(0, 0), masks(0, 0), masks(0, 1), masks(1, 0)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert torch.equal(first[1], later[0])
    assert not torch.equal(first[0], first[1])
    assert not torch.equal(first[0], other[0])


def test_locations_agree_across_stages():
    model = torchsbp.apply(LEAN["convnext"].model(), config=GRID)
    step(model, images(1))
    maps = {}
    for name, positions in torchsbp.kept(model).items():
        factor = {"stages.0": 4, "stages.1": 2, "stages.2": 1}[name[:8]]
        maps[name] = torch.zeros(4 * 6 * factor**2, dtype=torch.bool).index_fill(0, positions[0], True)
        maps[name] = maps[name].view(4 * factor, 6 * factor)
    coarse = maps["stages.2.blocks.0"]
    assert coarse.sum() == 12
    for fine in maps.values():
        assert torch.equal(fine, coarse.repeat_interleave(len(fine) // 4, 0).repeat_interleave(len(fine) // 4, 1))


def test_default_blocks_are_the_papers():
    def sampled(name, **options):
        with torch.device("meta"):
            model = timm.create_model(name)
        torchsbp.apply(model, **options)
        return set(sampled_in(model))

    assert sampled("vit_tiny_patch16_224") == {f"blocks.{i}" for i in range(4, 12)}
    tiny = {f"stages.{s}.blocks.{i}" for s, n in enumerate((3, 3, 6)) for i in range(n)}
    assert sampled("convnext_tiny") == tiny
    downs = {"stages.1.downsample", "stages.2.downsample"}
    base = {f"stages.{s}.blocks.{i}" for s, n in enumerate((3, 3, 21)) for i in range(n)}
    assert sampled("convnext_base", config=SBPConfig.preset("paper")) == base | downs
    assert sampled("vit_tiny_patch16_224", blocks=0.25) == {f"blocks.{i}" for i in range(9, 12)}
    assert sampled("vit_tiny_patch16_224", blocks=[0, -1]) == {"blocks.0", "blocks.11"}
    assert sampled("vit_tiny_patch16_224", blocks=["blocks.1*"]) == {"blocks.1", "blocks.10", "blocks.11"}
    assert sampled("vit_tiny_patch16_224", blocks=lambda name, block: name == "blocks.3") == {"blocks.3"}


def test_the_exact_preset_has_the_gradients_of_full_backpropagation_and_saves_less():
    plain = LEAN["vit"].model()
    exact = torchsbp.apply(copy.deepcopy(plain), config=SBPConfig.preset("exact"))
    x = images()
    full = torchsbp.measure(plain, lambda: plain(x).sum().backward())
    lean = torchsbp.measure(exact, lambda: exact(x).sum().backward())
    for p, q in zip(plain.parameters(), exact.parameters(), strict=True):
        torch.testing.assert_close(q.grad, p.grad, rtol=1e-5, atol=1e-5 * float(p.grad.abs().max()))
    assert lean.saved_bytes < 0.6 * full.saved_bytes


def test_frozen_parts_get_no_gradient_and_the_rest_keeps_its_own(family):
    model = torchsbp.apply(family.model(), keep_ratio=0.5)
    _, everything = step(model, images())
    torchsbp.set_step(model, 0)
    for i, p in enumerate(model.parameters()):
        p.requires_grad_(i % 3 == 1)
    _, some = step(model, images())
    assert 0 < len(some) < len(everything)
    for name, g in some.items():
        torch.testing.assert_close(g, everything[name], rtol=1e-10, atol=1e-12)


def test_frozen_stem_in_eval_mode_still_gets_a_mask_every_step():
    model = torchsbp.apply(LEAN["vit"].model(), keep_ratio=0.5, sampler="random")
    model.patch_embed.eval().requires_grad_(False)
    step(model, images())
    first = torchsbp.kept(model)["blocks.2"]
    step(model, images())
    assert not torch.equal(first, torchsbp.kept(model)["blocks.2"])


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("part", ["blocks", "model"])
def test_checkpointing_repeats_the_same_masks(family, part, reentrant):
    model = torchsbp.apply(family.model(), keep_ratio=0.5)
    _, expected = step(model, images())
    torchsbp.set_step(model, 0)
    if part == "blocks" and hasattr(model, "set_grad_checkpointing") and not reentrant:
        model.set_grad_checkpointing()
        _, found = step(model, images())
    else:
        model.zero_grad()
        torch.manual_seed(2)
        x = images().requires_grad_()
        y = torch.utils.checkpoint.checkpoint(model, x, use_reentrant=reentrant)
        loss_of(y).backward()
        found = gradients_of(model)
    assert_gradients(found, expected)
    assert entry_of(model).sbp_step == 1


def test_gradient_accumulation_adds_up(family):
    model = torchsbp.apply(family.model(), keep_ratio=0.5, per_sample=False)
    parts = []
    for i in range(2):
        torchsbp.set_step(model, i)
        parts.append(step(model, images())[1])
    torchsbp.set_step(model, 0)
    model.zero_grad()
    for _ in range(2):
        torch.manual_seed(2)
        y = model(images())
        loss_of(y).backward()
    total = gradients_of(model)
    assert_gradients(total, {name: parts[0][name] + parts[1][name] for name in total})


def test_changing_image_size_between_steps():
    model = LEAN["convnext"].model()
    plain = copy.deepcopy(model)
    torchsbp.apply(model, keep_ratio=0.5)
    for size in ((64, 96), (70, 130), (96, 64)):
        x = torch.randn(2, 3, *size, dtype=torch.float64)
        check_step(model, copy.deepcopy(plain), x)


def test_exact_downsampling_layers_are_no_sites_and_save_their_input():
    saved, x = {}, images()
    for exact in (False, True):
        model = torchsbp.apply(LEAN["convnext"].model(), config=GRID, blocks=1.0, exact_downsampling=exact)
        assert any("downsample" in name for name in sampled_in(model)) != exact
        with SavedBytes(model, x) as count:
            model(x)
        saved[exact] = count.total
    layers = [
        (len(x) * 8 * 12, 8),
        (len(x) * 4 * 6, 12),
        (len(x) * 2 * 3, 16),
    ]  # outputs, channels of their 2×2 patches
    assert saved[True] - saved[False] == sum(8 * (n // 2 * 4 * c) for n, c in layers)  # and no indices


@pytest.mark.parametrize(
    "options, more",
    [
        ({"scale": "rows"}, 0),
        ({"per_sample": "balanced"}, 0),
        ({"per_block": True}, 8 * 3 * (1 + 12)),  # the indices of a second block
    ],
    ids=str,
)
def test_what_an_estimator_saves_more(options, more):
    saved, x = [], images()
    for its in ({}, options):
        model = torchsbp.apply(LEAN["vit"].model(), config=GRID, blocks=[1, 2], **its)
        with SavedBytes(model, x) as count:
            model(x)
        saved.append(count.total)
    assert saved[1] - saved[0] == more


def test_scale_weight_is_the_inverse_ratio():
    model = LEAN["convnext"].model()
    plain, scaled = copy.deepcopy(model), copy.deepcopy(model)
    torchsbp.apply(plain, 0.25, config=GRID, blocks=[2])
    torchsbp.apply(scaled, 0.25, config=GRID, blocks=[2], scale="weight")
    (_, a), (_, b) = step(plain, images()), step(scaled, images())
    name = "stages.2.blocks.0.mlp.fc1.weight"
    torch.testing.assert_close(b[name], 4 * a[name], rtol=1e-12, atol=0)
    torch.testing.assert_close(b["stem.0.weight"], a["stem.0.weight"], rtol=1e-12, atol=0)


@pytest.mark.parametrize(("scope", "complete"), [("branch", True), ("block", False)])
def test_scale_weight_leaves_attention_alone_that_hears_from_all_rows(scope, complete):
    options = {"attention": "exact", "blocks": [2], "scope": scope}
    (_, a), (_, b) = (
        step(torchsbp.apply(LEAN["vit"].model(), 0.25, config=GRID, scale=scale, **options), images())
        for scale in ("none", "weight")
    )
    inverse = 25 / 7  # of 24 patches and a class token
    attention = 1 if complete else inverse
    for part, factor in (("attn.qkv", attention), ("attn.proj", attention), ("mlp.fc1", inverse)):
        name = f"blocks.2.{part}.weight"
        torch.testing.assert_close(b[name], factor * a[name], rtol=1e-12, atol=0)


def test_schedule_follows_set_step_and_is_refused_without_it():
    schedule = schedules.Milestones(((0, 0.25), (10, 1.0)))
    model = torchsbp.apply(LEAN["vit"].model(), keep_ratio=schedule)
    with pytest.raises(RuntimeError, match=r"call torchsbp.set_step\(model, step\) before each step"):
        step(model, images())
    counts = []
    for i in (0, 9, 10):
        torchsbp.set_step(model, i)
        step(model, images())
        counts.append(torchsbp.kept(model)["blocks.2"].shape[1])
    assert counts == [1 + 6, 1 + 6, 1 + 24]


def test_a_wrapped_backbone_is_found_and_named():
    class Wrapper(nn.Module):
        def __init__(self):
            super().__init__()
            self.backbone = LEAN["vit"].model()

        def forward(self, x):
            return self.backbone.forward_features(x).mean(1)

    model = torchsbp.apply(Wrapper(), keep_ratio=0.5)
    step(model, images())
    assert set(torchsbp.kept(model)) == {"backbone.blocks.1", "backbone.blocks.2"}


@pytest.mark.parametrize("start", [None, 5])
def test_a_step_counter_from_the_meta_device_begins_at_zero_or_where_it_is_set(start):
    """Its memory comes without values; training begins with the masks of step 0, or those of the step that was set."""
    expected = torchsbp.apply(LEAN["vit"].model(), 0.5, sampler="random")
    with torch.device("meta"):
        model = torchsbp.apply(tiny_vit(), 0.5, sampler="random")
    model.to_empty(device="cpu").double().train().load_state_dict(expected.state_dict())
    entry_of(model).sbp_step.fill_(12345)  # what memory may hold
    if start is not None:
        torchsbp.set_step(model, start)
        torchsbp.set_step(expected, start)
        assert entry_of(model).sbp_step == start
    for count in (1, 2):
        (y, found), (expected_y, gradients) = step(model, images()), step(expected, images())
        assert torch.equal(y, expected_y)
        assert all(torch.equal(found[name], g) for name, g in gradients.items())
        assert torch.equal(torchsbp.kept(model)["blocks.2"], torchsbp.kept(expected)["blocks.2"])
        assert entry_of(model).sbp_step == (start or 0) + count


def test_no_grad_forward_leaves_the_last_masks():
    model = torchsbp.apply(LEAN["vit"].model(), keep_ratio=0.5, sampler="random")
    step(model, images())
    kept = torchsbp.kept(model)["blocks.2"]
    with torch.no_grad():
        model(images(1))
    assert torch.equal(torchsbp.kept(model)["blocks.2"], kept)
    assert entry_of(model).sbp_step == 1


def test_rms_norm_in_half_precision_does_not_overflow():
    plain = tiny_vit(norm_layer="rmsnorm").half().train()
    with torch.no_grad():
        plain.pos_embed.add_(torch.randn_like(plain.pos_embed) * 300)
    model = torchsbp.apply(copy.deepcopy(plain), keep_ratio=1.0)
    (_, found), (_, expected) = step(model, images().half()), step(plain, images().half())
    name = "blocks.0.norm1.weight"
    assert (found[name] - expected[name]).norm() < 0.05 * expected[name].norm()
