"""apply on the libraries' models: forward exact, gradients equal the oracle, state untouched, errors that help."""

import copy
import io
import pickle
import subprocess
import sys
from dataclasses import dataclass

import pytest
import timm
import torch
import torchvision
from torch import nn

import torchsbp
from torchsbp import SBPConfig, schedules

from .oracle import install

RATIOS = (1.0, 0.75, 0.5, 0.25, 0.1)


def tiny_vit(**options) -> nn.Module:
    options = {"depth": 3, "embed_dim": 24, "num_heads": 3, "img_size": (64, 96), "num_classes": 5} | options
    return timm.create_model("vit_tiny_patch16_224", **options)


def tiny_convnext(**options) -> nn.Module:
    options = {"depths": (1, 1, 3, 1), "dims": (8, 12, 16, 20), "num_classes": 5} | options
    return timm.create_model("convnext_tiny", **options)


def tiny_torchvision(**options) -> nn.Module:
    config = torchvision.models.convnext.CNBlockConfig
    blocks = [config(8, 12, 1), config(12, 16, 1), config(16, 20, 3), config(20, None, 1)]
    return torchvision.models.ConvNeXt(blocks, num_classes=5, layer_scale=0.5, **options)


@dataclass
class Family:
    """A tiny random model of one library, with what its library can vary."""

    build: object
    options: dict
    attention: bool = False

    def model(self, **options) -> nn.Module:
        torch.manual_seed(0)
        model = self.build(**self.options, **options).double().train()
        with torch.no_grad():
            for p in model.parameters():  # nothing at its initial zero or 1e-6, where errors would hide
                p.add_(torch.randn_like(p) * 0.1)
        return model


FAMILIES = {
    "vit": Family(tiny_vit, {}, attention=True),
    "vit layer scale, drop path": Family(tiny_vit, {"init_values": 0.5, "drop_path_rate": 0.5}, attention=True),
    "vit qk norm, no bias": Family(tiny_vit, {"qk_norm": True, "qkv_bias": False}, attention=True),
    "vit registers, no class token": Family(
        tiny_vit, {"class_token": False, "reg_tokens": 2, "global_pool": "avg"}, attention=True
    ),
    "vit rms norm, quick gelu": Family(tiny_vit, {"norm_layer": "rmsnorm", "act_layer": "quick_gelu"}, attention=True),
    "convnext": Family(tiny_convnext, {"ls_init_value": 0.5}),
    "convnext 1×1 conv, drop path": Family(tiny_convnext, {"conv_mlp": True, "drop_path_rate": 0.5}),
    "convnext no layer scale": Family(tiny_convnext, {"ls_init_value": None}),
    "torchvision convnext": Family(tiny_torchvision, {"stochastic_depth_prob": 0.5}),
}


@pytest.fixture(params=FAMILIES)
def family(request) -> Family:
    return FAMILIES[request.param]


