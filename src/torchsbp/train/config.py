"""The configuration of a run: what a recipe file says. The task's own part is in the task's file."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torchsbp
from torchsbp import SBPConfig
from torchsbp.schedules import Milestones

from .classification import Classification

Ratio = float | list[float]


@dataclass
class SBP:
    """Stochastic backpropagation: a preset, and the fields of ``torchsbp.SBPConfig`` that differ from it."""

    preset: Literal["none", "default", "paper"] = "none"
    """none: full backprop"""
    keep_ratio: Ratio | None = None
    """share of positions that get gradients; a list: over depth"""
    schedule: list[tuple[float, Ratio]] | None = None
    """keep-ratio over training: [epoch, ratio] pairs, the first at epoch 0"""
    sampler: str | None = None
    attention: str | None = None
    blocks: float | list[int] | list[str] | None = None
    scope: str | None = None
    per_sample: bool | None = None
    scale: str | None = None
    recompute: bool | float | None = None

    def __post_init__(self) -> None:
        options = {k: v for k, v in vars(self).items() if k != "preset" and v is not None}
        if self.preset == "none" and options:
            raise ValueError(f"sbp.preset is none (full backprop), but {options} is given; set sbp.preset to default")
        if self.schedule is not None and self.keep_ratio is not None:
            raise ValueError("give sbp.keep_ratio or sbp.schedule, not both")

    def build(self, seed: int, forwards_per_epoch: int) -> SBPConfig | None:
        """Masks and ratios are looked up by the number of the training forward."""
        if self.preset == "none":
            return None
        changes: dict[str, Any] = {k: v for k, v in vars(self).items() if v is not None}
        changes.pop("preset")
        if changes.pop("schedule", None):
            assert self.schedule is not None
            points = tuple((round(epoch * forwards_per_epoch), _tuple(ratio)) for epoch, ratio in self.schedule)
            changes["keep_ratio"] = Milestones(points)
        return torchsbp.SBPConfig.preset(self.preset, seed=seed, **changes)


def _tuple(ratio: Ratio) -> float | tuple[float, ...]:
    return tuple(ratio) if isinstance(ratio, list) else ratio


@dataclass
class Optimizer:
    """timm's ``create_optimizer_v2``."""

    name: str = "adamw"
    lr: float = 4e-3
    """for the whole batch, not scaled by anything"""
    weight_decay: float = 0.05
    """not for biases and norms"""
    options: dict[str, Any] = field(default_factory=dict)
    """further arguments, such as betas or momentum"""
    layer_decay: float | None = None
    clip_norm: float | None = None


@dataclass
class Schedule:
    """timm's ``create_scheduler_v2``, stepped at every update."""

    name: Literal["cosine", "tanh", "step", "multistep", "poly"] = "cosine"
    warmup_epochs: int = 20
    warmup_lr: float = 0.0
    min_lr: float = 1e-6
    options: dict[str, Any] = field(default_factory=dict)
    """further arguments, such as decay_epochs or decay_rate"""


@dataclass
class EMA:
    """timm's ``ModelEmaV3``; evaluated beside the model."""

    decay: float | None = None
    """none: no average"""
    warmup: bool = False


@dataclass
class Checkpoints:
    every_steps: int | None = None
    """besides the end of every epoch"""
    keep: int = 2
    """how many of the last ones stay; the best stays anyway"""


@dataclass
class Log:
    every_steps: int = 50
    progress: bool = True
    tensorboard: bool = False
    wandb: str | None = None
    """a project's name"""


@dataclass
class Config:
    """A training run."""

    out: Path = Path("runs/run")
    """the run's folder"""
    task: Classification = field(default_factory=Classification)
    sbp: SBP = field(default_factory=SBP)
    epochs: int = 300
    batch: int = 4096
    """images per update, over all processes"""
    micro_batch: int | None = None
    """images per forward of one process; batch / (processes · micro_batch) forwards are accumulated"""
    optimizer: Optimizer = field(default_factory=Optimizer)
    schedule: Schedule = field(default_factory=Schedule)
    ema: EMA = field(default_factory=EMA)
    precision: Literal["float32", "bfloat16", "float16"] = "bfloat16"
    compile: bool = False
    channels_last: bool = False
    deterministic: bool = False
    """torch.use_deterministic_algorithms: the same bits on a GPU too, slower"""
    seed: int = 0
    device: Literal["auto", "cpu", "cuda"] = "auto"
    parallel: Literal["ddp", "fsdp"] = "ddp"
    """with several processes (torchrun): replicate or shard parameters, gradients and optimizer state"""
    eval_every: int = 1
    """epochs; the last one is always evaluated"""
    checkpoint: Checkpoints = field(default_factory=Checkpoints)
    log: Log = field(default_factory=Log)
    resume: str | None = None
    """auto: from the newest checkpoint in out, if there is one; or a checkpoint file"""
    throughput: int | None = None
    """measure the loader, the step and both over this many updates instead of training"""

    def __post_init__(self) -> None:
        positive = {
            "epochs": self.epochs,
            "batch": self.batch,
            "micro_batch": self.micro_batch,
            "eval_every": self.eval_every,
            "checkpoint.every_steps": self.checkpoint.every_steps,
            "checkpoint.keep": self.checkpoint.keep,
            "log.every_steps": self.log.every_steps,
            "throughput": self.throughput,
        }
        for name, value in positive.items():
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, found {value}")
        warmup = self.schedule.warmup_epochs
        if not 0 <= warmup < self.epochs:
            raise ValueError(f"schedule.warmup_epochs={warmup} must be at least 0 and less than epochs={self.epochs}")

    def accumulate(self, processes: int) -> int:
        """Forwards of one process per update."""
        micro = self.batch // processes if self.micro_batch is None else self.micro_batch
        if micro == 0 or self.batch % (processes * micro):
            raise ValueError(
                f"batch={self.batch} is not a multiple of processes · micro_batch = {processes} · {micro}; "
                "change batch or micro_batch"
            )
        return self.batch // (processes * micro)
