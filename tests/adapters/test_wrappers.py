"""Backbones inside the wrappers of detection and segmentation: sampled as the models they were made of."""

import copy

import pytest
import torch

import torchsbp

from ..families import assert_gradients, check_copies, check_left_as_it_was, step
from .wrappers import REFUSED, WRAPPERS, Maps, Siamese, Two, Wrapper, features

RATIOS = (0.5, 0.25)
ANY_SIZE = ("timm convnext", "timm swin padded", "torchvision swin layers", "torchvision convnext traced")
ANY_SIZE += ("transformers convnext", "transformers swin v2")
OUTPUT_STRIDES = [name for name in WRAPPERS if "stride" in name]


def assert_exact(model: torch.nn.Module, *inputs: torch.Tensor) -> None:
    found = torchsbp.check(model, *inputs)
    assert found.passed, found


@pytest.mark.parametrize("ratio", RATIOS)
@pytest.mark.parametrize("name", WRAPPERS)
def test_a_wrapped_backbone_has_the_gated_gradient(name, ratio):
    model, x = WRAPPERS[name].model(), WRAPPERS[name].images()
    torchsbp.apply(model, keep_ratio=ratio)
    assert_exact(model, x)
    model(x)
    assert all(site.startswith("body.") for site in torchsbp.kept(model))


@pytest.mark.parametrize("name", WRAPPERS)
def test_a_wrapped_backbone_can_be_sampled_in_every_block(name):
    model, x = WRAPPERS[name].model(), WRAPPERS[name].images()
    torchsbp.apply(model, keep_ratio=0.5, blocks=1.0, sampler="random")
    assert_exact(model, x)


@pytest.mark.parametrize("ratio", RATIOS)
@pytest.mark.parametrize("name", WRAPPERS)
def test_frozen_early_stages_stay_frozen_and_the_rest_has_the_gated_gradient(name, ratio):
    wrapper = WRAPPERS[name]
    model, x = wrapper.model(), wrapper.images()
    wrapper.freeze(model)
    frozen = {name for name, p in model.named_parameters() if not p.requires_grad}
    assert frozen
    torchsbp.apply(model, keep_ratio=ratio, blocks=1.0)
    assert_exact(model, x)
    _, gradients = step(model, x)
    assert gradients
    assert not frozen & gradients.keys()


@pytest.mark.parametrize("name", WRAPPERS)
def test_frozen_before_or_after_apply_is_the_same(name):
    wrapper = WRAPPERS[name]
    before, after, x = wrapper.model(), wrapper.model(), wrapper.images()
    wrapper.freeze(before)
    torchsbp.apply(before, keep_ratio=0.5, blocks=1.0)
    torchsbp.apply(after, keep_ratio=0.5, blocks=1.0)
    wrapper.freeze(after)
    (y, gradients), (expected_y, expected) = step(after, x), step(before, x)
    assert torch.equal(y, expected_y)
    assert gradients.keys() == expected.keys()
    assert all(torch.equal(g, expected[name]) for name, g in gradients.items())


