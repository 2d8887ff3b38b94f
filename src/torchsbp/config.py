"""SBPConfig: every option a user can choose, checked when the configuration is made."""

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from types import UnionType
from typing import Any, NamedTuple, Union, get_args, get_origin, get_type_hints

from torch import Tensor, nn

from .errors import UsageError, UsageTypeError, check_calls, expect, shown
from .ops.rules import RULES
from .sampling import samplers, schedules
from .sampling.recommended import NAMES, Recommended

SCOPES = ("branch", "block")
SCALES = ("auto", "none", "weight", "rows")

KeepRatio = schedules.Ratio | schedules.Milestones | str
Blocks = None | float | Sequence[int] | Sequence[str] | Callable[[str, nn.Module], bool]


@dataclass(frozen=True)
class SBPConfig:
    """The options of stochastic backpropagation: what is sampled, how, and what is saved for backward.

    A configuration is immutable. It is checked when it is made, and "auto" is then replaced by what suits the other
    options; the value stays if ``dataclasses.replace`` changes another option later.

    - ``keep_ratio``: share of positions that get gradients, in (0, 1]. With 1 nothing is sampled: gradients are exact,
      in less memory. A number, a pair (first, last sampled block; linear between), a list with one ratio per sampled
      block, or ``schedules.Milestones`` over training. "default" and "fast" stand for what the evidence recommends for
      the model's family: ``apply`` replaces them by its numbers, and sets ``blocks`` too if you leave it at None.
    - ``sampler``: how positions are chosen: "random", "stratified" (random, but evenly spread), "grid", "checkerboard",
      "frames" or "frames_jitter" (whole frames of a video), or a callable (shape, ratios, key) -> an order of all
      positions. With "norm" every block chooses positions in backward, with probabilities that follow the norms of
      their gradients: far less noise, for the memory of exact gradients.
    - ``attention``: which gradients attention drops: "query": those of dropped queries; "qkv": those of dropped keys
      and values too; "head": those of dropped heads; "exact": none, so that only the MLP is sampled.
    - ``blocks``: which blocks are sampled. None: the papers' choice for the model's family. Else a fraction of the
      blocks (the last ones in a model with one stage, the first ones in others), a list of block indices, a list of
      block names (``*`` matches), or a filter (name, module) -> bool.
    - ``scope``: "branch" keeps the gradient of the residual path at every position and samples the branches only;
      "block" drops both at dropped positions.
    - ``per_sample``: True: every image has a mask of its own; False: the batch shares one. "balanced": each has its
      own, and over the batch every position is kept equally often. "auto": "balanced" if the sampler allows it, else
      True.
    - ``per_block``: True: every sampled block has a mask of its own, on its own grid; with scale="rows" gradients are
      then unbiased through all blocks. False: all blocks share one. "auto": True if scope="branch" and
      exact_downsampling=True.
    - ``exact_downsampling``: True: the down-sampling layers that lead into sampled blocks are exact. False: they are
      sampled too. No residual path leads around them, so that cuts off the gradient of everything below at dropped
      positions.
    - ``scale``: "none": gradients stay as computed. "weight": weight gradients of sampled blocks are multiplied by 1/r
      (for SGD). "rows": what the branches of a sampled block get as gradient at kept positions is divided by the
      probability of keeping them, which is 1 for class and register tokens: with attention "query" or "exact" the
      block's gradients are then unbiased (docs/method.md, section 4). "auto": "rows", but "none" with scope="block",
      exact_downsampling=False or attention="head".
    - ``recompute``: the dial between memory and speed. True (least memory): little more than the input of each block is
      saved, in bfloat16 if autocast computes in that, and backward recomputes the rest. False (faster): the input is
      saved unrounded, and so are the results of matrix products, of kept rows where these suffice. A number in between:
      the share of the blocks that recompute, the first ones. Blocks that are not sampled run the same way, with exact
      gradients.
    - ``capture``: True: on a GPU, masks and small passes of blocks are replayed from CUDA graphs, which is faster and
      holds some memory. False: never; use it for training steps that are captured as a whole.
    - ``seed``: masks are a pure function of (seed, step, rank).
    """

    keep_ratio: KeepRatio = "default"
    sampler: str | samplers.Sampler = "random"
    attention: str = "query"
    blocks: Blocks = None
    scope: str = "branch"
    per_sample: bool | str = "auto"
    scale: str = "auto"
    recompute: bool | float = True
    seed: int = 0
    per_block: bool | str = "auto"
    exact_downsampling: bool = True
    capture: bool = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "keep_ratio", schedules.validate(self.keep_ratio))
        if self.sampler not in samplers.IN_BACKWARD:
            samplers.resolve(self.sampler, samplers.IN_BACKWARD)
        one_of("attention", self.attention, RULES)
        one_of("scope", self.scope, SCOPES)
        one_of("exact_downsampling", self.exact_downsampling, (True, False))
        for name, value in suiting(self).items():
            if getattr(self, name) == "auto":
                object.__setattr__(self, name, value)
        one_of("scale", self.scale, SCALES)
        if self.scale != "none" and RULES[self.attention].heads:
            raise UsageError(
                f'scale="{self.scale}" is defined for sampled rows, not heads; use attention="query" or "qkv", '
                'or scale="none"'
            )
        if self.scale == "rows" and self.scope == "block":
            raise UsageError(
                'scale="rows" leaves the residual path as it is, which scope="block" gates; use scope="branch", '
                'or scale="none"'
            )
        one_of("per_sample", self.per_sample, ("auto", False, True, "balanced"))
        if self.per_sample == "balanced" and not samplers.cyclic(self.sampler):
            allowed = [name for name in samplers.SAMPLERS if samplers.cyclic(name)]
            raise UsageError(
                f'per_sample="balanced" turns one order for every sample, which sampler={shown(self.sampler)} does not '
                f"allow; use per_sample=True, or one of the samplers {allowed}"
            )
        one_of("per_block", self.per_block, ("auto", True, False))
        if self.per_block and self.scope == "block":
            raise UsageError(
                'per_block=True with scope="block" leaves only positions that every block keeps; use scope="branch", '
                "or per_block=False"
            )
        if self.sampler in samplers.IN_BACKWARD:
            check_chosen_in_backward(self)
        one_of("capture", self.capture, (True, False))
        if not isinstance(self.recompute, (bool, int, float)) or not 0 <= self.recompute <= 1:
            raise UsageError(f"recompute={self.recompute!r} is not allowed; allowed: True, False, a number in [0, 1]")
        check_blocks(self.blocks)
        if callable(self.sampler):
            check_calls("sampler", self.sampler, "shape", "ratios", "key")
        if isinstance(self.seed, bool) or not isinstance(self.seed, int):
            raise UsageTypeError(f"seed must be an int, got {self.seed!r}")

    @classmethod
    def preset(cls, name: str, **changes: Any) -> "SBPConfig":
        """Return a named configuration, with ``changes`` to any of its fields.

        - "exact": nothing is sampled; the gradients of full backpropagation in less memory.
        - "default": what the evidence recommends for the model's family.
        - "fast": what the evidence recommends for the family if steps must be shorter.
        - "paper": half of the positions, chosen as in the image paper.
        """
        one_of("preset", name, PRESETS)
        return configured(None, None, PRESETS[name] | changes)


