import pytest
import torch

from torchsbp.ops import reference
from torchsbp.ops.downsample import DownsampleParams, DownsampleSpec, downsample
from torchsbp.ops.layers import BackwardOptions
from torchsbp.ops.rows import RowWeight

from .helpers import RATIOS, assert_same_gradients, downsample_params, gradients, kept_rows

B, C, OUT = 2, 6, 10


@pytest.mark.parametrize("ratio", RATIOS)
@pytest.mark.parametrize("size,kernel,stride", [((8, 12), 2, 2), ((9, 11), 2, 2), ((11, 9), 2, 3), ((8, 8), 4, 4)])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_equals_reference(ratio, size, kernel, stride, bias, memory_format):
    torch.manual_seed(0)
    x = torch.randn(B, C, *size, dtype=torch.float64).to(memory_format=memory_format).requires_grad_()
    p = downsample_params(C, OUT, kernel, bias=bias)
    h, w = ((s - kernel) // stride + 1 for s in size)
    rows = kept_rows(B, h * w, max(ratio, 1 / (h * w)))
    spec = DownsampleSpec((stride, stride))
    ours, theirs = downsample(x, rows, p, spec), reference.downsample(x, rows, p, spec)
    assert torch.equal(ours, theirs)
    dy = torch.randn_like(ours)
    assert_same_gradients(gradients(ours, dy, (x, *p)), gradients(theirs, dy, (x, *p)))


def test_weighted_rows_equal_reference():
    torch.manual_seed(0)
    x = torch.randn(B, C, 8, 12, dtype=torch.float64, requires_grad=True)
    p, rows, spec, weight = downsample_params(C, OUT, 2), kept_rows(B, 24, 0.25), DownsampleSpec((2, 2)), RowWeight(4.0)
    ours = downsample(x, rows, p, spec, BackwardOptions(row_weight=weight))
    theirs = reference.downsample(x, rows, p, spec, weight)
    dy = torch.randn_like(ours)
    assert_same_gradients(gradients(ours, dy, (x, *p)), gradients(theirs, dy, (x, *p)))


def test_gradcheck_at_ratio_one():
    torch.manual_seed(0)
    x = torch.randn(2, 3, 4, 5, dtype=torch.float64, requires_grad=True)
    p = downsample_params(3, 4, 2)
    spec = DownsampleSpec((2, 2))
    assert torch.autograd.gradcheck(lambda x, *p: downsample(x, None, DownsampleParams(*p), spec), (x, *p))


def test_saves_only_kept_patches():
    torch.manual_seed(0)
    x = torch.randn(B, C, 8, 8, dtype=torch.float64, requires_grad=True)
    p, rows = downsample_params(C, OUT, 2), kept_rows(B, 16, 0.25)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.shape) or t, lambda t: t):
        downsample(x, rows, p, DownsampleSpec((2, 2)))
    assert saved[:2] == [(B * 4 * 4, C), (B * 4,)]


def test_where_all_is_kept_it_saves_its_input():
    x = torch.randn(B, C, 8, 8, dtype=torch.float64, requires_grad=True)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        downsample(x, None, downsample_params(C, OUT, 2), DownsampleSpec((2, 2)))
    assert saved[0].data_ptr() == x.data_ptr()
    assert saved[0].shape == x.shape
    assert not any(t.dtype == torch.int64 for t in saved)
