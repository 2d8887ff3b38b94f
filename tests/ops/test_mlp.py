import pytest
import torch

from torchsbp.ops import layers, mlp, reference
from torchsbp.ops.activations import ACTIVATIONS, GATED
from torchsbp.ops.device import Device
from torchsbp.ops.layers import NO_NORM, BackwardOptions, Norm
from torchsbp.ops.mlp import MLPParams, MLPSpec, mlp_branch
from torchsbp.ops.rows import RowWeight

from .helpers import RATIOS, assert_same_gradients, gradients, kept_rows, mlp_params, post_norm

B, N, C, HIDDEN = 3, 20, 8, 24


def inputs(**kw):
    torch.manual_seed(0)
    x = torch.randn(B, N, C, dtype=torch.float64, requires_grad=True)
    return x, torch.randn_like(x), mlp_params(C, HIDDEN, **kw)


@pytest.mark.parametrize("recompute", [True, False])
@pytest.mark.parametrize("scope", ["branch", "block"])
@pytest.mark.parametrize("ratio", RATIOS)
def test_equals_reference(ratio, scope, recompute):
    x, dy, p = inputs()
    rows = kept_rows(B, N, ratio)
    factor = torch.tensor([0.0, 1.0, 2.0], dtype=x.dtype)
    options = BackwardOptions(scope, recompute)
    ours = mlp_branch(x, rows, p, factor=factor, options=options)
    theirs = reference.mlp_branch(x, rows, p, MLPSpec(), factor, scope)
    assert torch.equal(ours, theirs)
    assert_same_gradients(gradients(ours, dy, (x, *p)), gradients(theirs, dy, (x, *p)))


@pytest.mark.parametrize("residual", [True, False])
@pytest.mark.parametrize("prefix", [0, 2])
@pytest.mark.parametrize("ratio", [0.5, 0.25])
def test_weighted_rows_equal_reference(ratio, prefix, residual):
    x, dy, p = inputs()
    rows, weight, factor = kept_rows(B, N, ratio), RowWeight(1 / ratio, prefix), torch.tensor([0.0, 1.0, 2.0]).double()
    if prefix:  # they come first in every sample
        rows = (torch.arange(B)[:, None] * N + torch.arange(prefix + 3)).flatten()
    ours = mlp_branch(x, rows, p, factor=factor, residual=residual, options=BackwardOptions(row_weight=weight))
    theirs = reference.mlp_branch(x, rows, p, MLPSpec(), factor, weight=weight) - (0 if residual else x)
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    assert_same_gradients(gradients(ours, dy, (x, *p)), gradients(theirs, dy, (x, *p)))


@pytest.mark.parametrize("act", ACTIVATIONS)
@pytest.mark.parametrize("norm", [Norm(1e-5), Norm(1e-6, "rms")])
@pytest.mark.parametrize("bias,scale", [(True, False), (False, True), (False, False)])
def test_variants_equal_reference(act, norm, bias, scale):
    x, dy, p = inputs(bias=bias, scale=scale)
    if norm.kind == "rms":
        p = p._replace(norm_bias=None)
    rows = kept_rows(B, N, 0.5, shared=True)
    spec = MLPSpec(norm, act)
    ours, theirs = mlp_branch(x, rows, p, spec), reference.mlp_branch(x, rows, p, spec)
    assert torch.equal(ours, theirs)
    assert_same_gradients(gradients(ours, dy, (x, *p)), gradients(theirs, dy, (x, *p)))


@pytest.mark.parametrize("recompute", [True, False])
@pytest.mark.parametrize("inner_norm", [None, Norm(1e-5), Norm(1e-6, "rms")])
@pytest.mark.parametrize("act", ["silu", *(GATED + name for name in ACTIVATIONS)])
def test_gates_and_inner_norms_equal_reference(act, inner_norm, recompute):
    x, dy, p = inputs(gated=act.startswith(GATED), inner_norm=inner_norm is not None)
    if inner_norm is not None and inner_norm.kind == "rms":
        p = p._replace(inner_norm_bias=None)
    rows, spec = kept_rows(B, N, 0.5), MLPSpec(act=act, inner_norm=inner_norm)
    ours = mlp_branch(x, rows, p, spec, options=BackwardOptions(recompute=recompute))
    theirs = reference.mlp_branch(x, rows, p, spec)
    assert torch.equal(ours, theirs)
    assert_same_gradients(gradients(ours, dy, (x, *p)), gradients(theirs, dy, (x, *p)))


@pytest.mark.parametrize("frozen", ["", "weight1", "value_weight"])
@pytest.mark.parametrize("recompute", [True, False])
def test_the_layers_of_a_gate_may_be_apart(recompute, frozen):
    x, dy, p = inputs(gated=True)
    a, b = (part.detach().requires_grad_() for part in p.weight1.chunk(2))
    p = p._replace(weight1=a, value_weight=b)
    if frozen:
        getattr(p, frozen).requires_grad_(False)
    rows, spec = kept_rows(B, N, 0.5), MLPSpec(act=GATED + "silu")
    ours = mlp_branch(x, rows, p, spec, options=BackwardOptions(recompute=recompute))
    theirs = reference.mlp_branch(x, rows, p, spec)
    assert torch.equal(ours, theirs)
    assert_same_gradients(gradients(ours, dy, (x, *p)), gradients(theirs, dy, (x, *p)))


