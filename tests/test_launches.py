"""An eager step launches no more kernels than plain training's: by operators on a CPU, by the profiler on a GPU."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import timm
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import torchsbp
from torchsbp.memory.simulated import SimulatedDevice, SimulatedSteps
from torchsbp.ops.device import substituted

NO_KERNEL = ("empty", "new_empty", "_unsafe_view", "detach", "promote_types")


class Counter(TorchDispatchMode):
    """Counts operators that are no views and allocate not only, and our kernels."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        is_view = any(out.alias_info is not None and not out.alias_info.is_write for out in func._schema.returns)
        self.count += not is_view and not func._schema.name.removeprefix("aten::").startswith(NO_KERNEL)
        return func(*args, **(kwargs or {}))


class CountedDevice(SimulatedDevice):
    """A GPU whose kernels of ours are counted, not run."""

    def __init__(self, counter: Counter) -> None:
        class Steps(SimulatedSteps):
            launch = self.launch  # type: ignore[assignment]

        self.counter, self.kernel_steps = counter, Steps

    def launch(self, kernel: str, grid: tuple[int, ...], **arguments: Any) -> None:
        self.counter.count += 1

    def attention_kernel(self, q: Tensor, fused: bool) -> str:
        return "cpu"

    def run_pass(self, run: Any, static: Any, given: Any) -> Any:
        """As it stands, not from a graph."""
        return run(static, given)

    def weight_gradient(self, weight: Tensor, *pairs: tuple[Tensor, Tensor]) -> Tensor:
        self.counter.count += len(pairs)
        return super().weight_gradient(weight, *pairs)


def vit(depth: int, **options: Any) -> nn.Module:
    return timm.create_model("vit_tiny_patch16_224", depth=depth, num_classes=5, **options)


def convnext(depth: int, **options: Any) -> nn.Module:
    return timm.create_model("convnext_tiny", depths=(1, 1, depth, 1), num_classes=5, **options)


TINY = {"embed_dim": 24, "num_heads": 3, "img_size": 64}
MODELS: dict[str, tuple[Callable[..., nn.Module], dict[str, Any]]] = {
    "vit": (vit, TINY),
    "vit layer scale, drop path": (vit, TINY | {"init_values": 0.1, "drop_path_rate": 0.1}),
    "convnext": (convnext, {"dims": (8, 8, 12, 16)}),
}


def step(model: nn.Module, x: Tensor) -> None:
    model.zero_grad(set_to_none=True)
    with torch.autocast(x.device.type, torch.bfloat16):
        loss = model(x).float().sum()
    loss.backward()


def operators(model: nn.Module) -> int:
    with Counter() as counter, substituted(CountedDevice(counter)):
        step(model.train(), torch.randn(2, 3, 64, 64))
    return counter.count


@pytest.mark.parametrize("name", MODELS)
def test_a_block_launches_no_more_than_plain(name):
    """The difference between two depths: on a CPU the masks are no single launch."""
    build, options = MODELS[name]
    plain, ours = [], []
    for depth in (2, 3):
        model = build(depth, **options)
        plain.append(operators(model))
        ours.append(operators(torchsbp.apply(model, keep_ratio=0.5, blocks=1.0)))
    assert ours[1] - ours[0] <= plain[1] - plain[0]


@pytest.mark.parametrize("name", MODELS)
def test_masks_per_sample_launch_what_a_shared_one_does(name):
    build, options = MODELS[name]
    shared, own = (
        operators(torchsbp.apply(build(2, **options), keep_ratio=0.5, per_sample=its)) for its in (False, True)
    )
    assert own == shared


def launches(model: nn.Module, x: Tensor) -> int:
    for _ in range(3):
        step(model, x)
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[*torch.profiler.supported_activities()], acc_events=True) as profiler:
        step(model, x)
        torch.cuda.synchronize()
    found = {event.key: event.count for event in profiler.key_averages()}
    return sum(count for key, count in found.items() if "LaunchKernel" in key or "GraphLaunch" in key)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("options", [{}, {"per_sample": True}, {"per_sample": True, "sampler": "random"}], ids=str)
@pytest.mark.parametrize("name, ratio", [("vit", 0.25), ("convnext", 0.5)])
def test_a_step_launches_no_more_than_plain(name, ratio, options):
    build = MODELS[name][0]
    plain = build(12 if name == "vit" else 9).cuda().train()
    model = torchsbp.apply(copy.deepcopy(plain), keep_ratio=ratio, **options)
    x = torch.randn(8, 3, 224, 224, device="cuda")
    found, expected = launches(model, x), launches(plain, x)
    print(f"{name}, {options}: {found} launches, plain {expected}")
    assert found <= expected
