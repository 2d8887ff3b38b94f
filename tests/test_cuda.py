"""Patched models on a GPU: forward exact, compiled as eager, in mixed precision, and in every way users train them."""

import copy
import io

import pytest
import torch
import torch.distributed as dist
from timm.utils import ModelEmaV3
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils._pytree import tree_leaves, tree_structure

import torchsbp
from torchsbp.sampling import operators

from .models import LEAN, MODELS, images, tiny_vit
from .oracle import check_step
from .patching.test_compose import spawn
from .steps import GRID, assert_gradients, distance, entry_of, gradients_of, loss_of, step

pytestmark = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

NAMES = ["vit", "vit layer scale, drop path", "vit qk norm, no bias", "convnext", "torchvision convnext"]


def pair(name: str, **options):
    # Heads of width 32: the fused kernels want a multiple of 8.
    wider = {"embed_dim": 96} if name.startswith("vit") else {}
    plain = MODELS[name].model(**wider).float().cuda()
    return plain, torchsbp.apply(copy.deepcopy(plain), **options), MODELS[name].images(3).float().cuda()


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
    assert distance(found, exact) <= 2 * distance(expected, exact)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"per_sample": True, "sampler": "random"},
        {"per_sample": "balanced", "sampler": "random", "scale": "rows", "exact_downsampling": True, "per_block": True},
        {"attention": "exact", "keep_ratio": 0.3, "scale": "rows", "exact_downsampling": True},
    ],
    ids=str,
)
@pytest.mark.parametrize("name", ["vit", "convnext"])
def test_compiled_trains_without_recompilation(name, options):
    _, eager, x = pair(name, **{"keep_ratio": 0.5} | options)
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


@pytest.mark.parametrize("sampler", ["random", "norm"])
@pytest.mark.parametrize("name", ["vit", "convnext"])
def test_a_whole_step_as_a_cuda_graph(name, sampler):
    """Captured once, every replay counts a step and draws its masks: parameters become those of eager training."""
    _, eager, x = pair(name, keep_ratio=0.5, sampler=sampler)
    models = eager, copy.deepcopy(eager)
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-3, capturable=True) for model in models]

    def train(model, optimizer):
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cuda", torch.bfloat16, cache_enabled=False):
            loss = model(x).float().square().sum()
        loss.backward()
        optimizer.step()

    for model, optimizer in zip(models, optimizers, strict=True):
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(3):
                train(model, optimizer)
        torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        train(models[1], optimizers[1])
    torchsbp.set_step(models[1], 3)  # capturing has counted, and has computed nothing
    drawn = []
    for _ in range(3):
        graph.replay()
        train(eager, optimizers[0])
        drawn_by_each = [tree_leaves(entry_of(model).sbp.masks.drawn.sites) for model in (models[1], eager)]
        assert all(torch.equal(*pair) for pair in zip(*drawn_by_each, strict=True) if isinstance(pair[0], torch.Tensor))
        drawn.append(torch.cat([t.flatten() for t in drawn_by_each[0] if isinstance(t, torch.Tensor)]))
    assert not torch.equal(drawn[0], drawn[1])
    for found, wanted in zip(models[1].parameters(), eager.parameters(), strict=True):
        assert torch.equal(found, wanted)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize(
    "options",
    [{}, {"per_sample": True, "per_block": False}, {"config": GRID}],
    ids=str,
)
@pytest.mark.parametrize("name", ["vit", "convnext", "swin"])
def test_masks_are_drawn_as_one_launch(name, options, padded):
    """From the second forward on a graph draws them: the same masks, also while an earlier backward has not come."""
    _, model, x = pair(name, keep_ratio=0.5, scale="none", **options)
    height, width = x.shape[-2:]
    plain = copy.deepcopy(model)
    captures = entry_of(model).sbp.masks.captures
    entry_of(plain).sbp.masks.captures.drawn = lambda draw, sizes, step, depends: draw(sizes)
    losses, expected = [], []
    for i in range(4):
        for its in (model, plain) if padded else ():
            torchsbp.set_sizes(its, [(height - 4 * i, width)] * len(x), (height, width))
        losses.append(model(x).square().sum())
        expected.append(plain(x).square().sum())
        found = torchsbp.kept(model), torchsbp.kept(plain)
        assert all(torch.equal(found[0][site], found[1][site]) for site in found[0])
    (captured,) = captures.graphs.values()
    assert captured is not None
    sum(losses).backward()
    sum(expected).backward()
    assert_gradients(gradients_of(model), gradients_of(plain), rtol=1e-6)
    copied = copy.deepcopy(model)
    copied(x), plain(x)
    found = torchsbp.kept(copied), torchsbp.kept(plain)
    assert all(torch.equal(found[0][site], found[1][site]) for site in found[0])


