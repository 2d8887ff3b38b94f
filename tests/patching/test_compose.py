"""With autocast, torch.compile, DDP, FSDP2, EMA, state dicts, export, hooks, other heads and image sizes."""

import copy
import os
from pathlib import Path

import pytest
import torch
import torch._dynamo
import torch.distributed as dist
import torch.multiprocessing as mp
from timm.utils import ModelEmaV3
from torch import nn

import torchsbp
from torchsbp.sampling import drawing

from ..counting import SavedBytes
from ..models import LEAN, images, tiny_vit
from ..oracle import check_step
from ..steps import FAULTS_OF_TORCH_2_11, assert_gradients, distance, entry_of, gradients_of, loss_of, step

SMALL = ["vit", "vit layer scale, drop path", "convnext", "torchvision convnext"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", SMALL)
def test_autocast_forward_equals_plain_and_gradients_are_as_close(name, dtype):
    plain = LEAN[name].model().float()
    model = torchsbp.apply(copy.deepcopy(plain), keep_ratio=1.0)
    x = images().float()
    _, exact = step(plain, x)
    with torch.autocast("cpu", dtype):
        y, found = step(model, x)
        expected_y, expected = step(plain, x)
    assert y.dtype == expected_y.dtype
    torch.testing.assert_close(y, expected_y, rtol=0, atol=1e-5)
    assert distance(found, exact) <= 1.5 * distance(expected, exact)
    assert all(found[k].dtype == torch.float32 for k in found)


@pytest.mark.parametrize("name", ["vit", "convnext"])
def test_grad_scaler_in_half_precision(name):
    """Unscaled gradients are as close as plain ones; an overflow reaches the scaler, which skips the step."""
    plain = LEAN[name].model().float()
    x = images().float()
    _, exact = step(plain, x)

    def scaled(model: nn.Module, scale: float) -> tuple[torch.amp.GradScaler, torch.optim.Optimizer]:
        scaler, optimizer = torch.amp.GradScaler("cpu", init_scale=scale), torch.optim.SGD(model.parameters(), lr=0.1)
        model.zero_grad()
        with torch.autocast("cpu", torch.float16):
            y = model(x)
        scaler.scale(loss_of(y.float())).backward()
        scaler.unscale_(optimizer)
        return scaler, optimizer

    errors = {}
    for ratio in (None, 1.0):
        model = copy.deepcopy(plain) if ratio is None else torchsbp.apply(copy.deepcopy(plain), keep_ratio=ratio)
        scaled(model, 2.0**6)
        errors[ratio] = distance(gradients_of(model), exact)
    assert errors[1.0] <= 1.5 * errors[None]

    model = torchsbp.apply(copy.deepcopy(plain), keep_ratio=0.5)
    scaler, optimizer = scaled(model, 2.0**30)
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 2.0**29
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), plain.parameters(), strict=True))


@pytest.fixture
def no_recompilation():
    torch._dynamo.reset()
    with torch._dynamo.config.patch(error_on_recompile=True):
        yield
    torch._dynamo.reset()


FEWER = {"vit": {"depth": 2}, "convnext": {"depths": (1, 1, 1, 1)}}  # blocks to compile: a sampled and an exact one
COMPILED = [
    ("vit", {}),
    ("vit", {"attention": "qkv", "per_sample": True, "sampler": "random"}),
    ("vit", {"attention": "head", "recompute": False}),
    ("vit", {"attention": "exact", "scale": "rows", "per_sample": "balanced"}),
    ("convnext", {}),
    ("convnext", {"exact_downsampling": False}),
    ("convnext", {"scope": "block", "recompute": False}),
]


@pytest.mark.parametrize("name, options", COMPILED, ids=str)
def test_compiled_gradients_and_saved_bytes_are_those_of_eager(name, options, no_recompilation):
    """Full graph, ten steps with new masks, no recompilation; the partitioner saves no more than eager does."""
    check_compiled(name, options, "aot_eager_decomp_partition", steps=10)


