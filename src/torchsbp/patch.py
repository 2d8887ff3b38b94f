"""apply, remove, kept, set_step: patch a model in place and undo it."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import partial
from numbers import Integral
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from . import schedules
from .adapters import ADAPTERS, match
from .adapters.base import Adapter, Stage, class_name, fitting
from .adapters.parts import ConvBlock, Downsample, DownsampleList, Parts, TransformerBlock, find, qualified
from .adapters.residual import Patches, PointwiseBlock, Residual
from .adapters.windows import Windowed
from .config import KeepRatio, SBPConfig, configured
from .masks import Grid, Masks, Shrink
from .pointwise import PatchSite, PointwiseSite, ResponseSite
from .residual import DrawSite, Inside, MixerSite, ResidualSite, ShortcutSite, SourceSite
from .sites import (
    STEP,
    ConvSite,
    DownsampleListSite,
    DownsampleSite,
    EntryBinding,
    EntrySite,
    SampledSite,
    Site,
    TransformerSite,
    bind,
    unbind,
)
from .windowed import LastSite, WindowSite

Model = TypeVar("Model", bound=nn.Module)

SITES: dict[type[Parts], type[SampledSite]] = {
    TransformerBlock: TransformerSite,
    ConvBlock: ConvSite,
    Downsample: DownsampleSite,
    DownsampleList: DownsampleListSite,
    Residual: ResidualSite,
    PointwiseBlock: PointwiseSite,
    Patches: PatchSite,
    Windowed: WindowSite,
}
Bound = tuple[nn.Module, type[Site], Any]


@dataclass
class Place:
    """A module to patch: its name, stage and parts, its ratio's place over depth (None: not sampled), and what speaks
    against it."""

    name: str
    module: nn.Module
    stage: int
    parts: Parts
    depth: int | None
    problems: list[str]


def apply(
    model: Model,
    keep_ratio: KeepRatio | None = None,
    *,
    config: SBPConfig | None = None,
    **options: Any,
) -> Model:
    """Turn on stochastic backpropagation: in training, sampled blocks get gradients from kept positions only.

    In place; options are the fields of ``SBPConfig`` and change ``config`` (the default preset unless given). Patch
    before ``torch.compile``, DDP or FSDP. Nothing is changed if an error is raised.
    """
    config = configured(keep_ratio, config, options)
    patched = [name for name, _ in patched_modules(model)]
    if patched:
        raise ValueError(
            f"the model is already patched ({len(patched)} modules, first {patched[0]!r}); "
            "call torchsbp.remove(model) first to change the configuration"
        )
    backbones = list(find_backbones(model))
    if not backbones:
        raise ValueError(nothing_found(model))
    plans = [plan(name, module, adapter, config) for name, module, adapter in backbones]  # errors come from here
    for bindings in plans:
        for module, mixin, binding in bindings:
            bind(module, mixin, binding)
    return model


def remove(model: Model) -> Model:
    """Undo ``apply``: every module is of its own class again, nothing of ours is left."""
    modules = list(patched_modules(model))
    if not modules:
        raise ValueError("the model is not patched: there is nothing to remove")
    for name, module in modules:
        if "sbp_origin" not in type(module).__dict__:
            raise ValueError(
                f"{name} was wrapped after torchsbp.apply (it is {qualified(module)}); remove before sharding the model"
            )
    for _, module in modules:
        unbind(module)
    return model


def kept(model: nn.Module) -> dict[str, Tensor]:
    """Site name -> kept positions ``[B, k]`` of the last training forward; class and register tokens come first."""
    result = {}
    for prefix, entry in entries(model):
        masks: Masks = entry.sbp.masks
        if masks.rows is None:
            raise RuntimeError("no forward has run in training mode with gradients: there are no kept positions yet")
        for name, stage, rows in zip(masks.names, masks.stages, masks.rows, strict=True):
            n = masks.positions(stage)
            everything = torch.arange(masks.batch * n, device=entry.get_buffer(STEP).device)
            positions = (everything if rows is None else rows).view(masks.batch, -1) % n
            result[prefix + name] = positions.sort(dim=1).values  # rows of windows come window after window
    if not result:
        raise ValueError("the model is not patched: call torchsbp.apply(model) first")
    return result


def set_step(model: nn.Module, step: int) -> None:
    """Tell a patched model where training is: masks continue from this step, a keep-ratio schedule takes its value.

    The step counts training forwards by itself; call this after resuming, and before each step with a schedule.
    """
    found = list(entries(model))
    if not found:
        raise ValueError("the model is not patched: call torchsbp.apply(model) first")
    if isinstance(step, bool) or not isinstance(step, int) or step < 0:
        raise ValueError(f"step must be an integer >= 0, got {step!r}")
    for _, entry in found:
        entry.get_buffer(STEP).fill_(step)
        masks: Masks = entry.sbp.masks
        masks.ratios = ratios_of(masks.config, entry.sbp.depths, step)


def patched_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    return ((name, module) for name, module in model.named_modules() if isinstance(module, Site))


def entries(model: nn.Module) -> Iterator[tuple[str, EntrySite]]:
    """The entry of every patched backbone, with the prefix of that backbone's names."""
    for _, module in patched_modules(model):
        if isinstance(module, EntrySite):
            yield module.sbp.prefix, module


