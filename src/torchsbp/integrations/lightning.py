"""Lightning: ``Trainer(callbacks=[SBPCallback(keep_ratio=0.5)])``."""

from typing import Any

from .base import Patcher

try:
    from lightning.pytorch import Callback, LightningModule, Trainer
except ImportError:
    try:
        from pytorch_lightning import Callback, LightningModule, Trainer
    except ImportError as error:
        raise ImportError(
            'torchsbp.integrations.lightning needs Lightning: pip install "torchsbp[lightning]"'
        ) from error


class SBPCallback(Patcher, Callback):
    """Patches the LightningModule before the strategy wraps it, follows ``trainer.global_step``, logs keep-ratio and
    peak memory. If you build the model in ``configure_model``, patch it there, before ``fully_shard``."""

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "fit":
            self.patch(pl_module)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.start(pl_module)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        self.begin(pl_module, trainer.global_step)

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        pl_module.log_dict(self.report(pl_module))
