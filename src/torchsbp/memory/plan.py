"""plan: choose the configuration that fits a memory budget: first by the evidence for the model's family, then by the
least loss of gradient quality, then by speed.

``levels`` is the order of preference. First come plain training, what the evidence recommends for the model's family,
and everything else with exact gradients:

1. "full": plain training;
2. ``keep_ratio="default"``, which is exact for most families, and then the same as 3;
3. exact lean blocks (``keep_ratio=1``), of which as few as needed recompute;
4. "checkpoint": activation checkpointing of every block;

then come sampled gradients, ordered by how little of the gradient they drop (a lower ratio before more sampled blocks,
and these before rule "qkv"):

5. SBP, rule "query", on the default blocks of the family, at ratios 0.75, 0.5, 0.25;
6. ``keep_ratio="fast"``, unless it is the same as a level before;
7. the same as 5 on all blocks, at ratios 0.5, 0.25, 0.1;
8. rule "qkv" on all blocks, at ratios 0.25, 0.1.

Within a level gradients are the same, and the share of blocks that recompute rises: 0, 0.25, 0.5, 0.75, 1. The less is
computed again, the faster. The first configuration that fits is chosen.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from ..adapters import find_backbones
from ..adapters.blocks import blocks_of
from ..adapters.lean import TransformerBlock
from ..config import SBPConfig, differing
from ..errors import UsageError, expect
from ..patching.apply import remove
from ..patching.site import patched_modules
from ..patching.survey import refuse_problems, resolved_for, survey
from .checks import check_config, checked_shape
from .estimate import Config, Estimate, Loss, Model, build, describe, estimate, fake_copy
from .sizes import mib, parse_size

SHARES: tuple[bool | float, ...] = (False, 0.25, 0.5, 0.75, True)
HEADROOM = 0.1

Level = list[Config]


class DoesNotFitError(UsageError):
    """No configuration fits the budget. ``tried`` has the configurations with their peaks."""

    def __init__(self, message: str, tried: "list[Candidate]") -> None:
        super().__init__(message)
        self.tried = tried


@dataclass(frozen=True)
class Candidate:
    """A configuration, its predicted peak in bytes, and whether it fits the budget. ``fits`` is None if that is not
    known: only a part of the model is covered, and that part fits."""

    config: Config
    peak: int
    fits: bool | None

    @classmethod
    def of(cls, config: Config, its: Estimate, usable: int) -> "Candidate":
        within = its.peak <= usable
        return cls(config, its.peak, None if within and its.covers else within)

    def __str__(self) -> str:
        word = {True: "fits", False: "too much", None: "or more: not known whether it fits"}[self.fits]
        return f"{describe(self.config):<40}{mib(self.peak):>12}  {word}"


@dataclass(frozen=True)
class Plan:
    """The chosen configuration, its estimate, the candidates that were tried, in order of preference, and the largest
    batch that fits with the chosen one. ``memory`` is the budget, ``usable`` what headroom leaves of it, in bytes.

    If ``covers`` names a part of the model, peaks are lower bounds: the configuration is the first that is not known to
    be too much, and the largest batch is None."""

    config: Config
    estimate: Estimate
    tried: list[Candidate]
    largest_batch: int | None
    memory: int
    usable: int

    @property
    def covers(self) -> str:
        """The part of the model that was estimated, "" for the whole model."""
        return self.estimate.covers

    def to_dict(self) -> dict[str, Any]:
        """Return the fields for JSON."""
        return {
            "config": describe(self.config),
            "options": options(self.config),
            "memory": self.memory,
            "usable": self.usable,
            "covers": self.covers,
            "largest_batch": self.largest_batch,
            "tried": [{"config": describe(c.config), "peak": c.peak, "fits": c.fits} for c in self.tried],
            "estimate": self.estimate.to_dict(),
        }

    def __str__(self) -> str:
        lines = [
            f"{mib(self.memory)}, of which {mib(self.usable)} may be allocated. Tried, best first:",
            *(f"  {candidate}" + ("  ← chosen" if candidate.config == self.config else "") for candidate in self.tried),
        ]
        if self.covers:
            lines.append(
                f"Only {self.covers} is covered: what follows it depends on data and needs memory too. Peaks are lower "
                "bounds, and a largest batch is not known: measure a step (torchsbp.measure)."
            )
        else:
            lines.append(f"largest batch with it: {self.largest_batch}")
        if isinstance(self.config, SBPConfig):
            given = ", ".join(f"{key}={value!r}" for key, value in options(self.config).items())
            lines.append(f"torchsbp.apply(model, {given})")
        return "\n".join(lines)


def options(config: Config) -> dict[str, Any]:
    """Return the options of ``apply`` that make this configuration."""
    return {"keep_ratio": config.keep_ratio} | differing(config) if isinstance(config, SBPConfig) else {}


def sbp(**changes: Any) -> Level:
    return [SBPConfig(recompute=share, **changes) for share in SHARES]


def levels(model: nn.Module) -> list[Level]:
    """Return a model's configurations in order of preference (the module's docstring has it), the fastest of a level
    first."""
    rules = has_rules(model)
    if rules is None:
        return [[config] for config in unpatched(model)]
    default, fast = ([resolved_for(model, config) for config in sbp(keep_ratio=name)] for name in ("default", "fast"))
    order: list[Level] = [["full"], default, sbp(keep_ratio=1.0), ["checkpoint"]]
    order += [*(sbp(keep_ratio=ratio) for ratio in (0.75, 0.5, 0.25)), fast]
    order += [sbp(keep_ratio=ratio, blocks=1.0) for ratio in (0.5, 0.25, 0.1)]
    if rules:
        order += [sbp(keep_ratio=ratio, blocks=1.0, attention="qkv") for ratio in (0.25, 0.1)]
    return [level for i, level in enumerate(order) if level not in order[:i]]


def unpatched(model: nn.Module) -> list[Config]:
    """Return the configurations of a model that can't be patched."""
    return ["full", "checkpoint"] if blocks_of(model) else ["full"]


