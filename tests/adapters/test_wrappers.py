"""Backbones inside the wrappers of detection and segmentation: sampled as the models they were made of."""

import copy
import pickle
import re
from pathlib import Path

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import torchsbp
from torchsbp import adapters

from ..steps import GRID, assert_gradients, check_left_as_it_was, gradients_of, step
from .wrappers import REFUSED, WRAPPERS, Siamese, Two, Wrapper, features, torchvision_convnext

LEVELS = ("0.blocks.0", "1.downsample", "1.blocks.0", "2.downsample", "2.blocks.0")
ANY_SIZE = ("timm convnext", "timm swin padded", "torchvision swin layers", "torchvision convnext traced")
ANY_SIZE += ("transformers convnext", "transformers swin v2")
ONE_OF_EACH = ("timm convnext", "timm swin hook", "timm coatnet getter", "timm eva", "transformers swin v2")
ONE_OF_EACH += ("torchvision convnext layers", "torchvision swin traced", "torchvision vit traced")
ONE_OF_EACH += ("torchvision swin features, padded", "transformers dinov2", "transformers timm convnext")
OUTPUT_STRIDES = [name for name in WRAPPERS if "stride" in name]


def assert_exact(model: torch.nn.Module, *inputs: torch.Tensor) -> None:
    found = torchsbp.check(model, *inputs)
    assert found.passed, found


@pytest.mark.parametrize("name", WRAPPERS)
def test_a_wrapped_backbone_has_the_gated_gradient(name):
    """With the papers' blocks and masks, and with every block sampled."""
    model, x = WRAPPERS[name].model(), WRAPPERS[name].images()
    for options in ({"config": GRID}, {"keep_ratio": 0.25, "blocks": 1.0}):
        assert_exact(torchsbp.apply(model, **options), x)
        torchsbp.remove(model)


@pytest.mark.parametrize("name", WRAPPERS)
def test_frozen_early_stages_stay_frozen_and_the_rest_has_the_gated_gradient(name):
    wrapper = WRAPPERS[name]
    model, x = wrapper.model(), wrapper.images()
    wrapper.freeze(model)
    frozen = {name for name, p in model.named_parameters() if not p.requires_grad}
    assert frozen
    assert_exact(torchsbp.apply(model, keep_ratio=0.5, blocks=1.0), x)
    _, gradients = step(model, x)
    assert gradients
    assert not frozen & gradients.keys()


@pytest.mark.parametrize("name", WRAPPERS)
def test_patching_leaves_a_wrapped_backbone_and_its_outputs_as_they_were(name):
    plain, x = WRAPPERS[name].model(), WRAPPERS[name].images()
    check_left_as_it_was(plain, x, keep_ratio=0.5)
    torch.manual_seed(2)
    expected = plain.train()(x)
    torch.manual_seed(2)
    y = torchsbp.apply(plain, keep_ratio=0.25)(x)
    torch.testing.assert_close(y, expected, rtol=1e-12, atol=1e-12)
    assert all(site.startswith("body.") for site in torchsbp.kept(plain))


@pytest.mark.parametrize("name", ONE_OF_EACH)
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


@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_copies_of_a_wrapped_backbone_train_their_own_weights(name):
    model, x = WRAPPERS[name].model(), WRAPPERS[name].images()
    torchsbp.apply(model, keep_ratio=0.5)
    copies = [copy.deepcopy(model)]
    if name != "transformers dinov2":  # whose hooks can't be pickled, patched or not
        copies.append(pickle.loads(pickle.dumps(model)))
    _, expected = step(model, x)
    model.zero_grad()
    for twin in copies:
        _, found = step(twin, x)
        assert all(p.grad is None for p in model.parameters())
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], g) for name, g in expected.items())


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("timm convnext", "stages_0"),
        ("timm swin", "layers_0"),
        ("timm vit", "model.blocks.0"),
        ("transformers convnext", "encoder.stages.0"),
        ("torchvision convnext layers", "1"),
    ],
)
def test_sampled_blocks_in_eval_mode_pass_on_the_exact_gradient(name, part):
    """What comes before them trains: its gradient goes through blocks that are not sampled, as in any eval mode."""
    model, x = WRAPPERS[name].model(), WRAPPERS[name].images()
    torchsbp.apply(model, keep_ratio=0.5, blocks=1.0)
    model.body.get_submodule(part).eval()
    assert_exact(model, x)


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
    torchsbp.apply(model, config=GRID, blocks=1.0)
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


def test_other_problems_between_stages_are_refused_as_before():
    model = WRAPPERS["timm convnext stride 16"].model()
    model.body.stages_1.downsample[0] = torch.nn.BatchNorm2d(8)
    with pytest.raises(ValueError, match=r"stages_1.downsample: 0 is .*BatchNorm2d"):
        torchsbp.apply(model, keep_ratio=0.5)


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
    wrappers = dict(zip(("first.", "second."), (WRAPPERS[name] for name in names), strict=True))
    model, inputs = Two(*(w.model() for w in wrappers.values())), [w.images() for w in wrappers.values()]
    torchsbp.apply(model, keep_ratio=0.5)
    assert_exact(model, *inputs)
    model(*inputs)
    kept = torchsbp.kept(model)
    for prefix, wrapper in wrappers.items():
        alone = torchsbp.apply(wrapper.model(), keep_ratio=0.5)
        alone(wrapper.images())
        expected = torchsbp.kept(alone)
        assert [site for site in kept if site.startswith(prefix)] == [prefix + site for site in expected]
        assert all(torch.equal(kept[prefix + site], positions) for site, positions in expected.items())


