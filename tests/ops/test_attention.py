import re

import pytest
import torch
import torch.nn.functional as F

from torchsbp.ops import reference
from torchsbp.ops.attention import attention_branch
from torchsbp.ops.heads import AttentionParams, AttentionSpec
from torchsbp.ops.layers import COSINE, NO_NORM, BackwardOptions, Norm, norm_again, norm_backward
from torchsbp.ops.rows import RowWeight
from torchsbp.ops.rules import RULES
from torchsbp.ops.window_attention import NO_WINDOWS, one_window

from .helpers import RATIOS, assert_same_gradients, attention_params, gradients, kept_rows, param, post_norm

B, N, C, HEADS = 3, 20, 24, 3


def inputs(**kw):
    torch.manual_seed(0)
    x = torch.randn(B, N, C, dtype=torch.float64, requires_grad=True)
    return x, torch.randn_like(x), attention_params(C, HEADS, **kw)


def spec_of(rule: str, **kw) -> AttentionSpec:
    return AttentionSpec(HEADS, (C // HEADS) ** -0.5, rule=RULES[rule], **kw)


def check(x, dy, p, rows, heads, spec, factor=None, options=BackwardOptions(), cut=NO_WINDOWS):
    ours = attention_branch(x, rows, p, spec, heads=heads, factor=factor, options=options, cut=cut)
    theirs = reference.attention_branch(x, rows, p, spec, heads, factor, options.scope, options.row_weight, cut)
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    assert_same_gradients(gradients(ours, dy, (x, *p)), gradients(theirs, dy, (x, *p)))


@pytest.mark.parametrize("recompute", [True, False])
@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("scope", ["branch", "block"])
@pytest.mark.parametrize("rule", ["query", "qkv"])
@pytest.mark.parametrize("ratio", RATIOS)
def test_rows_equal_reference(ratio, rule, scope, fused, recompute):
    x, dy, p = inputs()
    factor = torch.tensor([0.0, 1.0, 2.0], dtype=x.dtype)
    spec = spec_of(rule, fused=fused)
    check(x, dy, p, kept_rows(B, N, ratio), None, spec, factor, BackwardOptions(scope, recompute))


@pytest.mark.parametrize("rule", ["query", "qkv"])
def test_weighted_rows_equal_reference(rule):
    x, dy, p = inputs()
    check(x, dy, p, kept_rows(B, N, 0.25), None, spec_of(rule), options=BackwardOptions(row_weight=RowWeight(4.0)))


@pytest.mark.parametrize("recompute", [True, False])
@pytest.mark.parametrize("heads", [[0, 1, 2], [0, 2], [1]])
def test_heads_equal_reference(heads, recompute):
    x, dy, p = inputs(qk_norm=True)
    spec = spec_of("head", qk_norm=Norm())
    check(x, dy, p, None, torch.tensor(heads), spec, options=BackwardOptions(recompute=recompute))


@pytest.mark.parametrize("rule", ["query", "qkv", "head"])
@pytest.mark.parametrize("qk_norm", [None, Norm(1e-5), Norm(1e-6, "rms")])
@pytest.mark.parametrize("bias,scale", [(True, False), (False, True), (False, False)])
def test_variants_equal_reference(rule, qk_norm, bias, scale):
    x, dy, p = inputs(bias=bias, scale=scale, qk_norm=qk_norm is not None)
    if qk_norm is not None and qk_norm.kind == "rms":
        p = p._replace(q_norm_bias=None, k_norm_bias=None)
    rows, heads = (None, torch.tensor([1])) if rule == "head" else (kept_rows(B, N, 0.25), None)
    check(x, dy, p, rows, heads, spec_of(rule, qk_norm=qk_norm))


@pytest.mark.parametrize("rule", ["query", "qkv", "head"])
@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("ratio", [1.0, 0.25])
def test_a_bias_of_all_scores_equals_reference(ratio, shared, rule):
    """All rows are one window then."""
    x, dy, p = inputs(qk_norm=True)
    p = p._replace(score_bias=param(HEADS, N, N))
    rows, heads = (None, torch.tensor([0, 2])) if rule == "head" else (kept_rows(B, N, ratio, shared), None)
    check(x, dy, p, rows, heads, spec_of(rule, qk_norm=Norm()), cut=one_window(N, rows, B, x.device))


@pytest.mark.parametrize("rule", ["query", "qkv", "exact"])
@pytest.mark.parametrize("recompute", [True, False])
@pytest.mark.parametrize("norm", [Norm(1e-5), Norm(1e-6, "rms")])
def test_inner_norms_equal_reference(norm, recompute, rule):
    x, dy, p = inputs()
    p = p._replace(inner_norm_weight=param(C), inner_norm_bias=param(C) if norm.kind == "layer" else None)
    check(
        x, dy, p, kept_rows(B, N, 0.5), None, spec_of(rule, inner_norm=norm), None, BackwardOptions(recompute=recompute)
    )


@pytest.mark.parametrize("rule", ["query", "qkv"])
@pytest.mark.parametrize("recompute", [True, False])
@pytest.mark.parametrize("ratio", [1.0, 0.5])
def test_cosines_and_a_norm_behind_equal_reference(ratio, recompute, rule):
    x, dy, p = inputs()
    p = post_norm(p)._replace(q_norm_weight=param(HEADS, 1, 1), inner_norm_weight=param(C))
    spec = spec_of(rule, norm=NO_NORM, qk_norm=COSINE, inner_norm=Norm(kind="rms"), post_norm=Norm(1e-5))
    check(x, dy, p, kept_rows(B, N, ratio), None, spec, options=BackwardOptions(recompute=recompute))


def test_cosines_are_those_of_torch():
    """Also of a vector of no length."""
    torch.manual_seed(0)
    x = torch.randn(2, 3, 5, 4, dtype=torch.float64).index_fill(2, torch.tensor(1), 0).requires_grad_()
    weight, dy = param(3, 1, 1), torch.randn(2, 3, 5, 4, dtype=torch.float64)
    expected = torch.autograd.grad(F.normalize(x, dim=-1) * weight, (x, weight), dy)
    n = norm_again(x.detach(), weight.detach(), None, COSINE, None)
    torch.testing.assert_close(n.y, F.normalize(x, dim=-1) * weight, rtol=1e-14, atol=0)
    assert_same_gradients(norm_backward(dy, n, weight.detach(), None, COSINE, True, False)[:2], expected)


def test_rule_qkv_zeroes_the_map_outside_kept_rows_and_columns():
    """The definition, as equations: dM_ij = 0 unless i and j are kept; dV_j = 0 unless j is kept."""
    torch.manual_seed(0)
    q, k, v, do = (torch.randn(1, 1, 6, 4, dtype=torch.float64) for _ in range(4))
    kept = torch.zeros(6, dtype=torch.bool).index_fill(0, torch.tensor([0, 2, 5]), True)
    p = (q @ k.mT * 0.5).softmax(-1)
    do = do * kept[:, None]
    dm = p * (do @ v.mT - (do * (p @ v)).sum(-1, keepdim=True)) * (kept[:, None] & kept)
    expected = dm @ k * 0.5, dm.mT @ q * 0.5, (p.mT @ do) * kept[:, None]
    q, k, v = (t.requires_grad_() for t in (q, k, v))
    m, gated_v = reference.drop_qkv(q @ k.mT * 0.5, v, kept.view(1, 1, 6))
    assert_same_gradients(torch.autograd.grad(m.softmax(-1) @ gated_v, (q, k, v), do), expected)


def test_gradcheck_at_ratio_one():
    torch.manual_seed(0)
    x = torch.randn(2, 3, 4, dtype=torch.float64, requires_grad=True)
    p = attention_params(4, 2, qk_norm=True)
    spec = AttentionSpec(2, 0.7, qk_norm=Norm())
    assert torch.autograd.gradcheck(lambda x, *p: attention_branch(x, None, AttentionParams(*p), spec), (x, *p))


OTHERS = [
    name for name in AttentionParams._fields if re.match("score_bias|rope|inner_norm|post_norm|[kv]_weight", name)
]


@pytest.mark.parametrize("frozen", [name for name in AttentionParams._fields if name not in OTHERS])
def test_frozen_parameter_gets_no_gradient_and_the_others_keep_theirs(frozen):
    x, dy, p = inputs(qk_norm=True)
    rows, spec = kept_rows(B, N, 0.5), spec_of("query", qk_norm=Norm())
    everything = gradients(attention_branch(x, rows, p, spec), dy, (x, *p))
    getattr(p, frozen).requires_grad_(False)
    ours = gradients(attention_branch(x, rows, p, spec), dy, (x, *p))
    for name, a, b in zip(("x", *p._fields), ours, everything, strict=True):
        assert a is None if name in (frozen, *OTHERS) else torch.allclose(a, b, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("frozen", ["", "qkv_weight", "v_weight"])
@pytest.mark.parametrize("rule", ["query", "qkv", "head", "exact"])
def test_weights_that_are_apart_equal_reference(rule, frozen):
    x, dy, p = inputs()
    q, k, v = (part.detach().requires_grad_() for part in p.qkv_weight.chunk(3))
    p = p._replace(qkv_weight=q, k_weight=k, v_weight=v)
    if frozen:
        getattr(p, frozen).requires_grad_(False)
    check(x, dy, p, kept_rows(B, N, 0.5), torch.tensor([0, 2]), spec_of(rule))


@pytest.mark.parametrize("rule", ["query", "qkv", "head"])
@pytest.mark.parametrize("qk_norm", [None, Norm()])
@pytest.mark.parametrize("half, by_head", [(False, False), (True, False), (True, True)])
def test_rotary_embeddings_equal_reference(rule, qk_norm, half, by_head):
    x, dy, p = inputs(qk_norm=qk_norm is not None)
    rope = torch.randn(*([HEADS] if by_head else []), N, 2 * C // HEADS, dtype=x.dtype, requires_grad=True)
    p = p._replace(rope=rope)
    rows, heads = (None, torch.tensor([0, 2])) if rule == "head" else (kept_rows(B, N, 0.25), None)
    check(x, dy, p, rows, heads, spec_of(rule, qk_norm=qk_norm, rotate_half=half))
