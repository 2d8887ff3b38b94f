"""Several processes: gradients of one process, masks of their own, DDP and FSDP2."""

import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.fsdp import FSDPModule

from torchsbp import apply, kept
from torchsbp.adapters.blocks import blocks_of
from torchsbp.cli.recipe import parse
from torchsbp.train.distributed import Processes, processes, shard
from torchsbp.train.loop import Trainer

from ..models import HYBRIDS
from .runs import final, lines, recipe, spawn, train

SHORT = ["--epochs=1", "--schedule.warmup_epochs=0"]
EXACT = {"task": {"augment": {"mixup": 0.0, "cutmix": 0.0, "erase": 0.0}, "model": {"drop_path": 0.0}}}


def gradients(trainer: Trainer) -> dict[str, torch.Tensor]:
    """Of the first update, before the optimizer clears them."""
    batches = trainer.batches()
    trainer.model.train()
    for number in range(trainer.accumulate):
        trainer.forward(number, trainer.task.prepare(next(batches), training=True))
    found = {name: p.grad for name, p in trainer.model.named_parameters()}
    return {name: g.full_tensor() if hasattr(g, "full_tensor") else g for name, g in found.items()}


def hybrid_gradients(sharded: bool) -> dict[str, torch.Tensor]:
    """Of a model whose blocks have classes called Block inside them; every process has the same input."""
    torch.manual_seed(0)
    model = HYBRIDS["maxxvit relative mlp"].build().train()
    apply(model, keep_ratio=1.0)
    x = torch.randn(2, 3, 64, 96)
    if sharded:
        names = blocks_of(model)
        shard(model, torch.device("cpu"), blocks_of(model))
        assert [name for name, module in model.named_modules() if isinstance(module, FSDPModule)] == ["", *names]
        assert len(names) >= 6
    model(x).square().sum().backward()
    found = {name: p.grad for name, p in model.named_parameters()}
    return {name: g.full_tensor() if sharded else g for name, g in found.items()}


def worker(rank: int, path: Path) -> None:
    """Gradients with DDP and FSDP2 at r = 1; gradients and kept positions with DDP at r = 0.5; a run with each."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
    torch.set_num_threads(1)
    start, store = dist.init_process_group, f"file://{path.parent}/store"
    dist.init_process_group = lambda backend: start(backend, init_method=store, rank=rank, world_size=2)
    with processes("cpu") as here:
        result = {}
        for parallel in ("ddp", "fsdp"):
            trainer = Trainer(parse("train", [str(path), "--parallel", parallel, "--sbp.keep_ratio", "1.0"]), here)
            result[parallel] = gradients(trainer)
        trainer = Trainer(parse("train", [str(path), "--sbp.sampler", "random"]), here)
        result["sampled"] = gradients(trainer)
        for parallel in ("ddp", "fsdp"):
            options = ["--parallel", parallel, f"--out={path.parent / parallel}"]
            Trainer(parse("train", [str(path), *SHORT, *options]), here).fit()
        result["hybrid"] = hybrid_gradients(sharded=True)
        result["kept"] = next(iter(kept(trainer.model).values()))
    torch.save(result, f"{path}.{rank}")


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict]]:
    """What two processes found, and their recipe."""
    path = recipe(tmp_path_factory.mktemp("two"), **EXACT, batch=12, micro_batch=3)
    mp.start_processes(worker, (path,), nprocs=2, start_method="forkserver")
    return path, [torch.load(f"{path}.{rank}") for rank in range(2)]


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_two_processes_with_half_the_batch_give_the_gradients_of_one(two, parallel):
    """At r = 1; with accumulation in both."""
    path, results = two
    alone = Trainer(parse("train", [str(path), "--sbp.keep_ratio", "1.0"]), Processes(torch.device("cpu")))
    expected = gradients(alone)
    assert alone.accumulate == 4
    for found in results:
        for name, gradient in expected.items():
            torch.testing.assert_close(found[parallel][name], gradient, rtol=1e-4, atol=1e-6, msg=name)


def test_a_hybrid_is_sharded_by_its_blocks(two):
    for name, gradient in hybrid_gradients(sharded=False).items():
        torch.testing.assert_close(two[1][0]["hybrid"][name], gradient, rtol=1e-4, atol=1e-5, msg=name)


def test_masks_differ_by_process_and_gradients_agree(two):
    first, second = two[1]
    assert first["kept"].shape == second["kept"].shape
    assert not torch.equal(first["kept"], second["kept"])
    assert all(torch.equal(first["sampled"][name], second["sampled"][name]) for name in first["sampled"])


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_two_processes_train_save_and_one_goes_on(two, parallel):
    """Unused parameters would raise in the second update. The checkpoint is that of one process."""
    path, _ = two
    out = path.parent / parallel
    assert [line["kind"] for line in lines(out)] == ["run", *["train"] * 4, "valid", "end"]
    content = final(out)
    assert len(content["random"]) == 2
    assert all(isinstance(value, torch.Tensor) for value in content["model"].values())
    assert train([str(path), *SHORT, "--epochs=2", "--resume=auto", f"--out={out}"]) == 0
    assert lines(out)[-1]["step"] == 26


@pytest.mark.slow
def test_torchrun(tmp_path):
    path = recipe(tmp_path, epochs=1, schedule={"warmup_epochs": 0})
    result = spawn(path, processes=2)
    assert result.returncode == 0, result.stderr
    assert lines(tmp_path / "run")[-1]["kind"] == "end"


def test_evaluation_counts_every_sample_once(tmp_path):
    from torchsbp.train.data.order import EvalOrder

    for world in (1, 2, 3, 8):
        orders = [EvalOrder(13, 4, rank, world) for rank in range(world)]
        assert len({len(order) for order in orders}) == 1
        seen = [key for o in orders for n, batch in enumerate(o) for key in batch[: o.valid(n)]]
        assert sorted(seen) == [(0, i) for i in range(13)]
