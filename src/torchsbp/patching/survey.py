"""What ``apply`` finds in a model: its blocks, which of them are sampled, and why some can't be patched."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from numbers import Integral
from typing import TypeVar

from torch import nn
from torch.fx import GraphModule

from ..adapters import ADAPTERS, Adapter, Layout, Stage, find_backbones
from ..adapters.base import NAME, Description, Plain
from ..adapters.blocks import block_classes
from ..adapters.names import bare_name, find, qualified
from ..config import SBPConfig, resolved
from ..errors import UsageError
from .site import Site

Config = TypeVar("Config", SBPConfig, SBPConfig | str | None)


@dataclass
class Found:
    """A block or down-sampling layer: its name, stage and description, the place of its keep-ratio over depth (None: it
    is not sampled), and the reasons why it can't be patched."""

    name: str
    module: nn.Module
    stage: int
    description: Description
    depth: int | None
    problems: list[str]


def resolved_for(model: nn.Module, config: Config) -> Config:
    """Replace a keep-ratio that is a name by what ``apply`` makes of it for a model. A configuration that means other
    things for each of its backbones is returned as it is, and so is anything that is no ``SBPConfig``."""
    if not isinstance(config, SBPConfig):
        return config
    found = [resolved(config, adapter.recommended_for(its)) for _, its, adapter, _ in find_backbones(model)]
    return found[0] if found and all(its == found[0] for its in found) else config


def survey(model: nn.Module, adapter: Adapter, layout: Layout, config: SBPConfig) -> list[Found]:
    """Return the modules that ``apply`` would patch, in the order they run, each with its problems."""
    stages = layout.stages_of(model)
    sampled = choose_blocks(model, adapter, stages, config)
    found: list[Found] = []
    depth = 0
    for index, stage in enumerate(stages):
        down = find(model, stage.downsample)
        if down is not None:
            between = adapter.describe_downsample(down)
            follows = not config.exact_downsampling and bool(sampled.intersection(stage.blocks[:1]))
            is_sampled = follows and not isinstance(between, Plain)
            its = Found(stage.downsample, down, index, between, depth if is_sampled else None, [])
            its.problems += [*problems_of(its, found, config), *(gated_twice(its.name, config) if is_sampled else ())]
            found.append(its)
        for name in stage.blocks:
            block, is_sampled = find(model, name), name in sampled
            description = adapter.describe(block)
            its = Found(name, block, index, description or Plain(), depth if is_sampled else None, [])
            if description is None:
                its.problems.append(f"{name} is {qualified(block)}; supported: {', '.join(adapter.blocks)}")
            else:
                its.problems += problems_of(its, found, config)
            found.append(its)
            depth += is_sampled
    return [its for its in found if its.problems or not isinstance(its.description, Plain)]


def problems_of(its: Found, before: list[Found], config: SBPConfig) -> list[str]:
    """Return why a described module can't be patched, one sentence for each reason."""
    problems = [f"{its.name} is the same module as {other.name}" for other in before if other.module is its.module][:1]
    problems += [f"{its.name}: {problem}" for problem in its.description.problems(its.module)]
    for module, _ in its.description.bindings(its.module) if not problems else ():
        problems += name_taken(its.name, module)
    if its.depth is not None and config.attention not in its.description.rules:
        allowed = ", ".join(repr(rule) for rule in its.description.rules)
        problems.append(f"{its.name}: attention={config.attention!r} is not allowed here; allowed: {allowed}")
    return problems


def gated_twice(name: str, config: SBPConfig) -> Iterator[str]:
    """Yield a problem if options do not go with a sampled down-sampling layer. No residual path leads around such a
    layer: it gates all that is below, and so does the next one."""
    given = ['scale="rows"'] * (config.scale == "rows") + ["per_block=True"] * (config.per_block is True)
    if given:
        yield (
            f"{name}: {' and '.join(given)} can't be combined with sampled down-sampling layers: each of them scales "
            "or cuts the whole gradient below it again; use exact_downsampling=True"
        )


def name_taken(name: str, module: nn.Module) -> Iterator[str]:
    """Yield a problem if a module that is not patched has an attribute of the name that patching uses."""
    if hasattr(module, NAME) and not isinstance(module, Site):
        yield f"{name}: a part of it is called {NAME!r}, the name that torchsbp needs; rename it"


