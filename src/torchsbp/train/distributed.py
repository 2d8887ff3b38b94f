"""One process or several: torchrun starts them, and its environment variables say so."""

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard

import torchsbp

from ..errors import UsageError


@dataclass(frozen=True)
class Processes:
    """This process: its device, its rank, and how many processes there are."""

    device: torch.device
    rank: int = 0
    world: int = 1

    @property
    def main(self) -> bool:
        return self.rank == 0


@contextmanager
def processes(device: str) -> Iterator[Processes]:
    """Join the others, if torchrun started this one; leave them at the end."""
    kind = device if device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
    if kind == "cuda" and not torch.cuda.is_available():
        raise UsageError("device is cuda, but torch finds no GPU; use --device cpu")
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world == 1:
        yield Processes(torch.device(kind))
        return
    here = torch.device(kind)
    if kind == "cuda":
        here = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(here)
    dist.init_process_group("cpu:gloo,cuda:nccl" if kind == "cuda" else "gloo")
    try:
        yield Processes(here, dist.get_rank(), world)
    finally:
        dist.destroy_process_group()


def together() -> bool:
    return dist.is_available() and dist.is_initialized()


def all_sum(x: Tensor) -> Tensor:
    """The sum over processes."""
    if together():
        x = x.clone()
        dist.all_reduce(x)
    return x


def any_of(flag: bool) -> bool:
    """Whether ``flag`` is true in any process. CPU tensors are exchanged, so nothing waits for a GPU."""
    return bool(all_sum(torch.tensor(int(flag)))) if together() else flag


def gather(value: Any) -> list[Any]:
    """The values of all processes, in every process."""
    if not together():
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def barrier() -> None:
    any_of(False)


def shard(model: nn.Module, device: torch.device, blocks: Iterable[str]) -> None:
    """Shard with FSDP2: each of these blocks on its own, then the rest."""
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    # Patched blocks read the parameters of their parts: shard whole blocks, nothing inside them.
    for name in blocks:
        fully_shard(model.get_submodule(name), mesh=mesh)
    fully_shard(model, mesh=mesh)


def synchronised(model: nn.Module, last: bool) -> Any:
    """The context of a forward and its backward: gradients are exchanged in the last one of an update only."""
    if isinstance(model, nn.parallel.DistributedDataParallel) and not last:
        return model.no_sync()
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(last)
    return nullcontext()


def environment(processes: Processes) -> dict[str, Any]:
    """What a run records about where it runs."""
    cuda = processes.device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name(processes.device) if cuda else "CPU",
        "processes": processes.world,
        "memory": "peak GPU memory" if cuda else "saved activations",
        "torch": torch.__version__,
        "torchsbp": torchsbp.__version__,
    }
