import pytest
import torch

from torchsbp.ops import reference
from torchsbp.ops.attention import attention_branch
from torchsbp.ops.block import transformer_block
from torchsbp.ops.heads import AttentionSpec
from torchsbp.ops.layers import BackwardOptions
from torchsbp.ops.mlp import MLPSpec
from torchsbp.ops.rules import RULES, Rule

from .helpers import assert_same_gradients, attention_params, gradients, kept_rows, mlp_params

B, N, C, HEADS = 3, 10, 24, 3


def inputs():
    torch.manual_seed(0)
    x = torch.randn(B, N, C, dtype=torch.float64, requires_grad=True)
    return x, torch.randn_like(x), attention_params(C, HEADS), kept_rows(B, N, 0.5), torch.tensor([0, 2])


def test_the_rules_by_name():
    assert list(RULES) == ["query", "qkv", "head", "exact"]
    assert all(rule.name == name for name, rule in RULES.items())


@pytest.mark.parametrize("recompute", [True, False])
@pytest.mark.parametrize(
    "rule",
    [*RULES.values(), Rule("query and head", True, False, True), Rule("qkv and head", True, True, True)],
    ids=lambda rule: rule.name,
)
def test_a_rule_alone_says_what_is_sampled(rule, recompute):
    """Also one that nobody has named: rows and heads are given, and taken where the rule says so."""
    x, dy, p, rows, heads = inputs()
    spec = AttentionSpec(HEADS, 0.3, rule=rule)
    ours = attention_branch(x, rows, p, spec, heads=heads, options=BackwardOptions(recompute=recompute))
    theirs = reference.attention_branch(x, rows, p, spec, heads)
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    assert_same_gradients(gradients(ours, dy, (x, *p)), gradients(theirs, dy, (x, *p)))


def test_the_block_is_for_rules_of_rows():
    x, _, p, rows, _ = inputs()
    with pytest.raises(AssertionError, match="attention_branch"):
        transformer_block(x, rows, p, AttentionSpec(HEADS, 0.3, rule=RULES["head"]), mlp_params(C, C), MLPSpec())