def has_rules(model: nn.Module) -> bool | None:
    """Return whether the model has attention and all its blocks support rule "qkv"; None if it can't be patched."""
    from torch._subclasses import FakeTensorMode

    model = fake_copy(model, FakeTensorMode(allow_non_fake_inputs=True))
    if any(patched_modules(model)):
        remove(model)
    descriptions = []
    try:
        for _, module, adapter, layout in find_backbones(model):
            found = survey(module, adapter, layout, SBPConfig(keep_ratio=1.0))
            refuse_problems(adapter, found)
            descriptions += [its.description for its in found]
    except UsageError:
        return None
    if not descriptions:
        return None
    attention = any(isinstance(its, TransformerBlock) for its in descriptions)
    return attention and all("qkv" in its.rules for its in descriptions)


def plan(
    model: Model,
    input_shape: Sequence[int],
    memory: int | str,
    *,
    precision: str = "bf16",
    optimizer: str = "adamw",
    configs: Sequence[Config] | None = None,
    headroom: float = HEADROOM,
    loss: Loss | None = None,
) -> Plan:
    """Choose the best configuration whose predicted peak fits the memory of a GPU: plain training if it fits, then what
    is recommended for the model's family, other exact gradients, sampled gradients (docs/memory.md has the order).

    - ``memory``: the budget, a text such as "16GiB" or a number of bytes.
    - ``headroom``: the share of it that is left to the CUDA context, to what the allocator can't use, and to the error
      of the prediction.
    - ``configs``: configurations to choose from instead, in your own order of preference.

    The other arguments are those of ``estimate``. If nothing fits, ``DoesNotFitError`` says how much memory is needed.
    """
    total = parse_size(memory)
    usable, model = usable_of(total, headroom), build(model)
    check_configs(configs)
    order = levels(model) if configs is None else [[resolved_for(model, config)] for config in configs]
    found: dict[tuple[int, int], Estimate] = {}

    def fits(level: int, i: int) -> bool:
        if (level, i) not in found:
            found[level, i] = estimate(model, input_shape, order[level][i], precision, optimizer, loss=loss)
        return found[level, i].peak <= usable

    def tried() -> list[Candidate]:
        return [Candidate.of(order[level][i], found[level, i], usable) for level, i in sorted(found)]

    def largest(config: Config) -> int:
        return largest_batch(model, input_shape, usable, config, precision, optimizer, loss=loss)

    for level, configs_ in enumerate(order):
        if not fits(level, len(configs_) - 1):  # the leanest of its level: if that is too much, so are the others
            continue
        chosen = next(i for i in range(len(configs_)) if fits(level, i))
        config, its = configs_[chosen], found[level, chosen]
        return Plan(config, its, tried(), None if its.covers else largest(config), total, usable)

    least = min(tried(), key=lambda candidate: candidate.peak)
    needed = f"the least possible is {mib(least.peak)}, with {describe(least.config)}; "
    part = next(iter(found.values())).covers
    if part:
        needed += f"that is {part} alone: the rest of the model comes on top"
    else:
        batch = largest(least.config)
        needed += f"the largest batch with that is {batch}" if batch else "not even a batch of 1 fits"
    raise DoesNotFitError(f"does not fit in {mib(total)} ({mib(usable)} without the headroom): {needed}", tried())