def find_backbones(model: nn.Module) -> Iterator[tuple[str, nn.Module, Adapter]]:
    for name, module in model.named_modules():
        adapter = match(module)
        if adapter is not None:
            yield name, module, adapter


def block_classes(model: nn.Module) -> list[str]:
    """The classes of what stands in lists and chains of modules, but for torch's own."""
    chains = (module for module in model.modules() if isinstance(module, (nn.Sequential, nn.ModuleList)))
    classes = {qualified(child) for chain in chains for child in chain}
    return sorted(name for name in classes if not name.startswith("torch.nn."))


def nothing_found(model: nn.Module) -> str:
    blocks = ", ".join(block_classes(model)) or "not recognisable"
    supported = "; ".join(f"{a.name} ({class_name(a.model).rpartition('.')[2]})" for a in ADAPTERS)
    return (
        f"nothing to patch in {qualified(model)}: its blocks are {blocks}. "
        f"Supported, also inside another module: {supported}. "
        "For your own position-wise layers use torchsbp.sbp(fn, x, keep, dim)."
    )


def places(model: nn.Module, adapter: Adapter, config: SBPConfig) -> list[Place]:
    """The modules to patch, in the order they run; an error that lists every reason why that is not possible."""
    found = survey(model, adapter, config)
    problems = [problem for place in found for problem in place.problems]
    if problems:
        shown = "\n  ".join(problems[:12]) + (f"\n  … and {len(problems) - 12} more" if len(problems) > 12 else "")
        raise ValueError(f"{adapter.name}: this model has parts that SBP does not support:\n  {shown}")
    return found


def survey(model: nn.Module, adapter: Adapter, config: SBPConfig) -> list[Place]:
    """The modules that ``apply`` would patch, in the order they run, each with its problems."""
    stages = adapter.stages_of(model)
    sampled = choose_blocks(model, adapter, stages, config)
    found: list[Place] = []
    names: dict[nn.Module, str] = {}
    depth = 0
    for index, stage in enumerate(stages):
        chosen = [name in sampled for name in stage.blocks]
        layers: list[tuple[str, Parts | None, bool]] = []
        if stage.downsample and adapter.downsample is not None:
            parts = fitting(adapter.downsample, find(model, stage.downsample))
            layers.append((stage.downsample, parts, bool(chosen) and chosen[0]))
        for name, is_sampled in zip(stage.blocks, chosen, strict=True):
            layers.append((name, adapter.parts(find(model, name)), is_sampled))
        for name, parts, is_sampled in layers:
            module = find(model, name)
            place = Place(name, module, index, parts or Parts(), depth if is_sampled else None, [])
            found.append(place)
            if parts is None:
                place.problems.append(f"{name} is {qualified(module)}; supported: {', '.join(adapter.blocks)}")
                continue
            if names.setdefault(module, name) != name:
                place.problems.append(f"{name} is the same module as {names[module]}")
            place.problems += [f"{name}: {problem}" for problem in parts.problems(module)]
            if is_sampled and config.attention not in parts.rules:
                allowed = ", ".join(repr(rule) for rule in parts.rules)
                place.problems.append(f"{name}: attention={config.attention!r} is not allowed here; allowed: {allowed}")
            depth += is_sampled and name in stage.blocks
    return found


def choose_blocks(model: nn.Module, adapter: Adapter, stages: list[Stage], config: SBPConfig) -> set[str]:
    """The names of the sampled blocks, from the option ``blocks``."""
    names = [name for stage in stages for name in stage.blocks]
    if not names:
        raise ValueError(f"{adapter.name}: nothing to sample, none of the blocks is one of {', '.join(adapter.blocks)}")
    wanted = config.blocks
    if wanted is None or isinstance(wanted, (int, float)):
        depths = [len(stage.blocks) for stage in stages]
        chosen = adapter.recipe(depths, wanted)
        result = {stage.blocks[i] for stage, picks in zip(stages, chosen, strict=True) for i in picks}
    elif callable(wanted):
        result = {name for name in names if wanted(name, find(model, name))}
    else:
        result = set()
        for item in wanted:
            if isinstance(item, Integral) and -len(names) <= item < len(names):
                matches = [names[int(item)]]
            else:
                matches = [name for name in names if isinstance(item, str) and fnmatch(name, item)]
            if not matches:
                raise ValueError(f"blocks: {item!r} matches none of the {len(names)} blocks, {names[0]} … {names[-1]}")
            result.update(matches)
    if not result:
        raise ValueError(f"blocks={wanted!r} selects none of the {len(names)} blocks, {names[0]} … {names[-1]}")
    return result