@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores")  # Inductor's, on what is not enabled here
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("options", [{}, {"per_sample": True, "per_block": False}, {"config": GRID}], ids=str)
@pytest.mark.parametrize("name", ["vit", "convnext", "swin"])
def test_compiled_masks_are_drawn_as_one_launch(name, options, padded):
    """The same as in eager mode, from a graph too; what was drawn before stays as it is."""
    _, model, x = pair(name, keep_ratio=0.5, scale="none", **options)
    height, width = x.shape[-2:]
    plain, found, expected = copy.deepcopy(model), [], []
    torch._dynamo.reset()
    operators.release()
    run = torch.compile(entry_of(model), fullgraph=True)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for i in range(4):
            for its in (model, plain) if padded else ():
                torchsbp.set_sizes(its, [(height - 4 * i, width)] * len(x), (height, width))
            run(x), entry_of(plain)(x)
            found.append(entry_of(model).sbp.masks.drawn)
            expected.append(entry_of(plain).sbp.masks.drawn)
    (captured,) = operators.CAPTURES.graphs.values()
    assert captured is not None
    assert tree_structure(found) == tree_structure(expected)
    for a, b in zip(tree_leaves(found), tree_leaves(expected), strict=True):
        assert torch.equal(a, b) if isinstance(b, torch.Tensor) else a == b
    copied = copy.deepcopy(model)
    torch.compile(entry_of(copied), fullgraph=True)(x), entry_of(plain)(x)
    kept, wanted = torchsbp.kept(copied), torchsbp.kept(plain)
    assert all(torch.equal(kept[site], wanted[site]) for site in wanted)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
@pytest.mark.parametrize("name", ["vit", "convnext", "swin"])
def test_a_step_waits_for_nothing(name):
    """Nor do sizes on their way to the GPU: the CPU goes on, and the GPU finds its next step at hand."""
    _, model, x = pair(name, keep_ratio=0.5, scale="none")
    height, width = x.shape[-2:]
    for mode in ("default", "default", "default", "error"):
        torch.cuda.set_sync_debug_mode(mode)
        try:
            torchsbp.set_sizes(model, [(height - 4, width)] * len(x), (height, width))
            model(x).square().sum().backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
@pytest.mark.parametrize("name", ["vit", "convnext", "swin"])
def test_rows_are_chosen_in_backward_as_well_by_graphs(name):
    """Step after step, where passes are replayed; nothing waits for what is chosen."""
    plain, model, x = pair(name, keep_ratio=0.5, sampler="norm")
    uncaptured = torchsbp.apply(plain, keep_ratio=0.5, sampler="norm", capture=False)
    for number in range(6):
        torch.cuda.set_sync_debug_mode("error" if number > 3 else "default")
        try:
            model.zero_grad()
            model(x).square().sum().backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        uncaptured.zero_grad()
        uncaptured(x).square().sum().backward()
        assert_gradients(gradients_of(model), gradients_of(uncaptured), rtol=1e-5)


@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores")  # Inductor's, on what is not enabled here
@pytest.mark.parametrize("name", ["vit", "convnext", "swin"])
def test_compiled_steps_choose_rows_in_backward_as_eager_ones_do(name):
    _, eager, x = pair(name, keep_ratio=0.5, sampler="norm")
    model = copy.deepcopy(eager)
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for _ in range(4):
            model.zero_grad(), eager.zero_grad()
            compiled(x).square().sum().backward()
            eager(x).square().sum().backward()
            assert_gradients(gradients_of(model), gradients_of(eager), rtol=1e-3)