def check_chosen_in_backward(config: SBPConfig) -> None:
    """Raise UsageError for options that positions chosen in backward do not have."""
    needed = {
        "attention": ("query", "exact"), "scope": ("branch",), "exact_downsampling": (True,), "per_sample": (True,),
        "per_block": (True,), "scale": ("rows",),
    }  # fmt: skip
    for name, allowed in needed.items():
        if getattr(config, name) not in allowed:
            values = " or ".join(map(repr, allowed))
            raise UsageError(
                f"sampler={config.sampler!r} chooses positions in backward, in every block and sample, and counts each "
                f"one over its probability; {name}={getattr(config, name)!r} does not go with that. Use "
                f"{name}={values}, or another sampler: {list(samplers.SAMPLERS)}"
            )


def suiting(config: SBPConfig) -> dict[str, Any]:
    """What "auto" means: the value that suits the other fields, for every field that may be "auto"."""
    branches = config.scope == "branch" and config.exact_downsampling
    return {
        "per_sample": "balanced" if samplers.cyclic(config.sampler) else True,
        "per_block": branches,
        "scale": "rows" if branches and not RULES[config.attention].heads else "none",
    }


def check_blocks(blocks: Any) -> None:
    """Raise UsageError if this can't choose blocks."""
    number = isinstance(blocks, (int, float)) and not isinstance(blocks, bool)
    several = isinstance(blocks, Collection) and not isinstance(blocks, (str, bytes, Mapping, Tensor))
    mask = several and any(isinstance(item, bool) for item in blocks)  # True is no index, though it equals 1
    if mask or not (blocks is None or callable(blocks) or several or (number and 0 < blocks <= 1)):
        raise UsageError(
            f"blocks={shown(blocks)} is not allowed; use None (the papers' choice for the family), a fraction in "
            '(0, 1], a list of block indices, a list of block names such as ["blocks.4"], or a filter '
            "(name, module) -> bool"
        )
    if callable(blocks):
        check_calls("blocks", blocks, "name", "module")