def images(batch: int = 3) -> torch.Tensor:
    return torch.randn(batch, 3, 64, 96, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def step(model: nn.Module, x: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Output and gradients of one training step, with the same randomness each time."""
    model.zero_grad()
    torch.manual_seed(2)
    y = model(x)
    weights = torch.linspace(-1, 1, y.numel(), dtype=y.dtype, device=y.device).view_as(y)
    (y * weights + y.square()).sum().backward()
    return y.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def assert_gradients(ours, theirs, rtol=1e-9) -> None:
    assert ours.keys() == theirs.keys()
    scale = max(g.norm() for g in theirs.values())
    for name, expected in theirs.items():
        error = (ours[name] - expected).norm()
        assert error <= rtol * expected.norm() + 1e-13 * scale, f"{name}: {error:.2e} of {expected.norm():.2e}"


def check_against_oracle(model: nn.Module, config: SBPConfig, x: torch.Tensor) -> None:
    plain = copy.deepcopy(model)
    torchsbp.apply(model, config=config)
    y, gradients = step(model, x)
    kept = torchsbp.kept(model)
    heads = next(m for m in model.modules() if isinstance(m, torchsbp.sites.EntrySite)).sbp.masks.kept_heads[0]
    install(plain, kept, config, heads)
    expected_y, expected = step(plain, x)
    torch.testing.assert_close(y, expected_y, rtol=1e-12, atol=1e-12)
    assert_gradients(gradients, expected)


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


def entry_of(model: nn.Module) -> nn.Module:
    return next(m for m in model.modules() if isinstance(m, torchsbp.sites.EntrySite))


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


@pytest.mark.parametrize("ratio", [0, -1, 1.5, float("nan"), float("inf"), [0.5, 0.0], []])
def test_bad_ratio(ratio):
    refuse({"keep_ratio": ratio}, ValueError, r"in \(0, 1\]")


@pytest.mark.parametrize("ratio", ["half", True, None, {}])
def test_ratio_of_a_wrong_type(ratio):
    if ratio is None:
        with pytest.raises(TypeError, match=r"number in \(0, 1\]"):
            SBPConfig(keep_ratio=None)
    else:
        refuse({"keep_ratio": ratio}, TypeError, r"number in \(0, 1\].*found")


@pytest.mark.parametrize(
    "options, message",
    [
        ({"sampler": "gird"}, r"unknown sampler 'gird'.*'grid', 'random', 'frames', 'frames_jitter', 'checkerboard'"),
        ({"attention": "kv"}, r"attention='kv' is not allowed; allowed: 'query', 'qkv', 'head'"),
        ({"scope": "layer"}, r"scope='layer' is not allowed; allowed: 'branch', 'block'"),
        ({"scale": "both"}, r"scale='both' is not allowed; allowed: 'none', 'weight'"),
        ({"recompute": "yes"}, r"recompute='yes' is not allowed; allowed: True, False"),
        ({"scale": "weight", "attention": "head"}, r"scale=\"weight\" is defined for sampled rows"),
        ({"blocks": 1.5}, r"blocks=1.5 is not allowed; use None .* a fraction in \(0, 1\]"),
        ({"blocks": [7]}, r"blocks: 7 matches none of the 3 blocks, blocks.0 … blocks.2"),
        ({"blocks": ["layer.1"]}, r"blocks: 'layer.1' matches none of the 3 blocks"),
        ({"blocks": lambda name, block: False}, r"selects none of the 3 blocks"),
        ({"keep_ratio": [0.5, 0.5, 0.5]}, r"lists 3 ratios for 2 SBP blocks; give 2 of them"),
    ],
    ids=str,
)
def test_bad_options(options, message):
    refuse(options, ValueError, message)


def test_unknown_option():
    refuse({"ratio": 0.5}, TypeError, r"unknown option ratio; allowed: keep_ratio, sampler, attention")


def test_unknown_preset():
    with pytest.raises(ValueError, match=r"preset='papers' is not allowed; allowed: 'default', 'paper'"):
        SBPConfig.preset("papers")


def refuse(options, error, message) -> None:
    """The error, and the model as it was."""
    model = FAMILIES["vit"].model()
    classes, attributes = [type(m) for m in model.modules()], [set(m.__dict__) for m in model.modules()]
    with pytest.raises(error, match=message):
        torchsbp.apply(model, **options)
    assert [type(m) for m in model.modules()] == classes
    assert [set(m.__dict__) for m in model.modules()] == attributes


def test_second_apply_and_needless_remove():
    model = torchsbp.apply(FAMILIES["vit"].model())
    with pytest.raises(ValueError, match=r"already patched .*call torchsbp.remove\(model\) first"):
        torchsbp.apply(model)
    torchsbp.remove(model)
    for call in (torchsbp.remove, torchsbp.kept, lambda m: torchsbp.set_step(m, 0)):
        with pytest.raises(ValueError, match="the model is not patched"):
            call(model)


def test_kept_before_training():
    with pytest.raises(RuntimeError, match="no forward has run in training mode"):
        torchsbp.kept(torchsbp.apply(FAMILIES["vit"].model()))


def test_nothing_to_patch_names_what_was_found():
    model = timm.create_model("resnet18")
    message = r"nothing to patch in timm.models.resnet.ResNet: .*timm.models.resnet.BasicBlock.*Supported.*: timm ViT"
    with pytest.raises(ValueError, match=message):
        torchsbp.apply(model)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"attn_drop_rate": 0.1}, r"blocks.0: attn.attn_drop is Dropout\(p=0.1.*not supported"),
        ({"proj_drop_rate": 0.1}, r"attn.proj_drop is Dropout\(p=0.1(.|\n)*mlp.drop1 is Dropout\(p=0.1"),
        ({"scale_attn_norm": True}, r"attn.norm is LayerNorm"),
        ({"act_layer": nn.Hardswish}, r"mlp.act is torch.nn.modules.activation.Hardswish; supported activations"),
        ({"block_fn": timm.models.vision_transformer.ResPostBlock}, r"blocks.0 is .*ResPostBlock; supported: .*Block"),
        ({"mlp_layer": timm.layers.SwiGLU}, r"mlp is timm.layers.mlp.SwiGLU; supported: timm.layers.mlp.Mlp"),
        ({"mlp_layer": timm.layers.SwiGLUPacked}, r"mlp is timm.layers.mlp.GluMlp; supported: timm.layers.mlp.Mlp"),
        ({"attn_layer": "diff"}, r"attn is timm.layers.*DiffAttention; supported: timm.layers.attention.Attention"),
    ],
    ids=str,
)
def test_unsupported_parts_are_refused_by_name(options, message):
    model = tiny_vit(**options)
    with pytest.raises(ValueError, match=message):
        torchsbp.apply(model)
    assert not any(isinstance(m, torchsbp.sites.Site) for m in model.modules())


def test_global_response_norm_is_refused_by_name():
    with pytest.raises(ValueError, match=r"mlp.grn is GlobalResponseNorm"):
        torchsbp.apply(tiny_convnext(use_grn=True, ls_init_value=None))


def test_hooks_that_would_not_run_are_refused_by_name():
    model = tiny_vit()
    model.blocks[1].register_forward_hook(lambda *args: None)  # on a block: it runs
    handle = model.blocks[1].attn.register_forward_hook(lambda *args: None)
    with pytest.raises(ValueError, match=r"blocks.1: attn has hooks, which would not run in training"):
        torchsbp.apply(model)
    handle.remove()
    torchsbp.apply(model)


def test_changes_inside_a_block_are_refused_when_training_begins():
    model = torchsbp.apply(tiny_vit())
    model.blocks[0].attn.proj_drop.p = 0.5
    model.eval()
    with pytest.raises(ValueError, match=r"SBPBlock was changed after torchsbp.apply: attn.proj_drop is Dropout"):
        model.train()
    torchsbp.remove(model)
    model.train()


def test_a_block_that_appears_twice_is_refused():
    model = tiny_vit()
    model.blocks[1] = model.blocks[2]
    with pytest.raises(ValueError, match=r"blocks.2 is the same module as blocks.1"):
        torchsbp.apply(model)
    assert not any(isinstance(m, torchsbp.sites.Site) for m in model.modules())


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


def test_bad_samplers_and_schedules():
    model = torchsbp.apply(tiny_vit().train(), sampler=lambda shape, ratios, key: torch.arange(24))
    with pytest.raises(ValueError, match=r"the sampler must give an int64 order of shape \(1, 24\).*it gave"):
        model(images().float())
    schedule = schedules.Milestones(((0, 0.5), (100, [0.5, 0.5, 0.5])))
    refuse({"keep_ratio": schedule}, ValueError, r"lists 3 ratios for 2 SBP blocks")


def test_rms_norm_in_half_precision_does_not_overflow():
    plain = tiny_vit(norm_layer="rmsnorm").half().train()
    with torch.no_grad():
        plain.pos_embed.add_(torch.randn_like(plain.pos_embed) * 300)
    model = torchsbp.apply(copy.deepcopy(plain), keep_ratio=1.0)
    (_, found), (_, expected) = step(model, images().half()), step(plain, images().half())
    name = "blocks.0.norm1.weight"
    assert (found[name] - expected[name]).norm() < 0.05 * expected[name].norm()


def test_an_error_in_the_second_backbone_leaves_the_first_alone():
    model = nn.ModuleList([tiny_vit(), tiny_vit(depth=6)])
    with pytest.raises(ValueError, match=r"lists 2 ratios for 3 SBP blocks|lists 3 ratios for 2 SBP blocks"):
        torchsbp.apply(model, keep_ratio=[0.5, 0.5, 0.5])
    assert not any(isinstance(m, torchsbp.sites.Site) for m in model.modules())


def test_attention_mask_is_refused_in_training():
    model = torchsbp.apply(tiny_vit(img_size=32))
    x = torch.randn(2, 5, 24)
    mask = torch.ones(5, 5, dtype=torch.bool)
    with pytest.raises(ValueError, match=r"called with extra arguments in training"):
        model.blocks[0](x, attn_mask=mask)
    model.eval()
    assert model.blocks[0](x, attn_mask=mask).shape == x.shape


def test_image_too_small_for_the_mask():
    model = tiny_convnext().double().train()
    torchsbp.apply(model, keep_ratio=0.1)
    x = torch.randn(1, 3, 32, 32, dtype=torch.float64)  # 2×2 positions in stage 3
    with pytest.raises(ValueError, match=r"image too small for the mask: ratio 0.1 keeps none of the 4 cells"):
        model(x)
    assert entry_of(model).sbp_step == 0
    with pytest.raises(RuntimeError, match="there are no kept positions yet"):
        torchsbp.kept(model)
    step(model, torch.randn(1, 3, 64, 64, dtype=torch.float64))


def test_dropped_tokens_are_refused():
    model = torchsbp.apply(tiny_vit(patch_drop_rate=0.5).train())
    with pytest.raises(ValueError, match=r"blocks.1 was given 3 samples of 13 positions.*patch_drop_rate"):
        model(images().float())


def test_blocks_alone_are_refused():
    model = torchsbp.apply(tiny_vit().train())
    with pytest.raises(RuntimeError, match=r"ran before the model's patch embedding or stem"):
        model.blocks(torch.randn(2, 25, 24))


def test_import_needs_torch_alone():
    code = "import sys, torchsbp; print([m for m in ('timm', 'torchvision', 'transformers') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "[]"
