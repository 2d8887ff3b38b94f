import pytest
import torch

from torchsbp.ops import reference
from torchsbp.ops.attention import attention_branch
from torchsbp.ops.block import transformer_block
from torchsbp.ops.heads import AttentionParams, AttentionSpec
from torchsbp.ops.layers import NO_NORM, BackwardOptions, Norm
from torchsbp.ops.mlp import MLPParams, MLPSpec
from torchsbp.ops.named import split
from torchsbp.ops.rows import RowWeight
from torchsbp.ops.rules import RULES

from .helpers import RATIOS, assert_same_gradients, attention_params, gradients, kept_rows, mlp_params, post_norm

B, N, C, HEADS = 3, 20, 24, 3


def inputs(**kw):
    torch.manual_seed(0)
    x = torch.randn(B, N, C, dtype=torch.float64, requires_grad=True)
    return x, torch.randn_like(x), attention_params(C, HEADS, **kw), mlp_params(C, 4 * C, **kw)


def spec_of(rule: str) -> AttentionSpec:
    return AttentionSpec(HEADS, (C // HEADS) ** -0.5, rule=RULES[rule])


@pytest.mark.parametrize("recompute", [True, False])
@pytest.mark.parametrize("scope", ["branch", "block"])
@pytest.mark.parametrize("rule", ["query", "qkv", "exact"])
@pytest.mark.parametrize("ratio", RATIOS)
def test_equals_reference(ratio, rule, scope, recompute):
    x, dy, p1, p2 = inputs()
    rows, spec = kept_rows(B, N, ratio), spec_of(rule)
    factors = torch.tensor([[0.0, 1.0, 2.0], [2.0, 0.0, 1.0]], dtype=x.dtype).unbind()
    ours = transformer_block(
        x, rows, p1, spec, p2, MLPSpec(), factors=factors, options=BackwardOptions(scope, recompute)
    )
    theirs = reference.transformer_block(x, rows, p1, spec, p2, MLPSpec(), factors, scope)
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    leaves = (x, *p1, *p2)
    assert_same_gradients(gradients(ours, dy, leaves), gradients(theirs, dy, leaves))


@pytest.mark.parametrize("parts", ["block", "attention"])
def test_rows_that_lie_across_memory_do_not_stay_so(parts):
    x, dy, p1, p2 = inputs()
    rows, spec, found = kept_rows(B, N, 0.5), spec_of("query"), []
    for across in (False, True):
        its = (x.detach().mT.contiguous().mT if across else x.detach()).requires_grad_()
        whole = parts == "block"
        y = transformer_block(its, rows, p1, spec, p2, MLPSpec()) if whole else attention_branch(its, rows, p1, spec)
        assert (its.is_contiguous(), y.is_contiguous()) == (not across, True)
        found.append((y, *gradients(y, dy, (its, *p1))))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True) if a is not None)


@pytest.mark.parametrize("recompute", [True, False])
@pytest.mark.parametrize("scope", ["branch", "block"])
@pytest.mark.parametrize("rule", ["query", "qkv", "exact"])
@pytest.mark.parametrize("ratio", [1.0, 0.5])
def test_norms_behind_equal_reference(ratio, rule, scope, recompute):
    x, dy, p1, p2 = inputs()
    p1, p2, rows = post_norm(p1), post_norm(p2), kept_rows(B, N, ratio)
    spec1, spec2 = spec_of(rule)._replace(norm=NO_NORM, post_norm=Norm()), MLPSpec(NO_NORM, post_norm=Norm())
    factors = torch.tensor([[0.0, 1.0, 2.0], [2.0, 0.0, 1.0]], dtype=x.dtype).unbind()
    options = BackwardOptions(scope, recompute)
    ours = transformer_block(x, rows, p1, spec1, p2, spec2, factors=factors, options=options)
    theirs = reference.transformer_block(x, rows, p1, spec1, p2, spec2, factors, scope)
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    leaves = (x, *p1, *p2)
    assert_same_gradients(gradients(ours, dy, leaves), gradients(theirs, dy, leaves))


@pytest.mark.parametrize("recompute", [True, False])
@pytest.mark.parametrize("rule", ["query", "qkv", "exact"])
@pytest.mark.parametrize("prefix", [0, 2])
def test_weighted_rows_equal_reference(prefix, rule, recompute):
    x, dy, p1, p2 = inputs()
    places = torch.tensor([0, 1, 4, 7, 8, 13, 19])
    rows, spec, weight = (torch.arange(B)[:, None] * N + places).flatten(), spec_of(rule), RowWeight(3.6, prefix)
    factors = torch.tensor([[0.0, 1.0, 2.0], [2.0, 0.0, 1.0]], dtype=x.dtype).unbind()
    options = BackwardOptions(recompute=recompute, row_weight=weight)
    ours = transformer_block(x, rows, p1, spec, p2, MLPSpec(), factors=factors, options=options)
    theirs = reference.transformer_block(x, rows, p1, spec, p2, MLPSpec(), factors, weight=weight)
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    leaves = (x, *p1, *p2)
    assert_same_gradients(gradients(ours, dy, leaves), gradients(theirs, dy, leaves))