@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores")  # Inductor's, on what is not enabled here
def test_compiled_once_for_all_batch_sizes():
    eager = torchsbp.apply(LEAN["vit"].model(embed_dim=96, depth=1).float().cuda(), keep_ratio=0.5)
    model = copy.deepcopy(eager)
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, dynamic=True)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for batch in (4, 6, 2):
            x = images(batch).float().cuda()
            for m, run in ((model, compiled), (eager, eager)):
                m.zero_grad()
                run(x).square().sum().backward()
            assert_gradients(gradients_of(model), gradients_of(eager), rtol=1e-3)
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
        scaler.scale(loss_of(y)).backward()
        scaler.unscale_(optimizer)
        return scaler, optimizer

    errors = []
    for m in (model, plain):
        scaled(m, 2.0**6)
        errors.append(distance(gradients_of(m), exact))
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


@pytest.mark.parametrize("name", ["vit", "convnext"])
def test_a_saved_model_and_an_exported_one(name):
    """In eval mode they are the plain model's; a model that was saved whole trains on with the same masks."""
    plain, model, x = pair(name, keep_ratio=0.5)
    file = io.BytesIO()
    torch.save(model, file)
    loaded = torch.load(io.BytesIO(file.getvalue()), weights_only=False)
    assert_gradients(step(loaded, x)[1], step(model, x)[1], rtol=1e-4)
    plain.eval(), model.eval()
    exported = torch.export.export(model, (x,), dynamic_shapes=({0: torch.export.Dim("batch")},))
    assert torch.equal(exported.module()(x[:2]), plain(x[:2]))


def test_hooks_on_blocks_see_what_they_see_in_a_plain_model():
    plain, model, x = pair("vit", keep_ratio=1.0)
    seen: list[list[torch.Tensor]] = [[], []]
    for m, values in zip((plain, model), seen, strict=True):
        m.double()
        m.blocks[1].register_forward_hook(lambda _, args, y, v=values: v.extend([args[0].detach(), y.detach()]))
        m.blocks[1].register_full_backward_hook(lambda _, dx, dy, v=values: v.extend([dx[0], dy[0]]))
        step(m, x.double())
    assert len(seen[0]) == 4
    for expected, found in zip(*seen, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", ["vit", "convnext"])
def test_a_new_head_after_apply(name):
    plain = LEAN[name].model().cuda()
    model = torchsbp.apply(copy.deepcopy(plain), keep_ratio=0.5)
    for m in (model, plain):
        torch.manual_seed(3)
        m.reset_classifier(7)
        m.double().cuda()
    check_step(model, plain, images().cuda())
    assert model(images().cuda()).shape == (3, 7)


def test_image_sizes_may_change():
    plain = tiny_vit(dynamic_img_size=True, img_size=64).double().train().cuda()
    model = torchsbp.apply(copy.deepcopy(plain), keep_ratio=0.5)
    for size in ((64, 64), (96, 64), (48, 128)):
        x = torch.randn(2, 3, *size, dtype=torch.float64, device="cuda")
        check_step(model, copy.deepcopy(plain), x)


def ddp_gradients(rank):
    model = torchsbp.apply(LEAN["vit"].model().cuda(), keep_ratio=1.0)
    parallel = nn.parallel.DistributedDataParallel(model)
    for _ in range(2):  # unused parameters would raise in the second step
        model.zero_grad()
        parallel(images(4)[2 * rank : 2 * rank + 2].cuda()).square().sum().backward()
    return {n: p.grad.cpu() for n, p in model.named_parameters()}


def test_ddp_equals_one_process(tmp_path):
    """Two processes on one GPU."""
    model = torchsbp.apply(LEAN["vit"].model(), keep_ratio=1.0)
    model(images(4)).square().sum().backward()
    expected = {n: p.grad / 2 for n, p in model.named_parameters()}
    for found in spawn(ddp_gradients, tmp_path):
        assert_gradients(found, expected)


@pytest.mark.filterwarnings("ignore::UserWarning")  # of NCCL, about the one process
def test_fsdp2_equals_one_process(tmp_path):
    _, model, x = pair("vit", keep_ratio=0.5)
    _, expected = step(copy.deepcopy(model), x)
    dist.init_process_group("nccl", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        for block in model.blocks:
            fully_shard(block)
        _, found = step(fully_shard(model), x)
        assert_gradients({n: g.full_tensor() for n, g in found.items()}, expected, rtol=1e-4)
    finally:
        dist.destroy_process_group()