@FAULTS_OF_TORCH_2_11
@pytest.mark.parametrize("name", ["vit", "convnext"])
def test_inductor(name, no_recompilation):
    check_compiled(name, {}, "inductor", steps=10)


def check_compiled(name: str, options: dict, backend: str, steps: int) -> None:
    eager = torchsbp.apply(LEAN[name].model(**FEWER[name]), keep_ratio=0.5, **options)
    model = copy.deepcopy(eager)
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    seen = set()
    for i in range(steps):
        x = images() + i
        with SavedBytes(eager, x) as expected:
            eager(x)
        torchsbp.set_step(eager, i)
        _, expected_gradients = step(eager, x)
        model.zero_grad()
        torch.manual_seed(2)
        with SavedBytes(model, x) as saved:
            y = compiled(x)
        loss_of(y).backward()
        assert_gradients(gradients_of(model), expected_gradients)
        kept, expected_kept = torchsbp.kept(model), torchsbp.kept(eager)
        assert all(torch.equal(kept[site], expected_kept[site]) for site in kept)
        if (backend, name) != ("inductor", "convnext"):  # which also saves the image in another memory format
            assert saved.total <= expected.total
        seen.add(tuple(torch.cat([k.flatten() for k in kept.values()]).tolist()))
    assert len(seen) > 1
    assert entry_of(model).sbp_step == steps


def test_compiled_convnext_with_changing_image_sizes():
    """Its first two stages: every further one makes the compiler halve symbolic sizes again, for seconds."""
    torch._dynamo.reset()
    first_two = {"features_only": True, "out_indices": (0, 1)}
    eager = torchsbp.apply(LEAN["convnext"].model(**FEWER["convnext"], **first_two), keep_ratio=0.5)
    model = copy.deepcopy(eager)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for size in ((64, 96), (96, 128)):  # compiled for one size, then for sizes that change
        x = torch.randn(2, 3, *size, dtype=torch.float64)
        model.zero_grad()
        compiled(x)[-1].square().sum().backward()
        eager.zero_grad()
        eager(x)[-1].square().sum().backward()
        assert_gradients(gradients_of(model), gradients_of(eager))


def test_compiled_once_for_all_batch_sizes(no_recompilation):
    eager = torchsbp.apply(LEAN["vit"].model(depth=1), keep_ratio=0.5, scale="weight")
    model = copy.deepcopy(eager)
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend="aot_eager")
    for batch in (4, 6, 2):  # not 3, the number of channels: sizes that are equal at first are taken to stay equal
        x = images(batch)
        for m in (model, eager):
            m.zero_grad()
        compiled(x).square().sum().backward()
        eager(x).square().sum().backward()
        assert_gradients(gradients_of(model), gradients_of(eager))
        assert torch.equal(torchsbp.kept(model)["blocks.0"], torchsbp.kept(eager)["blocks.0"])


def test_compiled_with_checkpointed_blocks(no_recompilation):
    eager = torchsbp.apply(LEAN["vit"].model(depth=1), keep_ratio=0.5)
    model = copy.deepcopy(eager)
    model.set_grad_checkpointing()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for i in range(2):
        for m in (model, eager):
            m.zero_grad()
        compiled(images() + i).square().sum().backward()
        eager(images() + i).square().sum().backward()
        assert_gradients(gradients_of(model), gradients_of(eager))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # dynamo looks at the block's non-leaf input
def test_compiled_blocks_alone(no_recompilation):
    """Regional compilation: masks are inputs of each block's graph."""
    eager = torchsbp.apply(LEAN["vit"].model(**FEWER["vit"]), keep_ratio=0.5)
    model = copy.deepcopy(eager)
    with torch._dynamo.config.patch(error_on_recompile=False):
        for block in model.blocks:
            block.compile(fullgraph=True, backend="aot_eager")
        for i in range(3):
            assert_gradients(step(model, images() + i)[1], step(eager, images() + i)[1])


