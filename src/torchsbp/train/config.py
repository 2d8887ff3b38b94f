"""The configuration of a training run, as a recipe writes it. The options of a task are in the task's own file."""

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
from .record import BESIDE
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
"""A preset, and the fields of ``SBPConfig``: a field that is None has the preset's value."""
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
    """Stochastic backpropagation: a preset, and fields of ``torchsbp.SBPConfig`` that replace the preset's values."""

    schedule: list[tuple[float, Ratio]] | None = None
    """a keep-ratio that changes in training, instead of keep_ratio: pairs [epoch, ratio from there on], the first at
    epoch 0"""

    def __post_init__(self) -> None:
        given = self.given()
        if self.preset == "none" and given:
            raise UsageError(f"sbp.preset is none (full backprop), but {given} is given; set sbp.preset to default")
        if self.schedule is not None and self.keep_ratio is not None:
            raise UsageError("give sbp.keep_ratio or sbp.schedule, not both")
        # ``SBPConfig`` checks its own fields: build it here, so that a wrong value is refused before the run begins.
        for epoch, ratio in self.schedule or ():
            try:
                SBPConfig(keep_ratio=_tuple(ratio))
            except ValueError as error:
                raise UsageError(f"sbp.schedule at epoch {epoch:g}: {error}") from error
        self.build(0, 1 << 20)

    def given(self) -> dict[str, Any]:
        """The options that replace the preset's values."""
        return {name: value for name, value in vars(self).items() if name != "preset" and value is not None}

    def build(self, seed: int, forwards_per_epoch: int) -> SBPConfig | None:
        """The ``SBPConfig``, None for full backprop. Its schedule counts training forwards, not epochs."""
        if self.preset == "none":
            return None
        changes = {"seed": seed, **self.given()}
        schedule = changes.pop("schedule", None)
        if schedule is not None:
            points = tuple((round(epoch * forwards_per_epoch), _tuple(ratio)) for epoch, ratio in schedule)
            changes["keep_ratio"] = Milestones(points)
        return SBPConfig.preset(self.preset, **changes)

    def settle(self, built: SBPConfig, found: SBPConfig) -> None:
        """Replace options that depend on the model's family (a keep-ratio that is a name) by their values in ``found``.
        A run resumed from its record then has the same gradients, whatever its version of torchsbp recommends."""
        for its in fields(found):
            value = getattr(found, its.name)
            if value != getattr(built, its.name):
                setattr(self, its.name, value)


def _tuple(ratio: Ratio) -> float | tuple[float, ...]:
    return tuple(ratio) if isinstance(ratio, list) else ratio


@dataclass
class Optimizer:
    """The optimizer, made by timm's ``create_optimizer_v2``."""

    name: str = "adamw"
    """its name in timm"""
    lr: float = field(default=4e-3, metadata=NOT_NEGATIVE)
    """learning rate, used as it is: never scaled by the batch or the number of processes"""
    weight_decay: float = field(default=0.05, metadata=NOT_NEGATIVE)
    """weight decay; biases and norms have none"""
    options: dict[str, Any] = field(default_factory=dict)
    """further arguments of the optimizer, such as betas or momentum"""
    layer_decay: float | None = field(default=None, metadata=SHARE_ABOVE_0)
    """factor of the learning rate from each layer to the one below it"""
    clip_norm: float | None = field(default=None, metadata=POSITIVE)
    """clip the norm of all gradients together to this"""


@dataclass
class Schedule:
    """The learning rate over training, by timm's ``create_scheduler_v2``, changed at every update."""

    name: Literal["cosine", "tanh", "step", "multistep", "poly"] = "cosine"
    warmup_epochs: float = field(default=20, metadata=NOT_NEGATIVE)
    """epochs in which the rate rises from warmup_lr to optimizer.lr"""
    warmup_steps: int = field(default=0, metadata=NOT_NEGATIVE)
    """updates by which the warm-up is longer than warmup_epochs"""
    warmup_lr: float = field(default=0.0, metadata=NOT_NEGATIVE)
    min_lr: float = field(default=1e-6, metadata=NOT_NEGATIVE)
    """the rate at which cosine, tanh and poly end"""
    options: dict[str, Any] = field(default_factory=dict)
    """further arguments of the schedule, such as decay_epochs or decay_rate"""


@dataclass
class EMA:
    """A moving average of the weights (timm's ``ModelEmaV3``), evaluated beside the model."""

    decay: float | None = field(default=None, metadata=SHARE_BELOW_1)
    """share of the old average that an update keeps; null: no average"""
    warmup: bool = False
    """begin with a smaller decay that rises to this one"""


@dataclass
class Checkpoints:
    """When checkpoints are written, and how many stay."""

    every_steps: int | None = field(default=None, metadata=COUNT)
    """write one every so many updates, besides those at the end of every epoch"""
    keep: int = field(default=2, metadata=COUNT)
    """how many of the newest stay; the best one stays anyway"""


