"""The configuration of a run: what a recipe file says. The task's own part is in the task's file."""

from dataclasses import MISSING, dataclass, field, fields, is_dataclass, make_dataclass
from functools import reduce
from operator import or_
from pathlib import Path
from typing import Any, Literal

from torchsbp import SBPConfig
from torchsbp.config import PRESETS, options
from torchsbp.sampling.schedules import Milestones

from ..errors import UsageError
from .ranges import COUNT, NOT_NEGATIVE, POSITIVE, SHARE_ABOVE_0, SHARE_BELOW_1, check, ranged, refuse
from .task import TaskOptions
from .tasks import DEFAULT

Ratio = float | list[float]
SEEDS = ranged(0, 2**63, open_high=True)

SBPFields: Any = make_dataclass(
    "SBPFields",
    [
        ("preset", Literal.__getitem__(("none", *PRESETS)), field(default="none")),
        *((its.name, reduce(or_, (*its.types, None)), field(default=None)) for its in options()),
    ],
)
"""A preset, and the fields of ``SBPConfig``: what is None is the preset's."""
SBPFields.__doc__ = "\n".join(
    [
        "Options.",
        "",
        "Args:",
        "    preset: none is full backprop",
        *(f"    {its.name}: {its.help}" for its in options()),
    ]
)


@dataclass
class SBP(SBPFields):
    """Stochastic backpropagation: a preset, and the fields of ``torchsbp.SBPConfig`` that differ from it."""

    schedule: list[tuple[float, Ratio]] | None = None
    """keep-ratio over training: [epoch, ratio] pairs, the first at epoch 0"""

    def __post_init__(self) -> None:
        given = self.given()
        if self.preset == "none" and given:
            raise UsageError(f"sbp.preset is none (full backprop), but {given} is given; set sbp.preset to default")
        if self.schedule is not None and self.keep_ratio is not None:
            raise UsageError("give sbp.keep_ratio or sbp.schedule, not both")
        # ``SBPConfig`` has the ranges of its fields: refused when they are read, not when they are used.
        for epoch, ratio in self.schedule or ():
            try:
                SBPConfig(keep_ratio=_tuple(ratio))
            except ValueError as error:
                raise UsageError(f"sbp.schedule at epoch {epoch:g}: {error}") from error
        self.build(0, 1 << 20)

    def given(self) -> dict[str, Any]:
        """What differs from the preset."""
        return {name: value for name, value in vars(self).items() if name != "preset" and value is not None}

    def build(self, seed: int, forwards_per_epoch: int) -> SBPConfig | None:
        """Masks and ratios are looked up by the number of the training forward."""
        if self.preset == "none":
            return None
        changes = {"seed": seed, **self.given()}
        if changes.pop("schedule", None):
            assert self.schedule is not None
            points = tuple((round(epoch * forwards_per_epoch), _tuple(ratio)) for epoch, ratio in self.schedule)
            changes["keep_ratio"] = Milestones(points)
        return SBPConfig.preset(self.preset, **changes)

    def settle(self, built: SBPConfig, found: SBPConfig) -> None:
        """Name what the model's family has made of the keep-ratio: a recorded run says enough to go on with the same
        gradients, whatever is recommended then."""
        for its in fields(found):
            value = getattr(found, its.name)
            if value != getattr(built, its.name):
                setattr(self, its.name, value)


def _tuple(ratio: Ratio) -> float | tuple[float, ...]:
    return tuple(ratio) if isinstance(ratio, list) else ratio


@dataclass
class Optimizer:
    """timm's ``create_optimizer_v2``."""

    name: str = "adamw"
    lr: float = field(default=4e-3, metadata=NOT_NEGATIVE)
    """for the whole batch, not scaled by anything"""
    weight_decay: float = field(default=0.05, metadata=NOT_NEGATIVE)
    """not for biases and norms"""
    options: dict[str, Any] = field(default_factory=dict)
    """further arguments, such as betas or momentum"""
    layer_decay: float | None = field(default=None, metadata=SHARE_ABOVE_0)
    clip_norm: float | None = field(default=None, metadata=POSITIVE)


@dataclass
class Schedule:
    """timm's ``create_scheduler_v2``, stepped at every update."""

    name: Literal["cosine", "tanh", "step", "multistep", "poly"] = "cosine"
    warmup_epochs: float = field(default=20, metadata=NOT_NEGATIVE)
    warmup_steps: int = field(default=0, metadata=NOT_NEGATIVE)
    """updates of warm-up, after those of warmup_epochs"""
    warmup_lr: float = field(default=0.0, metadata=NOT_NEGATIVE)
    min_lr: float = field(default=1e-6, metadata=NOT_NEGATIVE)
    options: dict[str, Any] = field(default_factory=dict)
    """further arguments, such as decay_epochs or decay_rate"""


@dataclass
class EMA:
    """timm's ``ModelEmaV3``; evaluated beside the model."""

    decay: float | None = field(default=None, metadata=SHARE_BELOW_1)
    """none: no average"""
    warmup: bool = False


@dataclass
class Checkpoints:
    """When they are written, and how many stay."""

    every_steps: int | None = field(default=None, metadata=COUNT)
    """besides the end of every epoch"""
    keep: int = field(default=2, metadata=COUNT)
    """how many of the last ones stay; the best stays anyway"""


