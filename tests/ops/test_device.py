"""What each device runs, and that every op asks the one that stands in for it."""

import subprocess
import sys

import pytest
import torch

from torchsbp.ops import device as D
from torchsbp.ops import rows as R
from torchsbp.ops.attention import attention_branch
from torchsbp.ops.block import transformer_block
from torchsbp.ops.device import CPU, CPU_DEVICE, CUDA, Device, device_of, substituted
from torchsbp.ops.downsample import DownsampleSpec, downsample
from torchsbp.ops.heads import AttentionSpec
from torchsbp.ops.kernel_steps import KernelSteps
from torchsbp.ops.layers import BackwardOptions
from torchsbp.ops.mlp import MLPSpec, mlp_branch
from torchsbp.ops.operators import laid_out, order_of
from torchsbp.ops.sdpa import KERNELS
from torchsbp.ops.steps import Steps

from ..counting import Operators
from .helpers import attention_params, downsample_params, gradients, kept_rows, mlp_params


class Hopper(CUDA):
    def prefers_cudnn(self, q):
        return True

    def capturing(self):
        return False


class Ampere(CUDA):
    def prefers_cudnn(self, q):
        return False


@pytest.mark.parametrize(
    "device, dtype, width, fused, kernel",
    [
        (Device(), torch.float32, 64, True, "plain"),
        (CPU(), torch.float32, 64, True, "cpu"),
        (CPU(), torch.float64, 7, True, "cpu"),
        (CPU(), torch.float32, 64, False, "plain"),
        (Hopper(), torch.bfloat16, 64, False, "plain"),
        (Hopper(), torch.bfloat16, 128, True, "cudnn"),
        (Hopper(), torch.float16, 136, True, "flash"),
        (Hopper(), torch.float16, 264, True, "plain"),
        (Hopper(), torch.bfloat16, 20, True, "plain"),
        (Ampere(), torch.bfloat16, 64, True, "flash"),
        (Ampere(), torch.float32, 20, True, "efficient"),
        (Ampere(), torch.float32, 18, True, "plain"),
        (Ampere(), torch.float64, 64, True, "plain"),
    ],
)
def test_attention_kernels(device, dtype, width, fused, kernel):
    assert device.attention_kernel(torch.empty(1, 1, 2, width, dtype=dtype), fused) == kernel
    assert kernel in KERNELS


@pytest.mark.parametrize("version, half_tiles", [(91900, "flash"), (92600, "cudnn")])
def test_backward_avoids_cudnn_where_it_may_give_nan(version, half_tiles, monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: version)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    D._cudnn_overflows.cache_clear()
    few, one = (torch.empty(1, 1, rows, 64, dtype=torch.bfloat16) for rows in (99, 1))
    expected = {64: half_tiles, 576: half_tiles, 128: "cudnn", 197: "cudnn"}
    for rows, kernel in expected.items():
        k = torch.empty(1, 1, rows, 64, dtype=torch.bfloat16)
        assert Hopper().attention_kernel(k, fused=True) == "cudnn"
        assert Hopper().attention_backward_kernel(few, k, fused=True) == kernel
        assert Hopper().attention_backward_kernel(one, k, fused=True) == "flash"
        assert Ampere().attention_backward_kernel(one, k, fused=True) == "flash"
        assert Hopper().attention_backward_kernel(one.float(), k.float(), fused=True) == "efficient"
    D._cudnn_overflows.cache_clear()


def test_a_kernel_goes_back_from_what_another_went_forward_to():
    """O and L mean the same to all of them."""
    torch.manual_seed(0)
    q, k, v, do = torch.randn(4, 2, 3, 7, 5, dtype=torch.float64)
    found = {
        (forward, backward): KERNELS[backward].backward(do, q, k, v, *KERNELS[forward].forward(q, k, v, 0.3), 0.3)
        for forward in ("cpu", "plain")
        for backward in ("cpu", "plain")
    }
    for gradients_found in found.values():
        torch.testing.assert_close(tuple(gradients_found), tuple(found["plain", "plain"]))


