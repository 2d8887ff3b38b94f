"""What the callbacks share: patching a model, telling it the trainer's step, reporting keep-ratio and memory."""

from typing import Any

import torch
from torch import nn

from ..adapters import find_backbones
from ..config import KeepRatio, SBPConfig, configured, resolved
from ..errors import UsageError
from ..memory.peak import peak_bytes
from ..memory.sizes import MIB
from ..patching.apply import apply, set_step
from ..patching.entry import entries
from ..patching.survey import nothing_found


class Patcher:
    """Options are those of ``torchsbp.apply``; ``module`` names the part of the model to patch ("": all of it).

    Keep-ratio and masks follow the trainer's global step: a schedule counts optimizer steps, a resumed run goes on with
    its masks. The micro-batches of one step get masks of their own.
    """

    def __init__(
        self, keep_ratio: KeepRatio | None = None, *, module: str = "", config: SBPConfig | None = None, **options: Any
    ) -> None:
        self.config = configured(keep_ratio, config, options)
        self.module = module
        self.step: int | None = None

    def patch(self, root: nn.Module) -> None:
        """Patch the model; call this before it is wrapped. A model that is patched already, or not built yet, is left
        as it is."""
        model = root.get_submodule(self.module)
        if not any(entries(model)) and any(find_backbones(model)):
            apply(model, config=self.config)

    def start(self, root: nn.Module) -> None:
        """When training begins, raise ``UsageError`` unless the model is patched with this configuration."""
        model, name = root.get_submodule(self.module), type(self).__name__
        if not any(find_backbones(model)):
            raise UsageError(nothing_found(model))
        found = [entry.config for entry, _ in entries(model)]
        if not found:
            raise UsageError(
                f"{type(model).__name__} is not patched: {name} was added to the trainer, or the model was built, too "
                f"late. Give {name} to the trainer when that is made; where a model is built later (configure_model, "
                f"model_init), call torchsbp.apply(model, config=config) there and give {name} the same config."
            )
        wanted = [resolved(self.config, adapter.recommended_for(its)) for _, its, adapter, _ in find_backbones(model)]
        if any(config not in wanted for config in found):
            raise UsageError(
                f"the model is patched with {found[0]}, but {name} has {self.config}. Give {name} the same config, or "
                "call torchsbp.remove(model) before training."
            )
        self.step = None
        device = device_of(model)
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)

    def begin(self, root: nn.Module, step: int) -> None:
        """Before a batch, tell the model that ``step`` optimizer steps have been taken."""
        if step != self.step:
            set_step(root.get_submodule(self.module), step)
            self.step = step

    def report(self, root: nn.Module) -> dict[str, float]:
        """The mean keep-ratio of the sampled modules and, on a GPU, the peak memory since training began."""
        model = root.get_submodule(self.module)
        ratios = [ratio for entry, _ in entries(model) for ratio in entry.masks.ratios or ()]
        values = {"sbp/keep_ratio": sum(ratios) / len(ratios)}
        device = device_of(model)
        if device.type == "cuda":
            values["sbp/peak_memory_mib"] = peak_bytes(device) / MIB
        return values


def device_of(model: nn.Module) -> torch.device:
    return next(model.parameters()).device