def test_one_of_two_backbones_may_be_frozen_whole():
    wrapper = WRAPPERS["timm convnext"]
    model, x = Two(wrapper.model(), wrapper.model()), wrapper.images()
    torchsbp.apply(model, keep_ratio=0.5)
    model.first.eval().requires_grad_(False)
    assert_exact(model, x, x)
    model(x, x)
    assert all(site.startswith("second.") for site in torchsbp.kept(model))


def without_stochastic_depth(model: torch.nn.Module) -> torch.nn.Module:
    for module in model.modules():
        if hasattr(module, "drop_prob"):
            module.drop_prob = 0.0
    return model


@pytest.mark.parametrize("name", ["timm convnext", "timm swin", "timm maxvit", "timm eva", "transformers swin v2"])
def test_each_call_of_a_siamese_backbone_has_its_own_masks(name):
    """Two calls and one backward give what two calls with a backward each give."""
    model, x = Siamese(without_stochastic_depth(WRAPPERS[name].model())), WRAPPERS[name].images()
    torchsbp.apply(model, keep_ratio=0.25, sampler="random")
    model(x, x.flip(-1)).square().sum().backward()
    together = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    torchsbp.set_step(model, 0)
    drawn = []
    for images in (x, x.flip(-1)):
        model.twin(images).square().sum().backward()
        drawn.append(torchsbp.kept(model))
    assert_gradients(together, {name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    assert any(not torch.equal(positions, drawn[1][site]) for site, positions in drawn[0].items())


def checkpointed(block: torch.nn.Module) -> None:
    """Its training forward is repeated in backward; a hook of checkpoint_wrapper's kind, without another name."""
    forward = block.forward
    block.forward = lambda *args, **kwargs: checkpoint(forward, *args, use_reentrant=False, **kwargs)


@pytest.mark.parametrize("name", ["timm convnext", "timm swin", "timm maxvit", "timm eva", "transformers swin v2"])
def test_a_checkpointed_block_repeats_the_masks_of_its_own_call(name):
    model, x = Siamese(without_stochastic_depth(WRAPPERS[name].model())), WRAPPERS[name].images()
    torchsbp.apply(model, keep_ratio=0.25, sampler="random")

    def gradients() -> dict[str, torch.Tensor]:
        model.zero_grad()
        model(x, x.flip(-1)).square().sum().backward()
        return gradients_of(model)

    gradients()  # a step before: its masks are not these
    torchsbp.set_step(model, 0)
    expected = gradients()
    torchsbp.set_step(model, 0)
    for site in torchsbp.kept(model):
        if not isinstance(model.get_submodule(site), torch.nn.ModuleList):
            checkpointed(model.get_submodule(site))
    assert_gradients(gradients(), expected)


@pytest.mark.parametrize("name", ["timm convnext", "timm swin", "timm vit", "transformers dinov2"])
def test_check_follows_every_call_of_a_siamese_backbone(name):
    model, x = Siamese(WRAPPERS[name].model()), WRAPPERS[name].images()
    torchsbp.apply(model, keep_ratio=0.25, sampler="random")
    assert_exact(model, x, x.flip(-1))


@pytest.mark.parametrize("name", ["timm convnext", "timm swin", "timm maxvit"])
def test_check_follows_calls_that_backward_repeats(name):
    model, x = Siamese(WRAPPERS[name].model()), WRAPPERS[name].images()
    torchsbp.apply(model, keep_ratio=0.25, sampler="random")
    model.twin.body.set_grad_checkpointing(True)
    assert_exact(model, x, x.flip(-1))


def test_a_sequence_around_a_known_model_is_looked_into():
    model = torch.nn.Sequential(torch.nn.Identity(), torchvision_convnext().features, torch.nn.Tanh())
    torchsbp.apply(model, config=GRID)
    model(torch.randn(1, 3, 64, 96))
    assert list(torchsbp.kept(model)) == [f"1.{name}" for name in ("1.0", "2", "3.0", "4", "5.0")]


def test_a_backbone_with_two_names_is_one():
    model, x = Two(*[WRAPPERS["timm convnext"].model()] * 2), WRAPPERS["timm convnext"].images()
    torchsbp.apply(model, keep_ratio=0.5)
    model(x, x)
    assert all(site.startswith("first.") for site in torchsbp.kept(model))


def test_the_wrapper_on_the_page_is_described_as_it_says(monkeypatch):
    monkeypatch.setattr(adapters, "ADAPTERS", list(adapters.ADAPTERS))
    page = (Path(__file__).parents[2] / "docs" / "adapters.md").read_text()
    names: dict = {"__name__": "page"}
    for code in re.findall(r"```python\n(.*?)```", page, re.S):
        exec(code, names)
    model = torchsbp.apply(names["Pyramid"](), config=GRID)
    model(torch.randn(2, 3, 64, 96))
    assert list(torchsbp.kept(model)) == [f"levels.{name}" for name in LEVELS]
    assert len(pickle.dumps(model.bottom.sbp.layout)) < 200  # by name
