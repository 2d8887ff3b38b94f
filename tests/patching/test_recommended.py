"""A keep-ratio that is a name: ``apply`` makes of it what is recommended for the model's family."""

import pytest
import torch
import transformers
from torch import nn
from torchvision.models import vision_transformer
from torchvision.models.feature_extraction import create_feature_extractor

import torchsbp
from torchsbp import SBPConfig
from torchsbp.adapters import ADAPTERS, find_backbones, match
from torchsbp.config import PRESETS, resolved
from torchsbp.patching.entry import entries
from torchsbp.patching.survey import resolved_for
from torchsbp.sampling.recommended import CONVNEXT, NAMES, SWIN, UNTRIED, VIT

from ..models import MODELS
from ..steps import check_copies, sampled_in, step

FAMILIES = {"vit": VIT, "convnext": CONVNEXT, "swin": SWIN, "eva02": VIT, "mixer": UNTRIED, "maxvit tf": UNTRIED}
OTHERS = {"blocks": [1], "recompute": False, "attention": "exact", "seed": 7}


def tiny(name: str) -> nn.Module:
    return MODELS[name].model(drop_path=0.0)


def configs(model: nn.Module) -> list[SBPConfig]:
    return [entry.config for entry, _ in entries(model)]


def kept(name: str, **options) -> dict[str, torch.Tensor]:
    """In the first training step of a tiny model."""
    model = torchsbp.apply(tiny(name), **options)
    step(model, MODELS[name].images())
    return torchsbp.kept(model)


@pytest.mark.parametrize("ratio", NAMES)
@pytest.mark.parametrize("name", ["vit", "convnext", "swin"])
def test_a_family_is_trained_as_it_is_recommended(name, ratio):
    """As if its numbers had been given: the same blocks, the same positions of them."""
    options = getattr(FAMILIES[name], ratio)
    found, given = kept(name, config=SBPConfig.preset(ratio)), kept(name, **options)
    assert list(found) == list(given)
    assert all(torch.equal(found[block], given[block]) for block in given)


@pytest.mark.parametrize("name, positions", [("vit", (1, 24)), ("convnext", (0, 16 * 24)), ("swin", (0, 16 * 16))])
def test_nothing_given_keeps_the_share_of_the_default(name, positions):
    prefix, grid = positions
    first = next(iter(kept(name).values()))
    assert first.shape[1] == prefix + round(FAMILIES[name].default["keep_ratio"] * grid)


def recommended_for(model: nn.Module):
    (found,) = find_backbones(model)
    _, module, adapter, _ = found
    return adapter.recommended_for(module)


READ_AT = {
    "a class token": ("vit", {}, VIT),
    "the mean": ("vit", {"global_pool": "avg"}, UNTRIED),
    "the mean, without a class token": ("vit", {"global_pool": "avg", "class_token": False}, UNTRIED),
    "an attentive pooling": ("vit", {"global_pool": "map", "class_token": False}, UNTRIED),
    "maps": ("vit", {"features_only": True}, UNTRIED),
    "maps, by hooks": ("vit", {"features_only": True, "feature_cls": "hook"}, UNTRIED),
    "both, by transformers": ("transformers dinov2", {}, UNTRIED),
    "a class token, by transformers": ("transformers vit", {}, VIT),
    "the mean, of a Swin": ("swin", {}, SWIN),
}


@pytest.mark.parametrize("name, options, expected", READ_AT.values(), ids=READ_AT)
def test_what_is_recommended_depends_on_where_a_vit_is_read(name, options, expected):
    model = MODELS[name].model(**options)
    assert recommended_for(model) is expected
    assert configs(torchsbp.apply(model)) == [SBPConfig(**expected.default)]


def test_a_trace_of_a_vit_gives_maps():
    leaves = {"leaf_modules": [vision_transformer.EncoderBlock]}
    extractor = create_feature_extractor(tiny("torchvision vit"), ["encoder.ln"], tracer_kwargs=leaves)
    assert recommended_for(extractor) is UNTRIED
    assert recommended_for(tiny("torchvision vit")) is VIT


