"""measure: the memory of a training step that really runs."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from ..adapters.blocks import blocks_of
from ..errors import UsageTimeError, UsageTypeError, expect, shown
from .checks import PRECISIONS, precision_name
from .estimate import Config, Model, build, default_loss, input_for, prepared, saved_lines
from .peak import peak_bytes
from .saved import Saved, SavedByPart, by_block
from .sizes import mib

FUSED: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adamw": torch.optim.AdamW,
    "adam": torch.optim.Adam,
    "momentum": partial(torch.optim.SGD, momentum=0.9),
    "sgd": torch.optim.SGD,
}


@dataclass(frozen=True)
class Measurement:
    """The memory of one step, in bytes.

    ``saved``, ``parts`` and ``saved_elsewhere`` are what the blocks and other layers save for backward, as in
    ``Estimate``. On CUDA ``before`` is what was allocated when the step began, ``peak`` the most that was allocated at
    once plus what CUDA graphs hold, and ``reserved`` the most that the allocator held. All three are None on CPU.
    """

    device: str
    saved: dict[str, int]
    parts: SavedByPart
    saved_elsewhere: int
    before: int | None = None
    peak: int | None = None
    reserved: int | None = None

    @property
    def saved_bytes(self) -> int:
        """Everything that is saved for backward."""
        return sum(self.saved.values()) + self.saved_elsewhere

    def to_dict(self) -> dict[str, Any]:
        """Return the fields for JSON."""
        return {**asdict(self), "saved_bytes": self.saved_bytes}

    def __str__(self) -> str:
        lines = [f"measured on {self.device}", f"{'saved activations':<20}{mib(self.saved_bytes):>12}"]
        for name in ("before", "peak", "reserved"):
            size = getattr(self, name)
            lines += [] if size is None else [f"{name:<20}{mib(size):>12}"]
        return "\n".join([*lines, *saved_lines(self.saved, self.saved_elsewhere)])


def measure(model: nn.Module, step: Callable[[], object]) -> Measurement:
    """Measure the memory of a training step: ``step()`` runs forward and backward, and the optimizer if you like.

    On CPU it is called once, and only what the model saves for backward is measured. On CUDA it is called four times:
    twice to warm up, so that what the first steps allocate for good is there (optimizer state, workspace, CUDA graphs),
    once to count what is saved, and once for the peak. Gradients are set to None before the last call.
    """
    expect("model", model, nn.Module, "a torch.nn.Module, whose step is measured")
    if not callable(step):
        raise UsageTypeError(f"step={shown(step)} can't be called; allowed: a function that runs forward and backward")
    device = next((p.device for p in model.parameters() if p.is_cuda), None)
    if device is not None:
        step()
        step()
    saved = Saved(model)
    with saved:
        step()
    if not saved.total:
        raise UsageTimeError(
            "step() saved nothing for backward: it must run a forward pass of the model with gradients enabled, and "
            "loss.backward()"
        )
    parts, elsewhere = by_block(saved.by_module, blocks_of(model))
    counted = {name: sum(part.values()) for name, part in parts.items()}
    if device is None:
        return Measurement("cpu", counted, parts, elsewhere)
    for parameter in model.parameters():
        parameter.grad = None
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    step()
    torch.cuda.synchronize(device)
    peak, reserved = peak_bytes(device), torch.cuda.max_memory_reserved(device)
    return Measurement(torch.cuda.get_device_name(device), counted, parts, elsewhere, before, peak, reserved)


def measure_config(
    model: Model,
    input_shape: Sequence[int],
    config: Config = None,
    precision: str = "bf16",
    optimizer: str = "adamw",
    *,
    device: str = "cuda",
) -> Measurement:
    """Measure what ``estimate`` predicts for a model on the meta device, or for a function that builds it. The model is
    made real with all weights zero, and trained on zeros for the few steps that ``measure`` takes."""
    real = build(model).to_empty(device=device).train()
    with torch.no_grad():
        for tensor in (*real.parameters(), *real.buffers()):
            tensor.zero_()
    prepared(real, config)
    updates = FUSED[optimizer](real.parameters(), lr=1e-3, fused=True)
    x, dtype = input_for(real, input_shape), PRECISIONS[precision_name(precision)]

    def step() -> None:
        updates.zero_grad(set_to_none=True)
        with torch.autocast(device, dtype) if dtype else nullcontext():
            loss = default_loss(real(x))
        loss.backward()
        updates.step()

    return measure(real, step)