@pytest.mark.parametrize("frozen", ["", "weight1", "weight2"])
@pytest.mark.parametrize("recompute", [True, False])
@pytest.mark.parametrize("act, inner_norm", [("gelu", None), (GATED + "silu", None), (GATED + "silu", Norm())])
@pytest.mark.parametrize("ratio", [1.0, 0.25])
def test_a_backward_pass_in_halves_equals_reference(ratio, act, inner_norm, recompute, frozen, monkeypatch):
    monkeypatch.setattr(mlp, "PART", 1)
    monkeypatch.setattr(Device, "capturing", lambda self: True)
    x, dy, p = inputs(gated=act.startswith(GATED), inner_norm=inner_norm is not None)
    if frozen:
        getattr(p, frozen).requires_grad_(False)
    rows, spec = kept_rows(B, N, ratio), MLPSpec(act=act, inner_norm=inner_norm)
    ours = mlp_branch(x, rows, p, spec, options=BackwardOptions(recompute=recompute))
    theirs = reference.mlp_branch(x, rows, p, spec)
    assert_same_gradients(gradients(ours, dy, (x, *p)), gradients(theirs, dy, (x, *p)))


@pytest.mark.parametrize("kind", ["layer", "rms"])
def test_an_inner_norm_in_parts_has_the_same_bits(kind, monkeypatch):
    x, _, p = inputs(gated=True, inner_norm=True)
    p = MLPParams(*(None if t is None else t.float() for t in p))
    p = p if kind == "layer" else p._replace(inner_norm_bias=None)
    spec = MLPSpec(act=GATED + "silu", inner_norm=Norm(kind=kind))
    monkeypatch.setattr(layers, "PART", 5 * HIDDEN)
    with torch.autocast("cpu", torch.bfloat16):
        ours = mlp_branch(x.float(), None, p, spec)
        theirs = reference.mlp_branch(x.float(), None, p, spec)
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize("recompute", [True, False])
@pytest.mark.parametrize("scope", ["branch", "block"])
@pytest.mark.parametrize("ratio", [1.0, 0.5])
@pytest.mark.parametrize("norm", [Norm(1e-5), Norm(1e-6, "rms")])
def test_a_norm_behind_equals_reference(norm, ratio, scope, recompute):
    x, dy, p = inputs(inner_norm=True)
    p, spec = post_norm(p), MLPSpec(NO_NORM, inner_norm=Norm(), post_norm=norm)
    if norm.kind == "rms":
        p = p._replace(post_norm_bias=None)
    rows, factor = kept_rows(B, N, ratio), torch.tensor([0.0, 1.0, 2.0], dtype=x.dtype)
    ours = mlp_branch(x, rows, p, spec, factor=factor, options=BackwardOptions(scope, recompute))
    theirs = reference.mlp_branch(x, rows, p, spec, factor, scope)
    assert torch.equal(ours, theirs)
    assert_same_gradients(gradients(ours, dy, (x, *p)), gradients(theirs, dy, (x, *p)))


def test_without_residual_on_channels_first_maps():
    """As ConvNeXt uses it: a permuted view, the residual added elsewhere."""
    torch.manual_seed(0)
    x = torch.randn(B, C, 4, 5, dtype=torch.float64, requires_grad=True)
    p, rows, dy = mlp_params(C, HIDDEN), kept_rows(B, 20, 0.25), torch.randn(B, 4, 5, C, dtype=torch.float64)
    view = x.permute(0, 2, 3, 1)
    ours = mlp_branch(view, rows, p, residual=False)
    theirs = reference.gate(reference.mlp(view, p, MLPSpec()), rows)
    assert torch.equal(ours, theirs)
    assert_same_gradients(gradients(ours, dy, (x, *p)), gradients(theirs, dy, (x, *p)))


def test_gradcheck_at_ratio_one():
    torch.manual_seed(0)
    x = torch.randn(2, 3, 4, dtype=torch.float64, requires_grad=True)
    p, spec = mlp_params(4, 6, inner_norm=True), MLPSpec(inner_norm=Norm())
    given = [t for t in p if t is not None]
    assert torch.autograd.gradcheck(lambda x, *p: mlp_branch(x, None, MLPParams(*p), spec), (x, *given))


def test_weight_scale_multiplies_weight_gradients_only():
    x, dy, p = inputs(inner_norm=True)
    rows = kept_rows(B, N, 0.25)
    spec = MLPSpec(inner_norm=Norm())
    plain = gradients(mlp_branch(x, rows, p, spec), dy, (x, *p))
    scaled = gradients(mlp_branch(x, rows, p, spec, options=BackwardOptions(weight_scale=4.0)), dy, (x, *p))
    assert torch.equal(plain[0], scaled[0])
    for a, b in zip(plain[1:], scaled[1:], strict=True):
        assert a is b is None or torch.equal(4 * a, b)


ABSENT = ("post_norm_weight", "post_norm_bias", "value_weight")


@pytest.mark.parametrize("frozen", [name for name in MLPParams._fields if name not in ABSENT])
def test_frozen_parameter_gets_no_gradient_and_the_others_keep_theirs(frozen):
    x, dy, p = inputs(inner_norm=True)
    rows, spec = kept_rows(B, N, 0.5), MLPSpec(inner_norm=Norm())
    everything = gradients(mlp_branch(x, rows, p, spec), dy, (x, *p))
    getattr(p, frozen).requires_grad_(False)
    ours = gradients(mlp_branch(x, rows, p, spec), dy, (x, *p))
    for name, a, b in zip(("x", *p._fields), ours, everything, strict=True):
        if name in (frozen, *ABSENT):
            assert a is None
        else:
            assert torch.allclose(a, b, rtol=1e-12, atol=0)
