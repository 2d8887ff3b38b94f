"""Every model of the table computes what its definition says: its unpatched twin, gated at the kept positions."""

import copy
import re
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import torchsbp
from torchsbp import SBPConfig
from torchsbp.adapters.lean import Lean
from torchsbp.patching.site import patched_modules

from ..models import MODELS
from ..oracle import check_definition
from ..steps import GRID

RATIOS = (1.0, 0.5)
SHARED = {"sampler": "grid", "per_sample": False, "exact_downsampling": False}  # one mask for all, nothing weighted
BLOCK, SAVED = SHARED | {"scope": "block"}, {"recompute": False}
RANDOM = {"per_sample": True, "sampler": "random"}
BALANCED = {"per_block": False}
ROWS = {"keep_ratio": 0.25, "sampler": "grid"}
DEPTH = SHARED | {"blocks": 1.0, "keep_ratio": (0.25, 0.75), "recompute": 0.5}
OPTIONS = {  # every two of scope, recompute, per_sample and scale meet; rule by rule: test_rules.py
    "lean": (BLOCK, SAVED | BLOCK, SHARED | RANDOM, BALANCED, ROWS | SAVED, DEPTH),
    "tokens": (BLOCK, SAVED | BLOCK, ROWS | RANDOM, ROWS | SAVED, DEPTH),
    "maps": (SAVED | BLOCK, BLOCK | RANDOM, BALANCED, ROWS | SAVED, DEPTH),
    "windows": (BLOCK, SAVED | SHARED | RANDOM, BALANCED, ROWS | SAVED, DEPTH | {"per_sample": True}),
    "member": (),
}
UNUSED = r"mask_token|post_layernorm|vision_model\.head|predictor|pooler"  # by the libraries' own forward
CASES = [(name, options) for name, tiny in MODELS.items() for options in OPTIONS[tiny.kind]]


@pytest.mark.parametrize("ratio", RATIOS)
@pytest.mark.parametrize("name", MODELS)
def test_ratios(name, ratio):
    model = MODELS[name].model()
    _, gradients = check_definition(model, SBPConfig(keep_ratio=ratio), MODELS[name].images())
    assert all(n in gradients or re.search(UNUSED, n) for n, _ in model.named_parameters())
    learned = [g for n, g in gradients.items() if any(part in n for part in ("bias_table", "mlp", "logit"))]
    assert all(g.norm() > 0 for g in learned)


@pytest.mark.parametrize("name, options", CASES, ids=str)
def test_options_with_stochastic_depth(name, options):
    model = MODELS[name].model(drop_path=0.5)
    check_definition(model, SBPConfig(**{"keep_ratio": 0.5} | options), MODELS[name].images())


@pytest.mark.parametrize(
    "name, size",
    [
        ("convnext", (75, 101)),
        ("convnext v2", (75, 101)),
        ("convnext simple norm", (75, 101)),
        ("coatnet max pool", (72, 104)),
        ("coatnext", (96, 160)),
    ],
)
def test_odd_sizes(name, size):
    model = MODELS[name].model(**{"img_size": size} if name.startswith("coat") else {})
    check_definition(model, replace(GRID, blocks=1.0), MODELS[name].images(size=size))


@pytest.mark.parametrize("name", MODELS)
def test_forward_is_bit_identical(name):
    """With stochastic depth; where sums are in another order, to rounding. So are those of lean blocks in float64."""
    tiny = MODELS[name]
    for dtype, rounding in ((torch.float64, 1e-13), (torch.float32, 2e-6)):
        plain, x = tiny.model(drop_path=0.5).to(dtype), tiny.images().to(dtype)
        model = torchsbp.apply(copy.deepcopy(plain), keep_ratio=0.5)
        y, expected = forward(model, x), forward(plain, x)
        same_bits = tiny.same_bits and not (dtype == torch.float64 and has_lean_blocks(model))
        limit = 0 if same_bits else rounding * expected.abs().max()
        assert (y - expected).abs().max() <= limit


def forward(model: nn.Module, x: Tensor) -> Tensor:
    torch.manual_seed(2)
    return model(x)


def has_lean_blocks(model: nn.Module) -> bool:
    return any(isinstance(getattr(site.sbp, "description", None), Lean) for _, site in patched_modules(model))