def test_pytorch_is_asked_about_the_rows_that_are_trained(monkeypatch):
    """Its answer may depend on how many they are, and on whether their gradients are needed."""
    asked = []

    def choice(q, k, v):
        asked.append((q.shape[-2], q.requires_grad, torch.is_grad_enabled()))
        return torch.nn.attention.SDPBackend.CUDNN_ATTENTION.value if q.shape[-2] == 197 else 0

    empty = torch.empty
    monkeypatch.setattr(torch, "_fused_sdp_choice", choice)
    monkeypatch.setattr(torch, "empty", lambda *shape, device=None, **options: empty(*shape, **options))
    monkeypatch.setattr(D, "_PREFERS_CUDNN", {})
    with torch.no_grad():
        found = [CUDA().attention_kernel(empty(1, 1, rows, 64).bfloat16(), fused=True) for rows in (197, 64, 197)]
    assert found == ["cudnn", "flash", "cudnn"]
    assert asked == [(197, True, True), (64, True, True)]


def test_kernels_are_taken_for_rows_that_they_are_made_for():
    device = CUDA()
    device.has_triton = True
    found = {
        (dtype, width, count): type(device.steps(torch.empty(count, width, dtype=dtype), 1))
        for dtype in (torch.float32, torch.float64)
        for width in (D.WIDEST, D.WIDEST + 1)
        for count in (0, 1)
    }
    assert [key for key, kind in found.items() if kind is KernelSteps] == [(torch.float32, D.WIDEST, 1)]
    device.has_triton = False
    assert type(device.steps(torch.empty(1, 8), 1)) is Steps


def test_the_inverse_is_made_where_it_is_read():
    rows = torch.tensor([1, 4])
    assert CPU().inverse(rows, 5) is None
    assert CUDA().inverse(rows, 5).tolist() == [-1, 0, -1, -1, 1]


def test_the_device_is_that_of_the_tensor_unless_another_stands_in():
    x, other = torch.empty(1), Device()
    assert device_of(x) is CPU_DEVICE
    assert type(device_of(x.to("meta"))) is Device
    with substituted(other):
        assert device_of(x) is other
        with substituted(CPU()):
            assert device_of(x) is not other
        assert device_of(x) is other
    assert device_of(x) is CPU_DEVICE
    with pytest.raises(KeyError), substituted(other):
        raise KeyError
    assert device_of(x) is CPU_DEVICE