@dataclass
class Log:
    """What is shown and written while training."""

    every_steps: int = field(default=50, metadata=COUNT)
    progress: bool = True
    """a bar; where there is no terminal, a line every so many seconds"""
    every_seconds: float = field(default=30.0, metadata=NOT_NEGATIVE)
    tensorboard: bool = False
    wandb: str | None = None
    """a project's name"""


PRECISIONS: dict[str, Any] = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
"""the other names"""


@dataclass
class Config:
    """A training run."""

    task: TaskOptions
    out: Path = Path("runs/run")
    """the run's folder"""
    sbp: SBP = field(default_factory=SBP)
    epochs: int = field(default=300, metadata=COUNT)
    batch: int = field(default=4096, metadata=COUNT)
    """samples per update, over all processes"""
    micro_batch: int | None = field(default=None, metadata=COUNT)
    """samples per forward of one process; batch / (processes · micro_batch) forwards are accumulated"""
    optimizer: Optimizer = field(default_factory=Optimizer)
    schedule: Schedule = field(default_factory=Schedule)
    ema: EMA = field(default_factory=EMA)
    freeze: list[str] = field(default_factory=list)
    """what is not trained: names of parameters or modules, with * and ?, such as [patch_embed, blocks.0]"""
    precision: Literal["float32", "bfloat16", "float16", "fp32", "bf16", "fp16"] = "bfloat16"
    compile: bool | Literal["reduce-overhead", "max-autotune"] = False
    """torch.compile, or its mode: "reduce-overhead" captures CUDA graphs, for steps that wait for the CPU"""
    channels_last: bool = False
    deterministic: bool = False
    """torch.use_deterministic_algorithms: the same bits on a GPU too, slower"""
    seed: int = field(default=0, metadata=SEEDS)
    device: Literal["auto", "cpu", "cuda"] = "auto"
    parallel: Literal["ddp", "fsdp"] = "ddp"
    """with several processes (torchrun): replicate or shard parameters, gradients and optimizer state"""
    eval_every: int = field(default=1, metadata=COUNT)
    """epochs; the last one is always evaluated"""
    patience: int | None = field(default=None, metadata=COUNT)
    """stop after so many evaluations without a better value of what decides which checkpoint is best"""
    checkpoint: Checkpoints = field(default_factory=Checkpoints)
    log: Log = field(default_factory=Log)
    resume: str | None = None
    """auto: from the newest checkpoint in out, if there is one; or a checkpoint file, or another run's folder"""
    throughput: int | None = field(default=None, metadata=COUNT)
    """measure the loader, the step and both over this many updates instead of training"""

    def __post_init__(self) -> None:
        check(self)
        self.precision = PRECISIONS.get(self.precision, self.precision)
        if self.out == Path():
            raise UsageError("out is empty, or the current folder; name a folder for the run, such as --out runs/first")
        lr, warmup = self.optimizer.lr, self.schedule.warmup_epochs
        if self.schedule.min_lr > lr:
            refuse("schedule.min_lr", self.schedule.min_lr, f"a number in [0, optimizer.lr={lr:g}]")
        if self.schedule.warmup_lr > lr:
            refuse("schedule.warmup_lr", self.schedule.warmup_lr, f"a number in [0, optimizer.lr={lr:g}]")
        if warmup >= self.epochs:
            refuse("schedule.warmup_epochs", warmup, f"a number in [0, epochs={self.epochs})")

    def accumulate(self, processes: int) -> int:
        """Forwards of one process per update."""
        micro = self.batch // processes if self.micro_batch is None else self.micro_batch
        if micro == 0 or self.batch % (processes * micro):
            raise UsageError(
                f"batch={self.batch} is not a multiple of processes · micro_batch = {processes} · {micro}; "
                "change batch or micro_batch"
            )
        return self.batch // (processes * micro)

    def per_forward(self, processes: int) -> int:
        """Samples of one process."""
        return self.batch // (processes * self.accumulate(processes))


def plain(value: Any) -> Any:
    """As JSON has it: paths as text, tuples as lists."""
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return str(value) if isinstance(value, Path) else value


def differences(before: dict[str, Any], now: Any, name: str = "") -> list[str]:
    """What was changed, as ``name=value``, but for where the run is and how it is watched. ``before`` is a recorded
    configuration, maybe of an earlier version: what it does not have was as a configuration that does not name it."""
    found = []
    for its in fields(now):
        path, value = f"{name}.{its.name}" if name else its.name, getattr(now, its.name)
        if path in ("out", "resume", "log", "checkpoint", "throughput"):
            continue
        if is_dataclass(value):
            found += differences(before.get(its.name, {}), value, path)
        else:
            found += changed(before.get(its.name, unnamed(its, path)), plain(value), path)
    return found


def unnamed(its: Any, path: str) -> Any:
    """What a field is of which a configuration says nothing."""
    if path == "task.name":
        return DEFAULT
    return plain(its.default if its.default_factory is MISSING else its.default_factory())


def changed(before: Any, now: Any, name: str) -> list[str]:
    if isinstance(before, dict) and isinstance(now, dict):
        keys = dict.fromkeys((*now, *before))
        return [one for key in keys for one in changed(before.get(key), now.get(key), f"{name}.{key}")]
    return [] if before == now else [f"{name}={now} instead of {before}"]
