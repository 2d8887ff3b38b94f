"""Patched models on a GPU: forward exact, compiled as eager, in mixed precision."""

import copy

import pytest
import torch

import torchsbp

from .families import FAMILIES, images, step

pytestmark = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

NAMES = ["vit", "vit layer scale, drop path", "vit qk norm, no bias", "convnext", "torchvision convnext"]


def pair(name: str, **options):
    # Heads of width 32: the fused kernels want a multiple of 8.
    wider = {"embed_dim": 96} if name.startswith("vit") else {}
    plain = FAMILIES[name].model(**wider).float().cuda()
    return plain, torchsbp.apply(copy.deepcopy(plain), **options), images().float().cuda()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, None])
@pytest.mark.parametrize("name", NAMES)
def test_forward_equals_plain(name, dtype):
    plain, model, x = pair(name, keep_ratio=0.5)
    with torch.autocast("cuda", dtype, enabled=dtype is not None):
        torch.manual_seed(0)
        expected = plain(x)
        torch.manual_seed(0)
        assert torch.equal(model(x), expected)


@pytest.mark.parametrize("name", NAMES)
def test_gradients_at_ratio_one_are_as_close_as_plain(name):
    plain, model, x = pair(name, keep_ratio=1.0)
    _, exact = step(plain, x)
    with torch.autocast("cuda", torch.bfloat16):
        found, expected = step(model, x)[1], step(plain, x)[1]
    error = sum((found[k] - exact[k]).square().sum() for k in exact).sqrt()
    baseline = sum((expected[k] - exact[k]).square().sum() for k in exact).sqrt()
    assert error <= 2 * baseline


@pytest.mark.parametrize("name", ["vit", "convnext"])
def test_compiled_trains_without_recompilation(name):
    _, eager, x = pair(name, keep_ratio=0.5)
    model = copy.deepcopy(eager)
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for _ in range(10):
            with torch.autocast("cuda", torch.bfloat16):
                model.zero_grad(), eager.zero_grad()
                compiled(x).float().square().sum().backward()
                eager(x).float().square().sum().backward()
            kept, expected = torchsbp.kept(model), torchsbp.kept(eager)
            assert all(torch.equal(kept[site], expected[site]) for site in kept)
            a = torch.cat([p.grad.flatten() for p in model.parameters()])
            b = torch.cat([p.grad.flatten() for p in eager.parameters()])
            assert (a - b).norm() < 0.02 * b.norm()
