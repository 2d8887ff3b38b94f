"""apply on the libraries' models: forward exact, gradients equal the oracle, state untouched."""

import copy
import io
import pickle
import subprocess
import sys

import pytest
import timm
import torch
from torch import nn

import torchsbp
from torchsbp import SBPConfig, schedules

from .families import (
    FAMILIES,
    RATIOS,
    Family,
    assert_gradients,
    check_against_oracle,
    entry_of,
    images,
    step,
    tiny_vit,
)
from .oracle import install


@pytest.fixture(params=FAMILIES)
def family(request) -> Family:
    return FAMILIES[request.param]


@pytest.mark.parametrize("ratio", RATIOS)
@pytest.mark.parametrize("rule", ["query", "qkv", "head"])
def test_gradients_equal_the_oracle(family, rule, ratio):
    if rule != "query" and not family.attention:
        pytest.skip("no attention in this family")
    check_against_oracle(family.model(), SBPConfig(keep_ratio=ratio, attention=rule), images())


@pytest.mark.parametrize(
    "options",
    [
        {"scope": "block"},
        {"recompute": False},
        {"recompute": 0.5},
        {"per_sample": True, "sampler": "random"},
        {"keep_ratio": (0.25, 0.75)},
        {"blocks": 1.0},
        {"attention": "qkv", "scope": "block", "recompute": False, "per_sample": True},
    ],
    ids=str,
)
def test_options_equal_the_oracle(family, options):
    check_against_oracle(family.model(), SBPConfig(**{"keep_ratio": 0.5} | options), images())


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


def test_forward_is_bit_identical_in_float32(family):
    plain = family.model().float()
    model = torchsbp.apply(copy.deepcopy(plain), keep_ratio=0.5)
    x = images().float()
    difference = (step(model, x)[0] - step(plain, x)[0]).abs().max()
    # A matrix product sums in another order than a 1×1 convolution.
    conv_mlp = family.options.get("conv_mlp", False)
    assert difference < 1e-5 if conv_mlp else difference == 0


def test_eval_and_no_grad_change_nothing(family):
    plain = family.model()
    model = torchsbp.apply(copy.deepcopy(plain), keep_ratio=0.25)
    before = entry_of(model).sbp_step.clone()
    with torch.no_grad():
        torch.manual_seed(0)
        expected = plain(images())
        torch.manual_seed(0)
        assert torch.equal(model(images()), expected)
    assert torch.equal(entry_of(model).sbp_step, before)
    model.eval(), plain.eval()
    (y, gradients), (expected, expected_gradients) = step(model, images()), step(plain, images())
    assert torch.equal(y, expected)
    assert all(torch.equal(gradients[name], g) for name, g in expected_gradients.items())


def test_state_is_untouched_and_remove_restores_everything(family):
    model = family.model()
    keys, classes = list(model.state_dict()), [type(m) for m in model.modules()]
    parameters, attributes = list(model.parameters()), [set(m.__dict__) for m in model.modules()]
    buffers = [name for name, _ in model.named_buffers()]
    torchsbp.apply(model, keep_ratio=0.5)
    assert list(model.state_dict()) == keys
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    step(model, images())
    torchsbp.remove(model)
    assert [type(m) for m in model.modules()] == classes
    assert [set(m.__dict__) for m in model.modules()] == attributes
    assert [name for name, _ in model.named_buffers()] == buffers


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
    model = torchsbp.apply(FAMILIES["convnext"].model(), keep_ratio=0.5)
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


def test_recipes_choose_the_papers_blocks():
    def sampled(name, **options):
        with torch.device("meta"):
            model = timm.create_model(name)
        torchsbp.apply(model, **options)
        return set(entry_of(model).sbp.masks.names)

    assert sampled("vit_tiny_patch16_224") == {f"blocks.{i}" for i in range(4, 12)}
    downs = {"stages.1.downsample", "stages.2.downsample"}
    tiny = {f"stages.{s}.blocks.{i}" for s, n in enumerate((3, 3, 6)) for i in range(n)}
    assert sampled("convnext_tiny") == tiny | downs
    base = {f"stages.{s}.blocks.{i}" for s, n in enumerate((3, 3, 21)) for i in range(n)}
    assert sampled("convnext_base", config=SBPConfig.preset("paper")) == base | downs
    assert sampled("vit_tiny_patch16_224", blocks=0.25) == {f"blocks.{i}" for i in range(9, 12)}
    assert sampled("vit_tiny_patch16_224", blocks=[0, -1]) == {"blocks.0", "blocks.11"}
    assert sampled("vit_tiny_patch16_224", blocks=["blocks.1*"]) == {"blocks.1", "blocks.10", "blocks.11"}
    assert sampled("vit_tiny_patch16_224", blocks=lambda name, block: name == "blocks.3") == {"blocks.3"}