def choose_blocks(model: nn.Module, adapter: Adapter, stages: list[Stage], config: SBPConfig) -> set[str]:
    """Return the names of the blocks that the option ``blocks`` chooses."""
    by_stage = [[name for name in stage.blocks if adapter.sampled(find(model, name))] for stage in stages]
    names = [name for stage in by_stage for name in stage]
    if not names:
        raise UsageError(f"{adapter.name}: nothing to sample, none of the blocks is one of {', '.join(adapter.blocks)}")
    wanted = config.blocks
    if wanted is None or isinstance(wanted, (int, float)):
        chosen = adapter.default_blocks([len(stage) for stage in by_stage], wanted)
        result = {stage[i] for stage, picks in zip(by_stage, chosen, strict=True) for i in picks}
    elif callable(wanted):
        result = {name for name in names if filtered(wanted, name, find(model, name))}
    else:
        result = {match for item in wanted for match in matches(item, names)}
    if not result:
        raise UsageError(f"blocks={wanted!r} selects none of the {len(names)} blocks, {names[0]} … {names[-1]}")
    return result


def filtered(wanted: Callable[[str, nn.Module], bool], name: str, block: nn.Module) -> bool:
    try:
        return bool(wanted(name, block))
    except Exception as error:
        raise UsageError(f"blocks: the filter fails for {name}: {type(error).__name__}: {error}") from error


def matches(item: object, names: list[str]) -> list[str]:
    """Return the names of the blocks that an index or a pattern means."""
    if isinstance(item, Integral) and -len(names) <= int(item) < len(names):
        return [names[int(item)]]
    found = [name for name in names if isinstance(item, str) and fnmatch(name, item)]
    if not found:
        raise UsageError(f"blocks: {item!r} matches none of the {len(names)} blocks, {names[0]} … {names[-1]}")
    return found


def refuse_problems(adapter: Adapter, found: list[Found]) -> None:
    """Raise UsageError with the reasons why modules can't be patched, if there are any; at most twelve are listed."""
    problems = [problem for its in found for problem in its.problems]
    if problems:
        shown = "\n  ".join(problems[:12]) + (f"\n  … and {len(problems) - 12} more" if len(problems) > 12 else "")
        raise UsageError(f"{adapter.name}: this model has parts that SBP does not support:\n  {shown}")


def nothing_found(model: nn.Module) -> str:
    """Return why a model without a known backbone is refused, and the way out."""
    known = [(name, module, a) for name, module in model.named_modules() for a in ADAPTERS if a.knows(module)]
    if known:
        name, module, adapter = known[0]
        return (
            f"blocks known, wrapper not: {qualified(model)} holds {len(known)} blocks of {adapter.name} (first "
            f"{name!r}, {qualified(module)}), but how it calls them is not described. Describe the wrapper by a Layout "
            "and torchsbp.register it (docs/adapters.md), or use a wrapper of the library itself."
        )
    models = {bare_name(layout.model) for a in ADAPTERS for layout in a.every_layout}
    traced = [type(m).__name__ for m in model.modules() if isinstance(m, GraphModule) and type(m).__name__ in models]
    if traced:
        return (
            f"blocks known, wrapper not: a {traced[0]} was traced through, and of its blocks only the layers are left. "
            f"{way_around_tracing(model)} Wrap first, then call torchsbp.apply."
        )
    blocks = ", ".join(block_classes(model)) or "not recognisable"
    supported = "; ".join(f"{a.name} ({bare_name(a.every_layout[0].model)})" for a in ADAPTERS)
    return (
        f"nothing to patch in {qualified(model)}: its blocks are {blocks}. "
        f"Supported, also inside another module: {supported}. "
        "For your own position-wise layers use torchsbp.sbp(fn, x, keep, dim)."
    )


def way_around_tracing(model: nn.Module) -> str:
    if any(bare_name(module) == "FeatureGraphNet" for module in model.modules()):
        return 'Use feature_cls="getter" instead of "fx".'
    return (
        "Let create_feature_extractor call the blocks, by their class: tracer_kwargs={'leaf_modules': [CNBlock]}, or "
        "SwinTransformerBlock, EncoderBlock."
    )