@pytest.mark.parametrize("family", ["ViT", "DeiT"])
def test_vits_that_learn_from_masked_patches_are_read_at_maps(family):
    sizes = {"image_size": 32, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    config = getattr(transformers, f"{family}Config")(**sizes)
    assert recommended_for(getattr(transformers, f"{family}ForMaskedImageModeling")(config)) is UNTRIED
    assert recommended_for(getattr(transformers, f"{family}ForImageClassification")(config)) is VIT


def test_families_are_as_the_table_says():
    for name, recommended in FAMILIES.items():
        adapter, _ = match(tiny(name))
        assert adapter.recommended is recommended
    videos = [adapter for adapter in ADAPTERS if "Video" in adapter.name]
    assert len(videos) == 2
    assert all(adapter.recommended is UNTRIED for adapter in videos)


@pytest.mark.parametrize("adapter", ADAPTERS, ids=lambda adapter: adapter.name)
def test_what_is_recommended_is_a_configuration_of_numbers(adapter):
    for name in NAMES:
        config = resolved(SBPConfig(keep_ratio=name), adapter.recommended)
        assert config == SBPConfig(**getattr(adapter.recommended, name))
        assert isinstance(config.keep_ratio, float)


@pytest.mark.parametrize("ratio", [0.75, (0.25, 0.75), torchsbp.schedules.Milestones(((0, 0.25), (2, 1.0)))], ids=str)
def test_a_ratio_that_is_given_is_taken_with_no_other_option(ratio):
    given = SBPConfig(keep_ratio=ratio)
    assert resolved(given, VIT) is given
    assert configs(torchsbp.apply(tiny("vit"), ratio)) == [given]


@pytest.mark.parametrize("ratio", NAMES)
@pytest.mark.parametrize("option", OTHERS)
def test_other_options_that_are_given_are_taken(ratio, option):
    (found,) = configs(torchsbp.apply(tiny("vit"), ratio, **{option: OTHERS[option]}))
    assert found == SBPConfig(**getattr(VIT, ratio) | {option: OTHERS[option]})


def test_of_two_backbones_each_is_of_its_own_family():
    model = nn.ModuleDict({"tokens": tiny("vit"), "maps": tiny("swin")})
    named = SBPConfig.preset("fast", recompute=False)
    expected = [resolved(named, VIT), resolved(named, SWIN)]
    assert expected[0] != expected[1]
    assert configs(torchsbp.apply(model, config=named)) == expected
    assert resolved_for(model, named) == named  # there is no one answer
    assert resolved_for(model["tokens"], named) == expected[0]
    assert resolved_for(nn.Linear(2, 2), named) == named
    assert (resolved_for(model, "full"), resolved_for(model, None)) == ("full", None)


@pytest.mark.parametrize("preset", PRESETS)
def test_copies_have_the_numbers(preset):
    model = torchsbp.apply(tiny("vit"), config=SBPConfig.preset(preset))
    check_copies(model, MODELS["vit"].images())
    assert all(isinstance(config.keep_ratio, float) for config in configs(model))


def test_an_adapter_of_your_own_recommends_nothing_that_was_not_tried():
    mine = torchsbp.adapters.Adapter("mine", {}, torchsbp.adapters.Layout("mine.ViT"))
    assert mine.recommended is UNTRIED


def test_as_many_blocks_are_sampled_as_is_recommended():
    few, many = (sampled_in(torchsbp.apply(tiny_deep(), ratio)) for ratio in NAMES)
    fractions = [getattr(VIT, name).get("blocks", 2 / 3) for name in NAMES]
    assert [len(few), len(many)] == [round(12 * fraction) for fraction in fractions]


def tiny_deep() -> nn.Module:
    return MODELS["vit"].model(depth=12)
