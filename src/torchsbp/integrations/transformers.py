"""transformers: ``Trainer(…, callbacks=[SBPCallback(keep_ratio=0.5)])``."""

from typing import Any

from torch import nn

from .base import Patcher

try:
    from transformers import TrainerCallback, TrainerState
except ImportError as error:
    raise ImportError(
        'torchsbp.integrations.transformers needs transformers: pip install "torchsbp[transformers]"'
    ) from error


class SBPCallback(Patcher, TrainerCallback):
    """Patches the Trainer's model when the Trainer is made, follows ``state.global_step``, adds keep-ratio and peak
    memory to its training logs. If ``model_init`` makes the model, patch it there."""

    def on_init_end(self, *_: Any, model: nn.Module, **__: Any) -> None:
        self.patch(model)

    def on_train_begin(self, *_: Any, model: nn.Module, **__: Any) -> None:
        self.start(model)

    def on_step_begin(self, args: Any, state: TrainerState, *_: Any, model: nn.Module, **__: Any) -> None:
        self.begin(model, state.global_step)

    def on_log(self, args: Any, state: TrainerState, *_: Any, model: nn.Module, logs: dict, **__: Any) -> None:
        if "loss" in logs:
            values = self.report(model)
            logs.update(values)
            state.log_history[-1].update(values)