@dataclass
class Log:
    """What is shown and written while training."""

    every_steps: int = field(default=50, metadata=COUNT)
    """updates from one line of metrics to the next"""
    progress: bool = True
    """show a progress bar; without a terminal, print lines instead, every_seconds apart"""
    every_seconds: float = field(default=30.0, metadata=NOT_NEGATIVE)
    tensorboard: bool = False
    """write the numbers for TensorBoard too, into the run's folder"""
    wandb: str | None = None
    """send the numbers to this project of Weights & Biases too"""


PRECISIONS: dict[str, Any] = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
"""short name -> name"""


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
    """samples per forward of one process, by default batch / processes; an update accumulates the gradients of
    batch / (processes · micro_batch) forwards"""
    optimizer: Optimizer = field(default_factory=Optimizer)
    schedule: Schedule = field(default_factory=Schedule)
    ema: EMA = field(default_factory=EMA)
    freeze: list[str] = field(default_factory=list)
    """parameters that are not trained: names of parameters or modules, with * and ?, such as [patch_embed, blocks.0]"""
    precision: Literal["float32", "bfloat16", "float16", "fp32", "bf16", "fp16"] = "bfloat16"
    """precision of autocast; parameters are float32 in any case"""
    compile: bool | Literal["reduce-overhead", "max-autotune"] = False
    """use torch.compile, or use it in this mode; "reduce-overhead" captures CUDA graphs, for a GPU that waits for the
    CPU"""
    channels_last: bool = False
    """store the model and its inputs with the channels last"""
    deterministic: bool = False
    """call torch.use_deterministic_algorithms: the same bits in every run, on a GPU too, but slower"""
    seed: int = field(default=0, metadata=SEEDS)
    """seed of initial weights, order of samples, augmentation and masks"""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: a GPU if there is one"""
    parallel: Literal["ddp", "fsdp"] = "ddp"
    """with several processes (torchrun): ddp replicates parameters, gradients and optimizer state, fsdp shards them"""
    eval_every: int = field(default=1, metadata=COUNT)
    """epochs from one evaluation to the next; the last epoch is always evaluated"""
    patience: int | None = field(default=None, metadata=COUNT)
    """stop after so many evaluations in a row without a better value of the metric that decides which checkpoint is
    best"""
    checkpoint: Checkpoints = field(default_factory=Checkpoints)
    log: Log = field(default_factory=Log)
    resume: str | None = None
    """continue from this checkpoint file, from the newest checkpoint in this run's folder, or, if it is auto, from the
    newest one in out, if there is one"""
    throughput: int | None = field(default=None, metadata=COUNT)
    """do not train, but measure the speed of the loader, of the step and of both over this many updates"""

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

    @property
    def compile_mode(self) -> str | None:
        """The mode of ``torch.compile``; None is its default."""
        return self.compile if isinstance(self.compile, str) else None

    def accumulate(self, processes: int) -> int:
        """How many forwards one process runs per update."""
        micro = self.batch // processes if self.micro_batch is None else self.micro_batch
        if micro == 0 or self.batch % (processes * micro):
            raise UsageError(
                f"batch={self.batch} is not a multiple of processes · micro_batch = {processes} · {micro}; "
                "change batch or micro_batch"
            )
        return self.batch // (processes * micro)

    def per_forward(self, processes: int) -> int:
        """How many samples one forward of one process has."""
        return self.batch // (processes * self.accumulate(processes))


def plain(value: Any) -> Any:
    """Convert to what JSON can say: paths become text, tuples lists."""
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return str(value) if isinstance(value, Path) else value


def differences(before: dict[str, Any], now: Any, name: str = "") -> list[str]:
    """List the changed options as ``name=value instead of value``, but for those in ``BESIDE``.

    ``before`` is a recorded configuration, maybe of an earlier version: a field that it lacks is compared by its
    default."""
    found = []
    for its in fields(now):
        path, value = f"{name}.{its.name}" if name else its.name, getattr(now, its.name)
        if path in BESIDE:
            continue
        if is_dataclass(value):
            found += differences(before.get(its.name, {}), value, path)
        else:
            found += changed(before.get(its.name, unnamed(its, path)), plain(value), path)
    return found


def unnamed(its: Any, path: str) -> Any:
    """The value of a field that a configuration does not mention."""
    if path == "task.name":
        return DEFAULT
    return plain(its.default if its.default_factory is MISSING else its.default_factory())


def changed(before: Any, now: Any, name: str) -> list[str]:
    if isinstance(before, dict) and isinstance(now, dict):
        keys = dict.fromkeys((*now, *before))
        return [one for key in keys for one in changed(before.get(key), now.get(key), f"{name}.{key}")]
    return [] if before == now else [f"{name}={now} instead of {before}"]
