"""The configuration: presets, what "auto" becomes, and that the estimator by default is unbiased."""

import copy
import re
from dataclasses import fields

import pytest
import torch
from torch import Tensor, nn

import torchsbp
from torchsbp import SBPConfig
from torchsbp.config import PRESETS, differing
from torchsbp.errors import UsageError
from torchsbp.sampling.recommended import NAMES

from .models import MODELS
from .steps import GRID, step

LEFT = {"per_sample", "per_block", "scale"}


def own(shape, ratios, key):
    raise NotImplementedError


@pytest.mark.parametrize(
    "given, per_sample, per_block, scale",
    [
        ({}, "balanced", True, "rows"),
        ({"sampler": "grid"}, "balanced", True, "rows"),
        ({"sampler": "frames"}, "balanced", True, "rows"),
        ({"sampler": "frames_jitter"}, True, True, "rows"),
        ({"sampler": own}, True, True, "rows"),
        ({"attention": "qkv"}, "balanced", True, "rows"),
        ({"attention": "exact"}, "balanced", True, "rows"),
        ({"attention": "head"}, "balanced", True, "none"),
        ({"scope": "block"}, "balanced", False, "none"),
        ({"exact_downsampling": False}, "balanced", False, "none"),
        ({"per_sample": False, "per_block": False, "scale": "weight"}, False, False, "weight"),
    ],
)
def test_what_is_left_to_us_suits_the_rest(given, per_sample, per_block, scale):
    config = SBPConfig(**given)
    assert (config.per_sample, config.per_block, config.scale) == (per_sample, per_block, scale)
    assert differing(config) == given
    assert SBPConfig(**dict.fromkeys(LEFT, "auto") | given) == config


def test_presets():
    assert SBPConfig.preset("default") == SBPConfig()
    assert SBPConfig.preset("exact") == SBPConfig(keep_ratio=1.0)
    assert [SBPConfig.preset(name) for name in NAMES] == [SBPConfig(keep_ratio=name) for name in NAMES]
    assert SBPConfig.preset("default", keep_ratio=0.75) == SBPConfig(keep_ratio=0.75)
    paper = SBPConfig.preset("paper")
    assert (paper.keep_ratio, paper.sampler, paper.attention, paper.scope) == (0.5, "grid", "qkv", "branch")
    assert (paper.per_sample, paper.per_block, paper.scale, paper.exact_downsampling) == (False, False, "none", False)


@pytest.mark.parametrize("text", ["quick", "Default", "0.5", ""])
def test_a_name_that_is_none_is_refused_with_those_that_are(text):
    names = re.escape(", ".join(map(repr, NAMES)))
    message = rf"keep_ratio='{text}' is not allowed; allowed: a number in \(0, 1\], .* for the model's family: {names}$"
    with pytest.raises(UsageError, match=message):
        SBPConfig(keep_ratio=text)


@pytest.mark.parametrize("name", NAMES)
def test_a_name_stands_for_all_blocks_and_steps(name):
    with pytest.raises(UsageError, match=rf"keep_ratio\[0\]='{name}' suits a model's family, .*; give a number in"):
        SBPConfig(keep_ratio=[name, 0.5])
    with pytest.raises(UsageError, match=rf"ratio at step 0='{name}' suits a model's family, .*; give a number in"):
        torchsbp.schedules.Milestones(((0, name),))


CHANGED = {
    "keep_ratio": 0.25, "sampler": "random", "attention": "head", "blocks": [1, 2], "scope": "block",
    "per_sample": True, "scale": "rows", "recompute": 0.5, "seed": 7, "per_block": True, "exact_downsampling": True,
    "capture": False,
}  # fmt: skip


@pytest.mark.parametrize("field", [its.name for its in fields(SBPConfig)])
@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_may_be_changed_in_any_field(preset, field):
    changed, plain = SBPConfig.preset(preset, **{field: CHANGED[field]}), SBPConfig.preset(preset)
    assert getattr(changed, field) == CHANGED[field]
    others = vars(plain).keys() - {field} - (LEFT - PRESETS[preset].keys())
    assert all(getattr(changed, name) == getattr(plain, name) for name in others)


@pytest.mark.parametrize("name", ["vit", "convnext", "swin"])
def test_gradients_are_unbiased_through_all_blocks(name):
    """Each parameter's, along that of full backpropagation: 1 on average, within five standard errors. Those of one
    mask for all blocks, without weights, are not."""
    plain, x = MODELS[name].model(drop_path=0.0), MODELS[name].images(2)
    exact = step(plain, x)[1]
    found = lengths(torchsbp.apply(copy.deepcopy(plain), 0.5, blocks=1.0), x, exact, 64)
    assert 0 < errors(found).abs().max() < 5
    other = lengths(torchsbp.apply(copy.deepcopy(plain), config=GRID, blocks=1.0), x, exact, 8)
    assert errors(other).abs().max() > 100


def lengths(model: nn.Module, x: Tensor, exact: dict[str, Tensor], steps: int) -> Tensor:
    """Of gradients along the exact ones, ``[steps, parameters]``."""
    found = []
    for _ in range(steps):
        gradients = step(model, x)[1]
        found.append(torch.stack([(gradients[name] * g).sum() / g.square().sum() for name, g in exact.items()]))
    return torch.stack(found)


def errors(found: Tensor) -> Tensor:
    """Of the mean over steps against 1, in standard errors; of what is exact in every step, 0."""
    return (found.mean(0) - 1) / (found.std(0) / len(found) ** 0.5).clamp(min=1e-9)