def one_of(name: str, value: Any, allowed: Any) -> None:
    if not any(value is a or (isinstance(value, str) and value == a) for a in allowed):
        names = ", ".join(repr(a) for a in allowed)
        raise UsageError(f"{name}={value!r} is not allowed; allowed: {names}")


PRESETS: dict[str, dict[str, Any]] = {
    "exact": {"keep_ratio": 1.0},
    "default": {},
    "fast": {"keep_ratio": "fast"},
    "paper": {
        "keep_ratio": 0.5, "sampler": "grid", "attention": "qkv", "per_sample": False, "per_block": False,
        "scale": "none", "exact_downsampling": False,
    },
}  # fmt: skip
"""The fields of every preset; ``sampling/recommended.py`` has the numbers of "default" and "fast"."""


def configured(keep_ratio: KeepRatio | None, config: SBPConfig | None, options: dict[str, Any]) -> SBPConfig:
    """Return the arguments of ``apply`` as one configuration: ``config``, or the default, with these fields changed."""
    unknown = sorted(set(options) - set(SBPConfig.__dataclass_fields__))
    if unknown:
        allowed = ", ".join(SBPConfig.__dataclass_fields__)
        raise UsageTypeError(f"unknown option {', '.join(unknown)}; allowed: {allowed}")
    if isinstance(keep_ratio, SBPConfig):
        raise UsageTypeError("keep_ratio is given an SBPConfig; pass it by name: config=…")
    refuse_preset_name(config)
    if isinstance(config, dict):
        raise UsageTypeError(f"config={shown(config)} is a dict; use config=SBPConfig(**…), or options by name")
    presets = " or ".join(f"SBPConfig.preset({name!r})" for name in PRESETS)
    expect("config", config, (SBPConfig, type(None)), f"None, an SBPConfig(…), {presets}")
    if keep_ratio is not None:
        options = options | {"keep_ratio": keep_ratio}
    return replace(config, **options) if config else SBPConfig(**options)


def refuse_preset_name(config: object) -> None:
    """Raise UsageTypeError if a preset is given by its name alone."""
    if isinstance(config, str) and config in PRESETS:
        raise UsageTypeError(f"config={config!r} is the name of a preset; use config=SBPConfig.preset({config!r})")


def resolved(config: SBPConfig, recommended: Recommended) -> SBPConfig:
    """Replace a keep-ratio that is a name by what it means for a family; fields that the user has changed stay."""
    if config.keep_ratio not in NAMES:
        return config
    options = getattr(recommended, str(config.keep_ratio))
    chosen = [its for its in options if its != "keep_ratio" and getattr(config, its) is not getattr(SBPConfig, its)]
    return replace(config, **{name: value for name, value in options.items() if name not in chosen})


def differing(config: SBPConfig) -> dict[str, Any]:
    """Return the fewest fields that make this configuration: those that neither defaults nor "auto" would set so."""
    plain = {its.name: its.default for its in fields(config)} | suiting(config)
    return {name: getattr(config, name) for name, value in plain.items() if getattr(config, name) != value}


class Option(NamedTuple):
    """A field of ``SBPConfig`` as recipes and commands take it: the types that can be written as text, and its help."""

    name: str
    types: tuple[Any, ...]
    help: str


def options() -> list[Option]:
    """Return every field of ``SBPConfig`` as an option; its help is read from the docstring of the class."""
    hints = get_type_hints(SBPConfig)
    texts = dict(re.findall(r"- ``(\w+)``: (.*?)(?=\n\s*- ``|\s*\Z)", SBPConfig.__doc__ or "", re.S))
    helps = {name: " ".join(text.replace("``", "").split()) for name, text in texts.items()}
    return [Option(its.name, tuple(writable(hints[its.name])), helps.get(its.name, "")) for its in fields(SBPConfig)]


def writable(hint: Any) -> Iterator[Any]:
    """Yield the members of a union that a recipe can express: booleans, numbers, words, and lists of these."""
    for kind in get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,):
        if kind in (bool, int, float, str):
            yield kind
        elif get_origin(kind) in (list, tuple, Sequence):
            yield list[get_args(kind)[0]]  # type: ignore[misc]
