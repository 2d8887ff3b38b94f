import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from torchsbp.ops import reference
from torchsbp.ops.conv_block import ConvParams, ConvSpec, conv_block
from torchsbp.ops.layers import BackwardOptions
from torchsbp.ops.mlp import MLPParams, MLPSpec, mlp_branch

from .helpers import RATIOS, assert_same_gradients, gradients, kept_rows, mlp_params, param

B, C, H, W, HIDDEN = 2, 6, 5, 4, 9
SPEC = ConvSpec((3, 3), (1, 1), C)


def given(bias: bool = True, **kw) -> tuple[Tensor, ConvParams, MLPParams]:
    torch.manual_seed(0)
    conv = ConvParams(param(C, 1, 7, 7, **kw), param(C, **kw) if bias else None)
    return param(B, C, H, W, **kw), conv, mlp_params(C, HIDDEN, bias=bias, **kw)


def rows_of(x: Tensor, conv: ConvParams) -> Tensor:
    return F.conv2d(x, conv.weight, conv.bias, 1, *SPEC).permute(0, 2, 3, 1)


@pytest.mark.parametrize("ratio", RATIOS)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("factor", [None, torch.tensor([0.0, 2.0], dtype=torch.float64)], ids=["", "factor"])
def test_equals_reference(ratio, bias, memory_format, factor):
    x, conv, mlp = given(bias)
    x = x.detach().to(memory_format=memory_format).requires_grad_()
    rows = kept_rows(B, H * W, ratio)
    ours = conv_block(x, rows, conv, SPEC, mlp, MLPSpec(), factor=factor)
    branch = reference.per_sample(reference.mlp(rows_of(x, conv), mlp, MLPSpec()), factor)
    theirs = reference.gate(branch, rows).permute(0, 3, 1, 2) + x
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    dy, inputs = torch.randn_like(ours), (x, *conv, *mlp)
    assert_same_gradients(gradients(ours, dy, inputs), gradients(theirs, dy, inputs))


@pytest.mark.parametrize("dtype, autocast", [(torch.float32, False), (torch.float32, True), (torch.bfloat16, True)])
@pytest.mark.parametrize("recompute", [True, False])
def test_the_bits_are_those_of_convolution_branch_and_sum(dtype, autocast, recompute):
    """Also where x comes in half precision and the block gives float32: its gradient is rounded before it is summed."""
    x, conv, mlp = given(dtype=torch.float32)
    x, dy = x.detach().to(dtype).requires_grad_(), torch.randn(B, C, H, W)
    rows, options = kept_rows(B, H * W, 0.5), BackwardOptions(recompute=recompute)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        ours = conv_block(x, rows, conv, SPEC, mlp, MLPSpec(), options=options)
        branch = mlp_branch(rows_of(x, conv), rows, mlp, MLPSpec(), residual=False, options=options)
        theirs = branch.permute(0, 3, 1, 2) + x
    assert torch.equal(ours, theirs)
    inputs = (x, *conv, *mlp)
    pairs = zip(gradients(ours, dy, inputs), gradients(theirs, dy, inputs), strict=True)
    assert all((a is None and b is None) or (torch.equal(a, b) and a.dtype == b.dtype) for a, b in pairs)


@pytest.mark.parametrize("frozen", [(0,), (1,), (1, 2), (0, 1, 2), (3, 5)])
def test_what_is_frozen_has_no_gradient_and_the_rest_the_same(frozen):
    inputs = [t for part in given() for t in ((part,) if isinstance(part, Tensor) else part)]
    used = [t if t is None or i not in frozen else t.detach() for i, t in enumerate(inputs)]
    rows, found = kept_rows(B, H * W, 0.5), []
    for x, *params in (inputs, used):
        y = conv_block(x, rows, ConvParams(*params[:2]), SPEC, MLPParams(*params[2:]), MLPSpec())
        found.append(gradients(y, torch.ones_like(y), (x, *params)))
    for i, (wanted, its) in enumerate(zip(*found, strict=True)):
        assert its is None if i in frozen or wanted is None else torch.equal(its, wanted)


def test_it_saves_its_input_and_kept_rows():
    x, conv, mlp = given(dtype=torch.float32)
    rows, saved = kept_rows(B, H * W, 0.25), []
    noted = torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append((t.shape, t.dtype)) or t, lambda t: t)
    with noted, torch.autocast("cpu", torch.bfloat16):
        conv_block(x, rows, conv, SPEC, mlp, MLPSpec())
    half = torch.bfloat16
    assert saved[:3] == [((B, C, H, W), half), ((C, 1, 7, 7), half), ((B * H * W // 4, C), half)]
