"""A run's state as one dictionary of tensors and plain values, the same for one process, DDP and FSDP2."""

import random
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)


@dataclass
class Progress:
    """Where a run is. ``step`` counts updates; the order of samples and SBP's masks follow from it and the seed."""

    step: int = 0
    evaluated: int = 0
    """the step of the last evaluation"""
    best: float | None = None
    best_step: int = 0
    seconds: float = 0.0
    loss_sum: float = 0.0
    """over the steps since the last line of metrics"""
    loss_steps: int = 0
    losses: dict[str, float] = field(default_factory=dict)
    """the same sums for each of several losses, by name"""
    broken: list[str] = field(default_factory=list)
    """samples that could not be read, and why"""

    def state(self) -> dict[str, Any]:
        return dict(vars(self))

    @classmethod
    def of(cls, state: dict[str, Any]) -> "Progress":
        """Read the ``state`` of a checkpoint, which may be older and lack some fields."""
        return cls(**{its.name: state[its.name] for its in fields(cls) if its.name in state})


def model_state(model: nn.Module) -> dict[str, Any]:
    return get_model_state_dict(model, options=WHOLE)


def load_model(model: nn.Module, state: dict[str, Any]) -> None:
    set_model_state_dict(model, state, options=StateDictOptions(full_state_dict=True))


def optimizer_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return dict(get_optimizer_state_dict(model, optimizer, options=WHOLE))


def load_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    set_optimizer_state_dict(model, optimizer, state, options=StateDictOptions(full_state_dict=True))


def random_state(device: torch.device) -> dict[str, Any]:
    """The states of this process's random generators, as tensors and plain values."""
    version, internal, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = np.random.get_state()
    return {
        "python": (version, list(internal), gauss),
        "numpy": (kind, torch.from_numpy(np.asarray(keys).astype(np.int64)), position, has_gauss, cached),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state(device) if device.type == "cuda" else None,
    }


def set_random_state(state: dict[str, Any], device: torch.device) -> None:
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    kind, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), position, has_gauss, cached))
    torch.set_rng_state(state["torch"])
    if device.type == "cuda" and state["cuda"] is not None:
        torch.cuda.set_rng_state(state["cuda"], device)