def usable_of(memory: int, headroom: float) -> int:
    """Return how many bytes of ``memory`` may be allocated."""
    if isinstance(headroom, bool) or not isinstance(headroom, (int, float)) or not 0 <= headroom < 1:
        raise UsageError(f"headroom={headroom!r} is not allowed; allowed: a number in [0, 1)")
    return max(1, int(memory * (1 - headroom)))


def check_configs(configs: object) -> None:
    expect("configs", configs, (list, tuple, type(None)), "None, or a list of configurations in your order")
    if configs == [] or configs == ():
        raise UsageError("configs is empty; allowed: None, or a list of configurations in your order")
    for config in configs or ():  # type: ignore[attr-defined]
        check_config(config)


def largest_batch(
    model: Model,
    input_shape: Sequence[int],
    usable: int,
    config: Config = None,
    precision: str = "bf16",
    optimizer: str = "adamw",
    *,
    loss: Loss | None = None,
) -> int:
    """Return the largest batch whose predicted peak is at most ``usable`` bytes, 0 if there is none.

    The search starts at ``input_shape[0]``. A model of which only a part can be estimated is refused.
    """
    model = build(model)
    first, *rest = checked_shape(input_shape)

    def peak(batch: int) -> int:
        its = estimate(model, (batch, *rest), config, precision, optimizer, loss=loss)
        if its.covers:
            raise UsageError(f"only {its.covers} of the model can be estimated: its largest batch is not known")
        return its.peak

    return largest_within(peak, usable, first)


def largest_within(peak: Callable[[int], int], usable: int, start: int) -> int:
    """Return the largest n with ``peak(n) <= usable``. Peaks are nearly affine in n: a guess is where the line through
    the last two points reaches ``usable``, kept between an n that fits and one that does not. Every third guess halves
    that range."""
    low, high = 0, 1 << 24
    (n0, p0), (n1, p1) = (start, peak(start)), (2 * start, peak(2 * start))
    for n, p in ((n0, p0), (n1, p1)):
        low, high = (max(low, n), high) if p <= usable else (low, min(high, n))
    steps = 0
    while high - low > 1:
        steps += 1
        line = n1 + math.floor((usable - p1) * (n1 - n0) / (p1 - p0)) if p1 != p0 else 2 * n1
        guess = (low + high) // 2 if steps % 3 == 0 else min(max(line, low + 1), high - 1)
        (n0, p0), (n1, p1) = (n1, p1), (guess, peak(guess))
        low, high = (guess, high) if p1 <= usable else (low, guess)
    return low
