"""Training steps on a GPU that is not there: ``python benchmarks/null_gpu.py python -m tests.null_steps eager``.

Prints a line of JSON for every model and configuration: the predicted and the allocated peak, and what a step launches.
In the last line are the names of our kernels that were built, with the most shared memory that a program of them takes.
"""

import json
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import timm
import torch
import torchvision
from benchmarks.null_gpu import launched
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import torchsbp
from torchsbp.memory.peak import peak_bytes
from torchsbp.ops import launch
from torchsbp.ops.kernel_steps import choose_rows

Build = Callable[[], nn.Module]
IMAGES, CLIPS = (3, 224, 224), (3, 16, 224, 224)
MODELS: dict[str, tuple[Build, tuple[int, ...]]] = {
    "vit": (partial(timm.create_model, "vit_base_patch16_224", depth=4), (256, *IMAGES)),
    "small vit": (partial(timm.create_model, "vit_small_patch16_224", depth=3), (64, *IMAGES)),
    "eva": (partial(timm.create_model, "eva02_base_patch14_224", depth=4), (128, *IMAGES)),
    "convnext": (partial(timm.create_model, "convnext_tiny", depths=(2, 2, 3, 2)), (256, *IMAGES)),
    "swin": (partial(timm.create_model, "swin_tiny_patch4_window7_224", depths=(2, 2, 3, 2)), (256, *IMAGES)),
    "video swin": (torchvision.models.video.swin3d_t, (8, *CLIPS)),
}
CONFIGS: dict[str, dict[str, Any] | None] = {
    "full": None,
    "exact": {"keep_ratio": 1.0},
    "half": {"keep_ratio": 0.5},
    "chosen": {"keep_ratio": 0.5, "sampler": "norm", "blocks": 1.0},
}
ALL = (*CONFIGS,)
RUN = {
    "eager": dict.fromkeys(MODELS, ALL) | dict.fromkeys(("eva", "video swin"), ("full", "half")),
    "compiled": {"small vit": ("half", "chosen")},
}


def step(run: Callable[[Tensor], Tensor], optimizer: torch.optim.Optimizer, images: Tensor, labels: Tensor) -> None:
    optimizer.zero_grad()
    with torch.autocast("cuda", torch.bfloat16):
        loss = cross_entropy(run(images).float(), labels)
    loss.backward()
    optimizer.step()


def measured(build: Build, shape: tuple[int, ...], options: dict[str, Any] | None, compiled: bool) -> dict[str, int]:
    config: Any = "full" if options is None else torchsbp.SBPConfig(**options)
    predicted = torchsbp.estimate(build, shape, config)
    with torch.device("cuda"):
        model = build().train()
    if options is not None:
        torchsbp.apply(model, config=config)
    run = torch.compile(model, fullgraph=True) if compiled else model
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    images, labels = torch.zeros(shape, device="cuda"), torch.zeros(shape[0], dtype=torch.long, device="cuda")
    with torch._dynamo.config.patch(error_on_recompile=compiled):
        for _ in range(3):  # the second captures, the third replays
            step(run, optimizer, images, labels)
    optimizer.zero_grad()
    torch.cuda.reset_peak_memory_stats()
    before = launched()
    step(run, optimizer, images, labels)
    kernels, graphs = (now - then for now, then in zip(launched(), before, strict=True))
    found = {"predicted": predicted.peak, "peak": peak_bytes(), "kernels": kernels, "graphs": graphs}
    if options is not None:
        torchsbp.remove(model)
    return found


def rows(mode: str) -> Iterator[dict[str, Any]]:
    for name, configs in RUN[mode].items():
        build, shape = MODELS[name]
        for config in configs:
            yield {"model": name, "config": config, **measured(build, shape, CONFIGS[config], mode == "compiled")}
            torch._dynamo.reset()  # the next model is not this one compiled again
            torch.cuda.empty_cache()


def shared_memory() -> dict[str, int]:
    found: dict[str, int] = {}
    for (kernel, *_), (_, _, (_, _, shared, *_)) in launch._COMPILED.items():
        found[kernel] = max(found.get(kernel, 0), shared)
    return found


if __name__ == "__main__":
    for row in rows(sys.argv[1]):
        print(json.dumps(row), flush=True)
    one = torch.zeros(4, 1, device="cuda")
    choose_rows(launch.launch, one, one, 0)  # n = k = 1, which are constants to Triton
    print(json.dumps(shared_memory()))