def spawn(worker, tmp_path: Path, *args) -> list:
    """Run ``worker(rank, *args)`` in two gloo processes; what each returned."""
    mp.start_processes(_run, (worker, str(tmp_path), *args), nprocs=2, start_method="forkserver")
    return [torch.load(tmp_path / f"{rank}.pt") for rank in range(2)]


def _run(rank: int, worker, folder: str, *args) -> None:
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank)}
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    torch.save(worker(rank, *args), Path(folder) / f"{rank}.pt")
    dist.destroy_process_group()


def average_of_ranks(monkeypatch, masks_step: int, **options) -> dict[str, torch.Tensor]:
    """What two processes must find: each half of the batch with the masks of its rank."""
    model = torchsbp.apply(LEAN["vit"].model(), **options)
    for rank in range(2):
        monkeypatch.setattr(drawing, "rank", lambda rank=rank: rank)
        torchsbp.set_step(model, masks_step)
        model(images(4)[2 * rank : 2 * rank + 2]).square().sum().backward()
    return {n: p.grad / 2 for n, p in model.named_parameters()}


def train_ddp(rank: int, ratio: float) -> dict:
    model = torchsbp.apply(LEAN["vit"].model(), keep_ratio=ratio, sampler="random")
    parallel = nn.parallel.DistributedDataParallel(model)
    x = images(4)[2 * rank : 2 * rank + 2]
    for _ in range(2):  # unused parameters would raise in the second step
        model.zero_grad()
        parallel(x).square().sum().backward()
    return {
        "gradients": {n: p.grad for n, p in model.named_parameters()},
        "kept": torchsbp.kept(model)["blocks.2"] if ratio < 1 else None,
    }


def train_fsdp(rank: int, ratio: float) -> dict:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = torchsbp.apply(LEAN["vit"].model(), keep_ratio=ratio)
    mesh = init_device_mesh("cpu", (2,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    model(images(4)[2 * rank : 2 * rank + 2]).square().sum().backward()
    return {"gradients": {n: p.grad.full_tensor() for n, p in model.named_parameters()}}


WAYS = {"ddp": train_ddp, "fsdp": train_fsdp}


def train_all_ways(rank: int) -> dict:
    return {(way, ratio): train(rank, ratio) for way, train in WAYS.items() for ratio in (1.0, 0.5)}


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    """What two processes found, by way and ratio; each starts once."""
    return spawn(train_all_ways, tmp_path_factory.mktemp("two"))


@pytest.mark.parametrize("way", WAYS)
def test_two_processes_equal_one(two, way):
    model = torchsbp.apply(LEAN["vit"].model(), keep_ratio=1.0)
    model(images(4)).square().sum().backward()
    expected = {n: p.grad / 2 for n, p in model.named_parameters()}  # they average over processes
    for results in two:
        assert_gradients(results[way, 1.0]["gradients"], expected)


@pytest.mark.parametrize("way, masks_step, options", [("ddp", 1, {"sampler": "random"}), ("fsdp", 0, {})])
def test_sampled_gradients_of_the_ranks_are_averaged(two, monkeypatch, way, masks_step, options):
    expected = average_of_ranks(monkeypatch, masks_step, keep_ratio=0.5, **options)
    for results in two:
        assert_gradients(results[way, 0.5]["gradients"], expected)


def test_every_rank_draws_its_own_mask(two):
    first, second = (results["ddp", 0.5]["kept"] for results in two)
    assert not torch.equal(first, second)


def trained(model: nn.Module, steps: range, ema: ModelEmaV3 | None = None) -> nn.Module:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for i in steps:
        step(model, images() + i)
        optimizer.step()
        if ema is not None:
            ema.update(model)
    return model


def test_ema_averages_the_weights_and_leaves_the_masks_alone():
    """The average is a patched copy of its own; at ratio 1 it is that of plain training, at 0.5 training is unmoved."""
    averages = []
    for ratio in (1.0, None):
        model = LEAN["vit"].model() if ratio is None else torchsbp.apply(LEAN["vit"].model(), ratio)
        averages.append(ModelEmaV3(model, decay=0.5))
        trained(model, range(3), averages[-1])
    found, expected = (dict(ema.module.named_parameters()) for ema in averages)
    assert_gradients(found, expected)

    alone = trained(torchsbp.apply(LEAN["vit"].model(), 0.5, sampler="random"), range(3))
    model = torchsbp.apply(LEAN["vit"].model(), 0.5, sampler="random")
    ema = ModelEmaV3(model, decay=0.5)
    trained(model, range(3), ema)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), alone.parameters(), strict=True))
    assert entry_of(ema.module).sbp_step == 0