@pytest.mark.parametrize("rule", ["query", "exact"])
def test_weighted_rows_are_unbiased(rule):
    """The mean over all masks of one position beside the class token is the exact gradient."""
    x, dy, p1, p2 = inputs()
    leaves, spec, found = (x, *p1, *p2), spec_of(rule), []
    exact = gradients(transformer_block(x, None, p1, spec, p2, MLPSpec()), dy, leaves)
    options = BackwardOptions(row_weight=RowWeight(N - 1, 1))
    for kept in range(1, N):
        rows = (torch.arange(B)[:, None] * N + torch.tensor([0, kept])).flatten()
        found.append(gradients(transformer_block(x, rows, p1, spec, p2, MLPSpec(), options=options), dy, leaves))
    mean = [None if its[0] is None else torch.stack(its).mean(0) for its in zip(*found, strict=True)]
    assert_same_gradients(mean, exact)


def test_without_biases_and_scales():
    x, dy, p1, p2 = inputs(bias=False, scale=False)
    rows = kept_rows(B, N, 0.5)
    ours = transformer_block(x, rows, p1, spec_of("query"), p2, MLPSpec())
    theirs = reference.transformer_block(x, rows, p1, spec_of("query"), p2, MLPSpec())
    leaves = (x, *p1, *p2)
    assert_same_gradients(gradients(ours, dy, leaves), gradients(theirs, dy, leaves))


def test_gradcheck_at_ratio_one():
    torch.manual_seed(0)
    x = torch.randn(2, 3, 4, dtype=torch.float64, requires_grad=True)
    p1, p2 = attention_params(4, 2), mlp_params(4, 6)
    spec = AttentionSpec(2, 0.7)

    def block(x, *p):
        attention, mlp = split(p, AttentionParams, MLPParams)
        return transformer_block(x, None, attention, spec, mlp, MLPSpec())

    leaves = [t for t in (x, *p1, *p2) if t is not None]
    slots = [i for i, t in enumerate((*p1, *p2)) if t is not None]

    def dense(x, *given):
        p = [None] * (len(p1) + len(p2))
        for i, t in zip(slots, given, strict=True):
            p[i] = t
        return block(x, *p)

    assert torch.autograd.gradcheck(dense, leaves)


@pytest.mark.parametrize("recompute", [True, False])
@pytest.mark.parametrize("rule", ["query", "qkv", "exact"])
@pytest.mark.parametrize("ratio", [1.0, 0.5])
@pytest.mark.parametrize("behind", [False, True])
def test_saved_bytes_are_those_of_the_formula(behind, rule, ratio, recompute):
    """x (kept rows under "qkv"), attention output and log-sum-exp of kept rows, indices; Q, K, V and the hidden layer
    unless they are recomputed; nothing else, also where norms are behind the branches."""
    x, _, p1, p2 = inputs()
    rows, spec1, spec2 = kept_rows(B, N, ratio), spec_of(rule), MLPSpec()
    if behind:
        p1, p2, spec1 = post_norm(p1), post_norm(p2), spec1._replace(norm=NO_NORM, post_norm=Norm())
        spec2 = MLPSpec(NO_NORM, post_norm=Norm())
    saved = 0
    params = {t.data_ptr() for t in (*p1, *p2) if t is not None}
    storages = set()

    def pack(t):
        nonlocal saved
        if t.data_ptr() not in params and t.untyped_storage()._cdata not in storages:
            storages.add(t.untyped_storage()._cdata)
            saved += t.untyped_storage().nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        y = transformer_block(x, rows, p1, spec1, p2, spec2, options=BackwardOptions(recompute=recompute))
    k = B * round(ratio * N)
    kv, q = k if rule == "qkv" else B * N, B * N if rule == "exact" else k
    numbers = kv * C + q * C + q * HEADS
    if not recompute:
        numbers += q * C + 2 * kv * C + k * 4 * C
        if rule == "query" and rows is not None:
            numbers += B * N * C  # K and V are views of the whole projection, queries included
    assert y.requires_grad
    assert saved == 8 * numbers + (0 if rows is None else 8 * k)
