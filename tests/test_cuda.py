"""Patched models on a GPU: forward exact, compiled as eager, in mixed precision."""

import copy

import pytest
import torch
from timm.utils import ModelEmaV3

import torchsbp

from .families import FAMILIES, assert_gradients, entry_of, images, step

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


def test_compiled_once_for_all_batch_sizes():
    eager = torchsbp.apply(FAMILIES["vit"].model(embed_dim=96, depth=1).float().cuda(), keep_ratio=0.5)
    model = copy.deepcopy(eager)
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, dynamic=True)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for batch in (4, 6, 2):
            x = images(batch).float().cuda()
            for m, run in ((model, compiled), (eager, eager)):
                m.zero_grad()
                run(x).square().sum().backward()
            found, expected = ({n: p.grad for n, p in m.named_parameters()} for m in (model, eager))
            assert_gradients(found, expected, rtol=1e-3)
            assert torch.equal(torchsbp.kept(model)["blocks.0"], torchsbp.kept(eager)["blocks.0"])


@pytest.mark.parametrize("name", ["vit", "convnext"])
def test_grad_scaler_in_half_precision(name):
    """Unscaled gradients are as close as plain ones; an overflow reaches the scaler, which skips the step."""
    plain, model, x = pair(name, keep_ratio=1.0)
    _, exact = step(plain, x)

    def scaled(model, scale):
        scaler, optimizer = torch.amp.GradScaler("cuda", init_scale=scale), torch.optim.SGD(model.parameters(), lr=0.1)
        model.zero_grad()
        with torch.autocast("cuda", torch.float16):
            y = model(x).float()
        weights = torch.linspace(-1, 1, y.numel(), device="cuda").view_as(y)
        scaler.scale((y * weights + y.square()).sum()).backward()
        scaler.unscale_(optimizer)
        return scaler, optimizer

    errors = []
    for m in (model, plain):
        scaled(m, 2.0**6)
        errors.append(sum((p.grad - exact[n]).square().sum() for n, p in m.named_parameters()).sqrt())
    assert errors[0] <= 2 * errors[1]
    scaler, optimizer = scaled(model, 2.0**30)
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 2.0**29
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), plain.parameters(), strict=True))


@pytest.mark.parametrize("name", ["vit", "vit layer scale, drop path", "convnext"])
def test_checkpointed_blocks_repeat_the_same_masks(name):
    _, model, x = pair(name, keep_ratio=0.5, sampler="random")
    _, expected = step(model, x)
    torchsbp.set_step(model, 0)
    model.set_grad_checkpointing()
    assert_gradients(step(model, x)[1], expected, rtol=1e-4)
    assert entry_of(model).sbp_step == 1


@pytest.mark.parametrize("name", ["vit", "convnext"])
def test_gradient_accumulation_adds_up(name):
    _, model, x = pair(name, keep_ratio=0.5, sampler="random")
    parts = [step(model, x + i)[1] for i in range(2)]
    torchsbp.set_step(model, 0)
    model.zero_grad()
    for i in range(2):
        torch.manual_seed(2)
        y = model(x + i)
        weights = torch.linspace(-1, 1, y.numel(), device="cuda").view_as(y)
        (y * weights + y.square()).sum().backward()
    total = {n: p.grad for n, p in model.named_parameters()}
    assert_gradients(total, {n: parts[0][n] + parts[1][n] for n in total}, rtol=1e-4)


def trained(model, x, steps, ema=None):
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for i in steps:
        with torch.autocast("cuda", torch.bfloat16):
            step(model, x + i)
        optimizer.step()
        if ema is not None:
            ema.update(model)
    return model


def weights_of(model):
    return {n: p.detach().clone() for n, p in model.named_parameters()}


def test_ema_and_state_dict():
    """The average leaves training and its masks alone; a new model goes on from a state dict; a plain one loads it."""
    plain, start, x = pair("vit", keep_ratio=0.5, sampler="random")
    whole, half, model = (copy.deepcopy(start) for _ in range(3))
    ema, average = ModelEmaV3(start, decay=0.5), weights_of(start)
    trained(half, x, range(2), ema)
    for i in range(4):
        weights = weights_of(trained(whole, x, [i]))
        average = {n: (average[n] + w) / 2 for n, w in weights.items()} if i < 2 else average
    assert_gradients(weights_of(ema.module), average, rtol=1e-4)
    assert entry_of(ema.module).sbp_step == 0

    model.load_state_dict(half.state_dict())
    torchsbp.set_step(model, 2)
    trained(model, x, range(2, 4))
    assert_gradients(weights_of(model), weights_of(whole), rtol=1e-4)
    plain.load_state_dict(whole.state_dict())
    assert torch.equal(plain.eval()(x), whole.eval()(x))