@pytest.mark.parametrize("name", ["vit", "convnext"])
def test_a_state_dict_continues_in_a_new_model_and_loads_into_a_plain_one(name):
    whole = trained(torchsbp.apply(LEAN[name].model(), 0.5, sampler="random"), range(4))
    half = trained(torchsbp.apply(LEAN[name].model(), 0.5, sampler="random"), range(2))
    model = torchsbp.apply(LEAN[name].model(), 0.5, sampler="random")
    model.load_state_dict(half.state_dict())
    torchsbp.set_step(model, 2)
    trained(model, range(2, 4))
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), whole.parameters(), strict=True))
    plain = LEAN[name].model().eval()
    plain.load_state_dict(whole.state_dict())
    assert torch.equal(plain(images()), whole.eval()(images()))


@pytest.mark.parametrize("name", ["vit", "convnext"])
def test_export_in_eval_mode(name):
    model = torchsbp.apply(LEAN[name].model(), keep_ratio=0.5).eval()
    batch = {0: torch.export.Dim("batch")}
    exported = torch.export.export(model, (images(4),), dynamic_shapes=(batch,))
    assert torch.equal(exported.module()(images(2)), model(images(2)))
    assert exported.state_dict.keys() == LEAN[name].model().state_dict().keys()


def test_hooks_on_blocks_see_what_they_see_in_a_plain_model():
    seen: dict[float | None, list[torch.Tensor]] = {None: [], 1.0: []}
    for ratio, values in seen.items():
        model = LEAN["vit"].model() if ratio is None else torchsbp.apply(LEAN["vit"].model(), ratio)
        block = model.blocks[1]
        block.register_forward_pre_hook(lambda _, args, v=values: v.append(args[0].detach()))
        block.register_forward_hook(lambda _, args, y, v=values: v.append(y.detach()))
        block.register_full_backward_hook(lambda _, dx, dy, v=values: v.extend([dx[0], dy[0]]))
        step(model, images())
    assert len(seen[1.0]) == 4
    for found, expected in zip(*seen.values(), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", ["vit", "convnext"])
def test_a_new_head_after_apply(name):
    """timm's reset_classifier; the rest of the model is as the oracle says."""
    models = [torchsbp.apply(LEAN[name].model(), keep_ratio=0.5), LEAN[name].model()]
    for model in models:
        torch.manual_seed(3)
        model.reset_classifier(7)
        model.double()
    check_step(*models, images())
    assert models[0](images()).shape == (3, 7)


def test_vit_with_changing_image_sizes():
    plain = tiny_vit(dynamic_img_size=True, img_size=64).double().train()
    model = torchsbp.apply(copy.deepcopy(plain), keep_ratio=0.5)
    for height, width in ((64, 64), (96, 64), (48, 128)):
        x = torch.randn(2, 3, height, width, dtype=torch.float64)
        check_step(model, copy.deepcopy(plain), x)
        assert torchsbp.kept(model)["blocks.2"].shape == (2, 1 + height * width // 256 // 2)
