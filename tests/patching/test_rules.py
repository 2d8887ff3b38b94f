"""Attention rules of blocks that are known part by part: the library's own forward, with attention written out."""

import pytest

from torchsbp import SBPConfig

from ..models import MODELS, QUERY
from ..oracle import check_rule

ATTENTION = [(name, rule) for name, tiny in MODELS.items() for rule in tiny.rules if tiny.rules != QUERY]
CASES = [(1.0, "branch"), (0.5, "branch"), (0.25, "block"), (0.1, "branch")]
ALL_CASES = [(ratio, scope) for ratio in (1.0, 0.75, 0.5, 0.25, 0.1) for scope in ("branch", "block")]


@pytest.mark.parametrize(
    "name, rule, ratio, scope",
    [(name, rule, *case) for name, rule in ATTENTION for case in (ALL_CASES if name == "vit" else CASES)],
)
def test_gradients_equal_the_oracle(name, rule, ratio, scope):
    tiny = MODELS[name]
    check_rule(tiny.model(), SBPConfig(keep_ratio=ratio, attention=rule, scope=scope), tiny.images())


@pytest.mark.parametrize("name, rule", ATTENTION)
def test_options_equal_the_oracle(name, rule):
    options = {"recompute": False, "per_sample": True, "blocks": 1.0, "keep_ratio": (0.25, 0.75)}
    model = MODELS[name].model(drop_path=0.5)
    check_rule(model, SBPConfig(**options, attention=rule, scope="block"), MODELS[name].images())


@pytest.mark.parametrize("name, rule", [case for case in ATTENTION if case[1] != "head"])
def test_weighted_rows_equal_the_oracle(name, rule):
    options = {"scale": "rows", "per_sample": "balanced", "keep_ratio": 0.25}
    check_rule(MODELS[name].model(drop_path=0.5), SBPConfig(**options, attention=rule), MODELS[name].images())