@pytest.mark.parametrize("needs", [(True, True, True), (True, False, False), (False, True, True), (True, True, False)])
@pytest.mark.parametrize("kernel, padding, dilation", [((7, 7), (3, 3), (1, 1)), ((3, 5), (2, 2), (2, 1))])
@pytest.mark.parametrize("groups, at_once, parts", [(6, 2**24, 1), (6, 900, 2), (6, 100, 3), (3, 100, 1)])
def test_gradients_of_convolutions(groups, at_once, parts, kernel, padding, dilation, needs, monkeypatch):
    """Depthwise or not, on a GPU they are those of autograd. A depthwise weight's is that of some images after another:
    of as many elements as are allowed at once, or of one of them."""
    monkeypatch.setattr(D, "LARGEST", at_once)
    torch.manual_seed(0)
    x = torch.randn(3, 6, 9, 8, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(6, 6 // groups, *kernel, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(6, dtype=torch.float64, requires_grad=True)
    y = torch.nn.functional.conv2d(x, weight, bias, 1, padding, dilation, groups)
    dy = torch.randn_like(y)
    wanted = torch.autograd.grad(y, (x, weight, bias), dy)
    with Operators() as seen:
        found = Hopper().convolution_backward(dy, x.detach(), weight.detach(), padding, dilation, groups, needs)
    apart = groups == 6 and needs[0]
    assert ("aten.convolution.default" in seen.names) == apart
    assert seen.names.count("aten.convolution_backward.default") == (
        int(not apart) if not any(needs[1:]) else parts if apart else 1
    )
    for gradient, expected, need in zip(found, wanted, needs, strict=True):
        assert (gradient is not None) == need
        if need:
            torch.testing.assert_close(gradient, expected, rtol=1e-12, atol=1e-12)


def test_tensors_are_laid_out_as_others():
    x = torch.randn(2, 5, 3, 4).transpose(1, 2)  # in rows, heads side by side
    in_rows, by_head = torch.empty(2, 5, 9, 4)[:, :, 3:6].transpose(1, 2), torch.empty(2, 3, 5, 4)
    assert laid_out(x, order_of(in_rows)).data_ptr() == x.data_ptr()
    assert laid_out(x, order_of(in_rows)).stride() == x.stride()
    found = laid_out(x, order_of(by_head))
    assert torch.equal(found, x)
    assert found.stride() == by_head.stride()


def test_the_mark_of_a_constant_is_that_of_the_compiler():
    def function():
        return 1

    assert vars(torch.compiler.assume_constant_result(function)) == vars(D._prefers_cudnn)


def test_importing_needs_torch_alone():
    names = "{'timm', 'torchvision', 'transformers', 'triton', 'torch._dynamo'}"
    code = f"import sys, torch; before = set(sys.modules); import torchsbp; print({names} & set(sys.modules) - before)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "set()"


class Recorded(CPU):
    """Says what it was asked."""

    def __init__(self):
        self.asked = set()

    def __getattribute__(self, name):
        if name in ("attention_kernel", "steps", "weight_gradient", "save_rows"):
            self.asked.add(name)
        return super().__getattribute__(name)


B, N, C, HEADS = 2, 8, 12, 3
SPEC = AttentionSpec(HEADS, 0.5)
OPS = {
    "mlp": (mlp_params, lambda x, rows, p: mlp_branch(x, rows, p), {"steps", "weight_gradient", "save_rows"}),
    "attention": (
        lambda c, hidden: attention_params(c, HEADS),
        lambda x, rows, p: attention_branch(x, rows, p, SPEC),
        {"attention_kernel", "steps", "weight_gradient", "save_rows"},
    ),
    "downsample": (
        lambda c, hidden: downsample_params(c, hidden, 2),
        lambda x, rows, p: downsample(x.mT.unflatten(2, (4, 2)), None, p, DownsampleSpec((2, 2))),
        {"steps", "weight_gradient"},
    ),
}


@pytest.mark.parametrize("name", OPS)
def test_ops_ask_their_device(name):
    build, run, expected = OPS[name]
    torch.manual_seed(0)
    x, p, device = torch.randn(B, N, C, dtype=torch.float64, requires_grad=True), build(C, 2 * C), Recorded()
    with substituted(device):
        y = run(x, kept_rows(B, N, 0.5), p)
        gradients(y, torch.ones_like(y), (x, *p))
    assert device.asked == expected


def test_the_block_asks_its_device():
    x, device = torch.randn(B, N, C, dtype=torch.float64, requires_grad=True), Recorded()
    p1, p2 = attention_params(C, HEADS), mlp_params(C, 2 * C)
    with substituted(device):
        y = transformer_block(
            x, kept_rows(B, N, 0.5), p1, SPEC, p2, MLPSpec(), options=BackwardOptions(recompute=False)
        )
        gradients(y, torch.ones_like(y), (x, *p1, *p2))
    assert device.asked == {"attention_kernel", "steps", "weight_gradient", "save_rows"}


def test_saved_rows_are_those_of_the_plain_gather():
    x, rows = torch.randn(2, 3, 4), torch.tensor([0, 5])
    for device in (Device(), CPU(), CUDA()):
        assert torch.equal(device.save_rows(x, rows), R.take(x, rows))
        assert device.save_rows(x, None, torch.bfloat16).dtype == torch.bfloat16