def test_presets():
    assert SBPConfig.preset("paper").attention == "qkv"
    assert SBPConfig.preset("default", keep_ratio=0.25) == SBPConfig(keep_ratio=0.25)


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
    model = torchsbp.apply(FAMILIES["vit"].model(), keep_ratio=0.5, sampler="random")
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
        weights = torch.linspace(-1, 1, y.numel(), dtype=y.dtype, device=y.device).view_as(y)
        (y * weights + y.square()).sum().backward()
        found = {name: p.grad for name, p in model.named_parameters()}
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
        weights = torch.linspace(-1, 1, y.numel(), dtype=y.dtype, device=y.device).view_as(y)
        (y * weights + y.square()).sum().backward()
    total = {name: p.grad for name, p in model.named_parameters()}
    assert_gradients(total, {name: parts[0][name] + parts[1][name] for name in total})


def test_changing_image_size_between_steps():
    model = FAMILIES["convnext"].model()
    plain = copy.deepcopy(model)
    torchsbp.apply(model, keep_ratio=0.5)
    for size in ((64, 96), (70, 130), (96, 64)):
        x = torch.randn(2, 3, *size, dtype=torch.float64)
        y, gradients = step(model, x)
        oracle = copy.deepcopy(plain)
        install(oracle, torchsbp.kept(model), SBPConfig(keep_ratio=0.5))
        expected_y, expected = step(oracle, x)
        assert torch.equal(y, expected_y)
        assert_gradients(gradients, expected)


def test_scale_weight_is_the_inverse_ratio():
    model = FAMILIES["convnext"].model()
    plain, scaled = copy.deepcopy(model), copy.deepcopy(model)
    torchsbp.apply(plain, keep_ratio=0.25, blocks=[2])
    torchsbp.apply(scaled, keep_ratio=0.25, blocks=[2], scale="weight")
    (_, a), (_, b) = step(plain, images()), step(scaled, images())
    name = "stages.2.blocks.0.mlp.fc1.weight"
    torch.testing.assert_close(b[name], 4 * a[name], rtol=1e-12, atol=0)
    torch.testing.assert_close(b["stem.0.weight"], a["stem.0.weight"], rtol=1e-12, atol=0)


def test_schedule_follows_set_step_and_is_refused_without_it():
    schedule = schedules.Milestones(((0, 0.25), (10, 1.0)))
    model = torchsbp.apply(FAMILIES["vit"].model(), keep_ratio=schedule)
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
            self.backbone = FAMILIES["vit"].model()

        def forward(self, x):
            return self.backbone.forward_features(x).mean(1)

    model = torchsbp.apply(Wrapper(), keep_ratio=0.5)
    step(model, images())
    assert set(torchsbp.kept(model)) == {"backbone.blocks.1", "backbone.blocks.2"}


def test_step_counter_from_the_meta_device_begins_at_zero():
    with torch.device("meta"):
        model = torchsbp.apply(tiny_vit())
    model.to_empty(device="cpu")
    assert entry_of(model).sbp_step == 0
    torchsbp.set_step(model, 5)
    assert entry_of(model.double()).sbp_step == 5


def test_no_grad_forward_leaves_the_last_masks():
    model = torchsbp.apply(FAMILIES["vit"].model(), keep_ratio=0.5, sampler="random")
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


def test_import_needs_torch_alone():
    libraries = ("timm", "torchvision", "transformers", "lightning", "accelerate", "peft")
    code = f"import sys, torchsbp; print([m for m in {libraries} if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "[]"