def plan(name: str, model: nn.Module, adapter: Adapter, config: SBPConfig) -> list[Bound]:
    """What to bind to which module of a backbone: the sampled and exact modules, and its entry."""
    found = places(model, adapter, config)
    sampled = [place for place in found if place.depth is not None]
    masks = Masks(
        config,
        adapter.prefix_of(model),
        tuple(shrinks(model, stage) for stage in adapter.stages_of(model)),
        tuple(place.name for place in sampled),
        tuple(place.stage for place in sampled),
        tuple(sampled_heads(place, config) for place in sampled),
        tuple(partial(p.parts.partition, p.module) if isinstance(p.parts, Windowed) else None for p in sampled),
    )
    depths = tuple(place.depth for place in sampled if place.depth is not None)
    if isinstance(config.keep_ratio, schedules.Milestones):
        for step, _ in config.keep_ratio.points:
            ratios_of(config, depths, step)  # every list has the right length
    else:
        masks.ratios = ratios_of(config, depths, 0)
    sites = {place.name: index for index, place in enumerate(sampled)}
    modules = [place.module for place in sampled]
    recomputing = round(config.recompute * len(found))  # the first ones: what the last ones save is freed soonest
    entry = EntryBinding(masks, adapter, modules, depths, f"{name}." if name else "")
    bound: list[Bound] = [(find(model, adapter.entry), EntrySite, entry)]
    for i, place in enumerate(found):
        bound += bindings_of(place, masks, sites.get(place.name), i < recomputing)
    return bound


def bindings_of(place: Place, masks: Masks, site: int | None, recompute: bool) -> Iterator[Bound]:
    """What to bind to a module, and to the parts of a block that is run again."""
    block, parts = place.module, place.parts
    mixin = SITES[type(parts)]
    yield block, mixin, mixin.binding(masks, site, parts, recompute)
    if isinstance(parts, PointwiseBlock):
        response = find(block, parts.response)
        if response is not None:
            yield response, ResponseSite, Inside(block, parts.response)
    if isinstance(parts, Residual):
        for mixer in parts.members(block):
            yield find(block, mixer.name), MixerSite, Inside(block, mixer)
            if mixer.whole:
                yield find(block, mixer.source), SourceSite, Inside(block, mixer)
        for name, module in parts.draws(block):
            yield module, DrawSite, Inside(block, name)
        shortcut = parts.path(block)
        if shortcut is not None:
            yield shortcut, ShortcutSite, Inside(block, parts.shortcut)
    last = find(block, parts.last) if isinstance(parts, Windowed) else None
    if last is not None and not isinstance(last, nn.Identity):
        yield last, LastSite, Inside(block, last)


def ratios_of(config: SBPConfig, depths: tuple[int, ...], step: int) -> tuple[float, ...]:
    """The ratio of every site at this step; a down-sampling layer has that of the block after it."""
    ratio = config.keep_ratio
    if isinstance(ratio, schedules.Milestones):
        ratio = ratio.at(step)
    over_depth = schedules.over_depth(ratio, max(depths) + 1)
    return tuple(over_depth[depth] for depth in depths)


def shrinks(model: nn.Module, stage: Stage) -> tuple[Callable[[Grid], Grid], ...]:
    """What the layer into a stage does to the grid; if that is not said, what its convolutions and pools do."""
    if stage.shrink is not None:
        return (stage.shrink,)
    layer = find(model, stage.downsample)
    kinds = (nn.Conv2d, nn.AvgPool2d, nn.MaxPool2d)
    return () if layer is None else tuple(shrink(m) for m in layer.modules() if isinstance(m, kinds))


def shrink(layer: Any) -> Shrink:
    kernel, stride, padding = (
        value if isinstance(value, tuple) else (value, value)
        for value in (layer.kernel_size, layer.stride, layer.padding)
    )
    if qualified(layer).endswith("Same"):  # timm's, which pad as they need: ⌈n / stride⌉
        return Shrink((1, 1), stride, (0, 0))
    return Shrink(kernel, stride, padding)


def sampled_heads(place: Place, config: SBPConfig) -> int:
    if config.attention != "head" or not isinstance(place.parts, TransformerBlock):
        return 0
    return int(find(place.module, place.parts.heads))
