"""What training changes: a model, the average of its weights, optimizer, schedule, scaler; made, saved and restored."""

from pathlib import Path
from typing import Any

import torch
from timm.utils import ModelEmaV3
from torch import nn

from ..errors import CheckpointError, UsageError
from ..patching.survey import resolved_for
from .config import Config
from .distributed import Processes, shard
from .freeze import freeze
from .optimizer import make_optimizer
from .runs.state import load_model, load_optimizer, model_state, optimizer_state
from .runs.weights import check_fit, head_names
from .task import Task


class Learner:
    """``model`` has the parameters. ``parallel`` is what forwards call: the same module, or DDP around it."""

    def __init__(self, task: Task, config: Config, processes: Processes, batches: int, steps: int) -> None:
        """``batches`` and ``steps`` are the forwards and the updates of an epoch."""
        self.config, self.processes = config, processes
        layout = task.channels_last if config.channels_last else torch.contiguous_format
        task.to(processes.device, layout)
        self.model = task.model(start=True)
        self.still = freeze(self.model, config.freeze)
        sbp = config.sbp.build(config.seed, batches)
        self.sbp = sbp is not None
        if sbp is not None:
            task.apply_sbp(self.model, sbp)
            config.sbp.settle(sbp, resolved_for(self.model, sbp))
        self.model.to(processes.device).to(memory_format=layout)
        self.ema = None
        if config.ema.decay is not None:
            self.ema = ModelEmaV3(self.model, decay=config.ema.decay, use_warmup=config.ema.warmup)
        self.parallel = self.wrap(task)
        self.optimizer, self.schedule = make_optimizer(task.parameters(self.model, config.optimizer), config, steps)
        self.scaler = torch.amp.GradScaler(processes.device.type, enabled=config.precision == "float16")

    def train(self) -> None:
        """Put the model into training mode, except for frozen norms."""
        self.model.train()
        for norm in self.still:
            norm.eval()

    def wrap(self, task: Task) -> nn.Module:
        """Compile the model and make it parallel, as configured. Return what forwards call."""
        several, parallel = self.processes.world > 1, self.config.parallel
        if several and self.processes.device.type == "cpu":
            self.check_norms()
        if several and parallel == "fsdp":
            blocks = task.sharded(self.model)
            shard(self.model, self.processes.device, blocks)
            if self.ema is not None:
                shard(self.ema.module, self.processes.device, blocks)
        if self.config.compile:
            task.compile(self.model, self.config.compile_mode)
        return nn.parallel.DistributedDataParallel(self.model) if several and parallel == "ddp" else self.model

    def check_norms(self) -> None:
        """Raise ``UsageError`` for synchronised batch norm that is not frozen: torch does not have it on CPUs."""
        for name, module in self.model.named_modules():
            if isinstance(module, nn.SyncBatchNorm) and module not in self.still:
                raise UsageError(
                    f"{name} is batch norm that is synchronised over processes, which torch has for GPUs alone; these "
                    f"are {self.processes.world} processes on CPUs. Train in one process, or with another norm (of "
                    "detectors: task.model.norm=group)"
                )

    def best_weights(self) -> dict[str, Any]:
        """The averaged weights, if there are any, otherwise the model's."""
        return model_state(self.model if self.ema is None else self.ema.module)

    def state(self) -> dict[str, Any]:
        return {
            "model": model_state(self.model),
            "ema": None if self.ema is None else model_state(self.ema.module),
            "optimizer": optimizer_state(self.model, self.optimizer),
            "schedule": self.schedule.state_dict(),
            "scaler": self.scaler.state_dict(),
        }

    def restore(self, content: dict[str, Any], path: Path, unchanged: bool) -> None:
        """Take over a checkpoint. If settings are not ``unchanged``, schedule and options of the optimizer (weight
        decay, betas, …) stay those of the new ones."""
        check_fit(self.model.state_dict(), content["model"], head_names(self.model), str(path))
        if (content["ema"] is None) != (self.ema is None):
            raise CheckpointError(f"{path} has {'no' if self.ema else 'an'} average of weights: ema.decay was changed")
        before, now = content["config"].get("optimizer", {}).get("name"), self.config.optimizer.name
        if before is not None and before != now:
            raise CheckpointError(
                f"{path} has the state of {before}, which {now} can't use: resume with --optimizer.name {before}, or "
                f"begin another run from its weights (task.model.weights: {path}, and another --out)"
            )
        groups = self.optimizer.param_groups
        options = [{name: value for name, value in group.items() if name != "params"} for group in groups]
        try:
            load_model(self.model, content["model"])
            if self.ema is not None:
                load_model(self.ema.module, content["ema"])
            load_optimizer(self.model, self.optimizer, content["optimizer"])
        except (KeyError, RuntimeError, ValueError) as error:
            raise CheckpointError(f"{path} does not fit this optimizer or model: {error}") from error
        if unchanged:
            self.schedule.load_state_dict(content["schedule"])
        else:
            for group, own in zip(self.optimizer.param_groups, options, strict=True):
                group.update(own)
        self.scaler.load_state_dict(content["scaler"])
