"""Builds the kernels of training steps for a GPU that is not there: ``python -m tests.ops.built 90``.

Triton's interpreter, in which they are tested without a GPU, lets pass what its compiler refuses. Told are the names of
kernels and the most shared memory that a program of them takes. To be run without TRITON_INTERPRET.
"""

import json
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import timm
import torch
import torchvision
from torch import nn
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

import torchsbp
from torchsbp.memory import simulated
from torchsbp.ops import kernel_steps
from torchsbp.ops.launch import kernel_named, kind

IMAGES, CLIPS = (2, 3, 224, 224), (1, 3, 8, 224, 224)
STEPS: list[tuple[Callable[[], nn.Module], tuple[int, ...], dict[str, Any]]] = [
    (partial(timm.create_model, "vit_small_patch16_224", depth=3), IMAGES, {"keep_ratio": 0.5}),
    (partial(timm.create_model, "vit_small_patch16_224", depth=3), IMAGES, {"keep_ratio": 0.5, "sampler": "norm"}),
    (partial(timm.create_model, "eva02_small_patch14_224", depth=3), IMAGES, {"keep_ratio": 0.5}),
    (partial(timm.create_model, "convnext_tiny", depths=(1, 1, 3, 1)), IMAGES, {"keep_ratio": 0.5, "sampler": "norm"}),
    (partial(timm.create_model, "swin_tiny_patch4_window7_224", depths=(2, 1, 2, 1)), IMAGES, {"keep_ratio": 0.5}),
    (torchvision.models.video.swin3d_t, CLIPS, {"keep_ratio": 0.5}),
]


class Offline:
    """What Triton asks a driver before it builds."""

    def __init__(self, architecture: int) -> None:
        self.target = GPUTarget("cuda", architecture, 32)

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


class Builder:
    """Stands for ``launch``: builds what is launched, once for a kind of arguments."""

    def __init__(self) -> None:
        self.shared: dict[str, int] = {}
        self.known: set[Any] = set()

    def __call__(self, kernel: str, grid: Any, **arguments: Any) -> None:
        function, tensors_of, numbers_of, constants_of, own = kernel_named(kernel, arguments)
        tensors, numbers, constants = tensors_of(arguments), numbers_of(arguments), constants_of(arguments)
        dtypes = [(tensors[0] if t is None else t).dtype for t in tensors]
        key = (kernel, constants, *dtypes, *map(kind, numbers))
        if key in self.known:
            return
        self.known.add(key)
        options = {name: value for name, value in arguments.items() if name not in function.arg_names}
        built = function.warmup(*dtypes, *numbers, *constants[:own], grid=(1,), **options)
        assert built.asm["cubin"], kernel
        self.shared[kernel] = max(self.shared.get(kernel, 0), built.metadata.shared)


def main(architecture: int) -> None:
    driver.set_active(Offline(architecture))
    build = Builder()
    kernel_steps.launch = build
    for device in (simulated.SimulatedSteps, simulated.SimulatedWindowAttention, simulated.SimulatedDevice):
        device.launch = staticmethod(build)
    for model, shape, options in STEPS:
        torchsbp.estimate(model, shape, torchsbp.SBPConfig(**options))
    kernel_steps.take_rows(torch.zeros(4, 384), torch.arange(2), torch.bfloat16)
    kernel_steps.choose_rows(build, torch.zeros(4, 384), torch.zeros(4, 1), 0)  # n = k = 1: constants to Triton
    print(json.dumps(build.shared))


if __name__ == "__main__":
    main(int(sys.argv[1]))