@pytest.mark.parametrize("name", WRAPPERS)
def test_output_in_training_is_that_of_the_unpatched_backbone(name):
    model, x = WRAPPERS[name].model(), WRAPPERS[name].images()
    expected, _ = step(copy.deepcopy(model), x)
    torchsbp.apply(model, keep_ratio=0.25)
    y, _ = step(model, x)
    torch.testing.assert_close(y, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", WRAPPERS)
def test_patching_leaves_a_wrapped_backbone_as_it_was(name):
    check_left_as_it_was(WRAPPERS[name].model(), WRAPPERS[name].images(), keep_ratio=0.5)


@pytest.mark.parametrize("name", WRAPPERS)
def test_copies_of_a_wrapped_backbone_train_their_own_weights(name):
    model = WRAPPERS[name].model()
    torchsbp.apply(model, keep_ratio=0.5)
    check_copies(model, WRAPPERS[name].images())


@pytest.mark.parametrize("name", ANY_SIZE)
def test_the_size_of_images_may_change_from_step_to_step(name):
    model = WRAPPERS[name].model()
    torchsbp.apply(model, keep_ratio=0.5)
    for size in ((64, 96), (96, 64), (68, 100)):
        x = Wrapper(WRAPPERS[name].build, (), size).images()
        assert_exact(model, x)
        step(model, x)


@pytest.mark.parametrize("name", OUTPUT_STRIDES)
def test_layers_whose_outputs_share_inputs_are_left_plain(name):
    """With an output stride, some layers between stages have a kernel larger than their stride."""
    model = WRAPPERS[name].model()
    torchsbp.apply(model, keep_ratio=0.5, blocks=1.0)
    model(WRAPPERS[name].images())
    sites = torchsbp.kept(model)
    for path, module in model.named_modules():
        if path.endswith("downsample") and not isinstance(module, torch.nn.Identity):
            assert (path in sites) == (module[-1].stride == (2, 2)), path


@pytest.mark.parametrize("name", ["timm convnext", "timm swin", "timm maxvit", "timm convnext hook"])
def test_checkpointed_stages_have_the_same_gradients(name):
    model, x = WRAPPERS[name].model(), WRAPPERS[name].images()
    torchsbp.apply(model, keep_ratio=0.5)
    y, expected = step(model, x)
    torchsbp.set_step(model, 0)
    model.body.set_grad_checkpointing(True)
    found_y, found = step(model, x)
    torch.testing.assert_close(found_y, y, rtol=1e-12, atol=1e-12)
    assert_gradients(found, expected)


@pytest.mark.parametrize("name", REFUSED)
def test_a_refused_wrapper_is_told_the_way_out(name):
    build, way_out = REFUSED[name]
    model = build()
    classes = [type(m) for m in model.modules()]
    with pytest.raises(ValueError, match="blocks known, wrapper not") as error:
        torchsbp.apply(model, keep_ratio=0.5)
    assert way_out in str(error.value)
    assert [type(m) for m in model.modules()] == classes


def test_unknown_blocks_are_not_called_known():
    with pytest.raises(ValueError, match="nothing to patch") as error:
        torchsbp.apply(features("resnet18")(), keep_ratio=0.5)
    assert "blocks known" not in str(error.value)


PAIRS = [
    ("timm convnext", "torchvision swin layers"),
    ("timm convnext", "timm convnext getter"),
    ("timm swin padded", "transformers convnext"),
    ("torchvision convnext traced", "timm maxvit"),
]


@pytest.mark.parametrize("names", PAIRS, ids=" + ".join)
def test_two_backbones_have_masks_of_their_own(names):
    first, second = (WRAPPERS[name] for name in names)
    small = Wrapper(second.build, (), (32, 48)) if "maxvit" not in names[1] else second
    model, x = Two(first.model(), small.model()), first.images()
    x = torch.cat([x, x], -1).repeat(1, 1, 2, 1) if small is second else x
    torchsbp.apply(model, keep_ratio=0.5)
    assert_exact(model, x)
    model(x)
    sites = torchsbp.kept(model)
    for prefix, alone, size in (("first.", first.model(), x), ("second.", small.model(), x[..., ::2, ::2])):
        torchsbp.apply(alone, keep_ratio=0.5)
        alone(size)
        expected = torchsbp.kept(alone)
        assert [name for name in sites if name.startswith(prefix)] == [prefix + name for name in expected]
        for name, positions in expected.items():
            assert torch.equal(sites[prefix + name], positions)


def test_one_of_two_backbones_may_be_frozen_whole():
    first, second = WRAPPERS["timm convnext"], WRAPPERS["torchvision convnext layers"]
    model, x = Two(first.model(), second.model()), first.images()
    torchsbp.apply(model, keep_ratio=0.5)
    model.first.eval().requires_grad_(False)
    _, gradients = step(model, x)
    assert gradients
    assert all(name.startswith("second.") for name in gradients)
    alone = torchsbp.apply(copy.deepcopy(second).model(), keep_ratio=0.5)
    expected = torch.nn.Module()
    assert alone is not expected


@pytest.mark.parametrize("name", ["timm convnext", "timm swin", "timm maxvit", "timm eva", "transformers swin v2"])
def test_each_call_of_a_siamese_backbone_has_its_own_masks(name):
    """Two calls and one backward give what two calls with a backward each give."""
    model, x = Siamese(WRAPPERS[name].model()), WRAPPERS[name].images()
    for module in model.modules():  # the order of its draws is not that of two steps
        if hasattr(module, "drop_prob"):
            module.drop_prob = 0.0
    torchsbp.apply(model, keep_ratio=0.25, sampler="random")
    other, weight = x.flip(-1), None
    model(x, other).square().sum().backward()
    together = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    torchsbp.set_step(model, 0)
    drawn = []
    for images in (x, other):
        model.twin(images).square().sum().backward()
        drawn.append(torchsbp.kept(model))
    apart = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert weight is None
    assert_gradients(together, apart)
    assert drawn[0].keys() == drawn[1].keys()
    assert any(not torch.equal(positions, drawn[1][site]) for site, positions in drawn[0].items())


@pytest.mark.parametrize("name", ["timm convnext", "timm swin", "timm vit", "transformers dinov2"])
def test_check_follows_every_call_of_a_siamese_backbone(name):
    model, x = Siamese(WRAPPERS[name].model()), WRAPPERS[name].images()
    torchsbp.apply(model, keep_ratio=0.25, sampler="random")
    assert_exact(model, x, x.flip(-1))


def test_a_backbone_with_two_names_is_one():
    model = Two(*[WRAPPERS["timm convnext"].model()] * 2)
    torchsbp.apply(model, keep_ratio=0.5)
    model(WRAPPERS["timm convnext"].images())
    assert all(name.startswith("first.") for name in torchsbp.kept(model))
    torchsbp.remove(model)
    assert type(model.first) is Maps
