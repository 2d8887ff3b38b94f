import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchsbp.ops import reference
from torchsbp.ops.patches import cut_patches, patch_embedding

from ..counting import PRODUCTS, SavedBytes, counting_backend
from .helpers import assert_same_gradients, gradients, param

B, C, OUT = 2, 3, 10
CASES = {
    "square": ((8, 12), (4, 4)),
    "with a rest": ((9, 11), (2, 3)),
    "one long patch": ((4, 7), (4, 7)),
    "clips": ((4, 8, 12), (2, 4, 4)),
    "clips with a rest": ((5, 9, 7), (2, 4, 3)),
    "clips, frame by frame": ((3, 4, 6), (1, 2, 2)),
}
LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("backend", [None, "aot_eager"])
def test_equals_reference(case, bias, channels_last, backend):
    torch.manual_seed(0)
    size, kernel = CASES[case]
    x, weight = torch.randn(B, C, *size, dtype=torch.float64), param(OUT, C, *kernel).detach()
    if channels_last:
        x, weight = (t.to(memory_format=LAST[t.dim()]) for t in (x, weight))
    leaves = x.requires_grad_(), weight.requires_grad_(), param(OUT) if bias else None
    run = patch_embedding if backend is None else torch.compile(patch_embedding, backend=backend, fullgraph=True)
    ours, theirs = run(*leaves), reference.patch_embedding(*leaves)
    if backend is None:
        assert torch.equal(ours, theirs)
        assert ours.stride() == theirs.stride()
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    dy = torch.randn_like(ours)
    assert_same_gradients(gradients(ours, dy, leaves), gradients(theirs, dy, leaves))
    torch._dynamo.reset()


def test_gradcheck():
    torch.manual_seed(0)
    x = torch.randn(2, 2, 4, 5, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(patch_embedding, (x, param(3, 2, 2, 2), param(3)))


@pytest.mark.parametrize("trained", ["x", "weight", "bias", "weight, bias"])
def test_only_what_is_trained_gets_a_gradient(trained):
    torch.manual_seed(0)
    tensors = {"x": param(B, C, 5, 8), "weight": param(OUT, C, 2, 4), "bias": param(OUT)}
    for name, t in tensors.items():
        t.requires_grad_(name in trained.split(", "))
    leaves = tuple(tensors.values())
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        y = patch_embedding(*leaves)
    dy = torch.randn_like(y)
    assert_same_gradients(gradients(y, dy, leaves), gradients(reference.patch_embedding(*leaves), dy, leaves))
    expected = ["x", "weight"] if "weight" in trained else ["weight"]
    assert [t.data_ptr() for t in saved] == [tensors[name].data_ptr() for name in expected]


class Twin(nn.Module):
    """The convolution, and what it may be instead, in float32."""

    def __init__(self, kernel: tuple[int, ...] = (4, 4), held: bool = True) -> None:
        super().__init__()
        self.held = held
        torch.manual_seed(0)
        self.conv = (nn.Conv2d if len(kernel) == 2 else nn.Conv3d)(C, OUT, kernel, kernel)

    def forward(self, x: Tensor) -> Tensor:
        return patch_embedding(x, self.conv.weight, self.conv.bias, self.held)


@pytest.mark.parametrize("case", CASES)
def test_under_autocast(case):
    """The convolution's own output, gradients no further from exact ones than its own."""
    size, kernel = CASES[case]
    model, x = Twin(kernel), torch.randn(8, C, *size)
    leaves = tuple(model.parameters())
    with torch.autocast("cpu", torch.bfloat16):
        ours, theirs = model(x), model.conv(x)
    assert ours.dtype == torch.bfloat16
    assert torch.equal(ours, theirs)
    dy = torch.randn_like(ours)
    exact = gradients(model.conv(x), dy.float(), leaves)
    for a, b, e in zip(gradients(ours, dy, leaves), gradients(theirs, dy, leaves), exact, strict=True):
        assert a.dtype == torch.float32
        assert (a - e).norm() <= 1.1 * (b - e).norm() + 1e-6 * e.norm()


@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("compiled", [False, True])
def test_saves_nothing_but_images_that_others_hold(half, compiled):
    torch._dynamo.reset()
    model, x = Twin(), torch.randn(B, C, 8, 8)
    backend, _ = counting_backend(())
    run = torch.compile(model, backend=backend, fullgraph=True) if compiled else model
    with torch.autocast("cpu", torch.bfloat16, enabled=half), SavedBytes(model, x) as saved:
        run(x)
    assert saved.total == 0
    torch._dynamo.reset()


def test_what_nobody_holds_is_saved_in_the_precision_of_products():
    model, x = Twin(held=False), torch.randn(B, C, 8, 8)
    with torch.autocast("cpu", torch.bfloat16), SavedBytes(model, x) as saved:
        y = model(x)
    assert saved.total == 2 * x.numel()
    found, expected = (torch.autograd.grad(its.sum(), model.conv.weight) for its in (y, model.conv(x)))
    torch.testing.assert_close(found, expected, rtol=1e-2, atol=1e-1)


def test_compiled_it_is_one_product_and_no_convolution():
    torch._dynamo.reset()
    model, x = Twin(), torch.randn(B, C, 8, 8)
    for operators, expected in ((PRODUCTS, 1), ((torch.ops.aten.convolution.default,), 0)):
        torch._dynamo.reset()
        backend, counts = counting_backend(operators)
        torch.compile(copy.deepcopy(model), backend=backend, fullgraph=True)(x)
        assert counts == [expected]
    torch._dynamo.reset()


def test_a_weight_that_is_used_twice_under_autocast_keeps_both_gradients():
    """Autocast has a cache of weights in half precision: what is made without a graph must not get into it."""
    model, x = Twin(), torch.randn(B, C, 8, 8)
    with torch.autocast("cpu", torch.bfloat16):
        (model(x).sum() + model.conv(x).sum()).backward()
    both, model.conv.weight.grad = model.conv.weight.grad, None
    with torch.autocast("cpu", torch.bfloat16):
        model(x).sum().backward()
    torch.testing.assert_close(both, 2 * model.conv.weight.grad, rtol=1e-2, atol=1e-2 * float(both.abs().max()))


def test_patches_are_in_the_order_of_weights():
    x, weight = torch.randn(B, C, 9, 12), torch.randn(OUT, C, 4, 5)
    y = cut_patches(x, (4, 5), torch.float32) @ weight.flatten(1).t()
    torch.testing.assert_close(y.view(B, 2, 2, OUT).permute(0, 3, 1, 2), F.conv2d(x, weight, stride=(4, 5)))
