"""With autocast, torch.compile, DDP and FSDP2."""

import copy
import os
from pathlib import Path

import pytest
import torch
import torch._dynamo
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

import torchsbp

from .counting import SavedBytes
from .families import FAMILIES, assert_gradients, entry_of, images, step

SMALL = ["vit", "vit layer scale, drop path", "convnext", "torchvision convnext"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", SMALL)
def test_autocast_forward_equals_plain_and_gradients_are_as_close(name, dtype):
    plain = FAMILIES[name].model().float()
    model = torchsbp.apply(copy.deepcopy(plain), keep_ratio=1.0)
    x = images().float()
    _, exact = step(plain, x)
    with torch.autocast("cpu", dtype):
        y, found = step(model, x)
        expected_y, expected = step(plain, x)
    assert y.dtype == expected_y.dtype
    torch.testing.assert_close(y, expected_y, rtol=0, atol=1e-5)
    error = sum((found[k] - exact[k]).square().sum() for k in exact).sqrt()
    baseline = sum((expected[k] - exact[k]).square().sum() for k in exact).sqrt()
    assert error <= 1.5 * baseline
    assert all(found[k].dtype == torch.float32 for k in found)


@pytest.fixture
def no_recompilation():
    torch._dynamo.reset()
    with torch._dynamo.config.patch(error_on_recompile=True):
        yield
    torch._dynamo.reset()


COMPILED = [
    ("vit", {}),
    ("vit", {"attention": "qkv", "per_sample": True, "sampler": "random"}),
    ("vit", {"attention": "head", "recompute": False}),
    ("convnext", {}),
    ("convnext", {"scope": "block", "recompute": False}),
]


@pytest.mark.parametrize("name, options", COMPILED, ids=str)
def test_compiled_gradients_and_saved_bytes_are_those_of_eager(name, options, no_recompilation):
    """Full graph, ten steps with new masks, no recompilation; the partitioner saves no more than eager does."""
    check_compiled(name, options, "aot_eager_decomp_partition", steps=10)


@pytest.mark.parametrize("name", ["vit", "convnext"])
def test_inductor(name, no_recompilation):
    check_compiled(name, {}, "inductor", steps=10)


def check_compiled(name: str, options: dict, backend: str, steps: int) -> None:
    eager = torchsbp.apply(FAMILIES[name].model(), keep_ratio=0.5, **options)
    model = copy.deepcopy(eager)
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    masks = set()
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
        weights = torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view_as(y)
        (y * weights + y.square()).sum().backward()
        assert_gradients({n: p.grad for n, p in model.named_parameters()}, expected_gradients)
        kept, expected_kept = torchsbp.kept(model), torchsbp.kept(eager)
        assert all(torch.equal(kept[site], expected_kept[site]) for site in kept)
        if backend != "inductor":  # which also saves the image in another memory format
            assert saved.total <= expected.total
        masks.add(tuple(torch.cat([k.flatten() for k in kept.values()]).tolist()))
    assert len(masks) > 1
    assert entry_of(model).sbp_step == steps


def test_compiled_convnext_with_changing_image_sizes():
    torch._dynamo.reset()
    eager = torchsbp.apply(FAMILIES["convnext"].model(), keep_ratio=0.5)
    model = copy.deepcopy(eager)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for size in ((64, 96), (96, 64), (64, 128)):
        x = torch.randn(2, 3, *size, dtype=torch.float64)
        model.zero_grad()
        compiled(x).square().sum().backward()
        eager.zero_grad()
        eager(x).square().sum().backward()
        found, expected = ({n: p.grad for n, p in m.named_parameters()} for m in (model, eager))
        assert_gradients(found, expected)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # dynamo looks at the block's non-leaf input
def test_compiled_blocks_alone(no_recompilation):
    """Regional compilation: masks are inputs of each block's graph."""
    eager = torchsbp.apply(FAMILIES["vit"].model(), keep_ratio=0.5)
    model = copy.deepcopy(eager)
    with torch._dynamo.config.patch(error_on_recompile=False):
        for block in model.blocks:
            block.compile(fullgraph=True, backend="aot_eager")
        for i in range(3):
            assert_gradients(step(model, images() + i)[1], step(eager, images() + i)[1])


def spawn(worker, tmp_path: Path, *args) -> list:
    """Run ``worker(rank, *args)`` in two gloo processes; what each returned."""
    mp.start_processes(_run, (worker, str(tmp_path), *args), nprocs=2, start_method="spawn")
    return [torch.load(tmp_path / f"{rank}.pt") for rank in range(2)]


def _run(rank: int, worker, folder: str, *args) -> None:
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank)}
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    torch.save(worker(rank, *args), Path(folder) / f"{rank}.pt")
    dist.destroy_process_group()


def train_ddp(rank: int, ratio: float) -> dict:
    model = torchsbp.apply(FAMILIES["vit"].model(), keep_ratio=ratio, sampler="random")
    parallel = nn.parallel.DistributedDataParallel(model)
    x = images(4)[2 * rank : 2 * rank + 2]
    for _ in range(2):  # unused parameters would raise in the second step
        model.zero_grad()
        parallel(x).square().sum().backward()
    return {
        "gradients": {n: p.grad for n, p in model.named_parameters()},
        "kept": torchsbp.kept(model)["blocks.2"] if ratio < 1 else None,
    }


def test_ddp_equals_one_process(tmp_path):
    model = torchsbp.apply(FAMILIES["vit"].model(), keep_ratio=1.0)
    model(images(4)).square().sum().backward()
    expected = {n: p.grad / 2 for n, p in model.named_parameters()}  # DDP averages over processes
    for result in spawn(train_ddp, tmp_path, 1.0):
        assert_gradients(result["gradients"], expected)


def test_ddp_draws_a_mask_per_rank_and_agrees_on_gradients(tmp_path):
    first, second = spawn(train_ddp, tmp_path, 0.5)
    assert not torch.equal(first["kept"], second["kept"])
    assert_gradients(first["gradients"], second["gradients"])


def train_fsdp(rank: int, ratio: float) -> dict:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = torchsbp.apply(FAMILIES["vit"].model(), keep_ratio=ratio)
    mesh = init_device_mesh("cpu", (2,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    model(images(4)[2 * rank : 2 * rank + 2]).square().sum().backward()
    return {n: p.grad.full_tensor() for n, p in model.named_parameters()}


def test_fsdp2_equals_one_process(tmp_path):
    model = torchsbp.apply(FAMILIES["vit"].model(), keep_ratio=1.0)
    model(images(4)).square().sum().backward()
    expected = {n: p.grad / 2 for n, p in model.named_parameters()}
    for result in spawn(train_fsdp, tmp_path, 1.0):
        assert_gradients(result, expected)


def test_fsdp2_trains_with_sampling(tmp_path):
    first, second = spawn(train_fsdp, tmp_path, 0.5)
    assert_gradients(first, second)
    assert all(g.norm() > 0 for n, g in first.items() if "norm" in n)
