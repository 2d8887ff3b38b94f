"""Find the largest batch that fits with a configuration: predicted, and then measured if there is a GPU."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from ..config import SBPConfig
from ..patching.survey import resolved_for
from .estimate import Config, describe, estimate
from .measure import measure_config
from .plan import has_rules, largest_batch, unpatched
from .sizes import mib

Measure = Callable[[int, Config], int | None]
"""(batch, config) -> the measured peak in bytes, None if it ran out of memory"""


@dataclass(frozen=True)
class Largest:
    """The largest batch with a configuration, 0 if not even one sample fits; its predicted peak (of one sample if 0),
    and the measured one."""

    config: Config
    batch: int
    predicted: int
    measured: int | None

    def __str__(self) -> str:
        measured = "" if self.measured is None else f"{mib(self.measured):>12} measured"
        return f"{describe(self.config):<40}{self.batch:>8}{mib(self.predicted):>12} predicted{measured}"


def usual(model: nn.Module) -> list[Config]:
    """Return the configurations that a user chooses from: exact gradients first, the least memory last."""
    if has_rules(model) is None:
        return unpatched(model)
    exact, half, all_blocks = SBPConfig(1.0), SBPConfig(0.5), SBPConfig(0.5, blocks=1.0)
    return ["full", exact, "checkpoint", half, all_blocks]


def largest(
    model: nn.Module,
    shape: Sequence[int],
    usable: int,
    config: Config,
    precision: str,
    optimizer: str,
    measure: Measure | None = None,
) -> Largest:
    """Return the largest batch that fits in ``usable`` bytes; the search begins at ``shape[0]``. With ``measure``, the
    predicted batch is made smaller until its measured peak fits too."""
    config = resolved_for(model, config)
    batch = largest_batch(model, shape, usable, config, precision, optimizer)
    measured = None
    while measure is not None and batch > 0:
        measured = measure(batch, config)
        if measured is not None and measured <= usable:
            break
        share = 0.9 if measured is None else usable / measured
        batch, measured = min(batch - 1, int(batch * share)), None
    its = estimate(model, (max(batch, 1), *shape[1:]), config, precision, optimizer)
    return Largest(config, batch, its.peak, measured)


def on_gpu(build: Callable[[], nn.Module], shape: Sequence[int], precision: str, optimizer: str) -> Measure:
    """Return a function that measures a few steps on the GPU of this machine."""

    def measure(batch: int, config: Config) -> int | None:
        torch.cuda.empty_cache()
        try:
            return measure_config(build, (batch, *shape[1:]), config, precision, optimizer).peak
        except torch.OutOfMemoryError:
            return None

    return measure
