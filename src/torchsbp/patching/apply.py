"""apply and remove patch a model in place and undo it; kept, set_step and set_sizes are for a patched model."""

from collections.abc import Iterator, Sequence
from operator import index
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from ..adapters import Adapter, Layout, find_backbones
from ..adapters.names import class_of, qualified
from ..config import KeepRatio, SBPConfig, configured, resolved
from ..errors import UsageError, UsageTimeError, expect, shown
from ..ops import graphs
from ..ops.rules import RULES
from ..sampling import operators, samplers, schedules
from ..sampling.area import Images
from ..sampling.masks import Drawn, Masks, SiteSpec
from . import lean, pointwise, replay, windowed  # noqa: F401  importing them registers their strategies
from .entry import Backbone, Entry, SampledModule, bind_entry, entries, unbind_entry
from .patches import PatchEmbedding, stem
from .sampled import Sampling, strategy_for
from .site import Strategy, bind, patched_modules, unbind
from .survey import Found, name_taken, nothing_found, refuse_problems, survey

Model = TypeVar("Model", bound=nn.Module)


def apply(
    model: Model,
    keep_ratio: KeepRatio | None = None,
    *,
    config: SBPConfig | None = None,
    **options: Any,
) -> Model:
    """Turn on stochastic backpropagation: in training, sampled blocks get gradients from kept positions only.

        model = torchsbp.apply(timm.create_model("vit_base_patch16_224"), keep_ratio=0.5)

    The model is patched in place and returned. Its outputs, parameters and state dict stay the same, and so does all it
    does in eval mode or without gradients. Blocks that are not sampled have exact gradients, in less memory.

    ``keep_ratio`` and ``options`` are fields of ``SBPConfig``, which documents them; they change ``config``, or the
    default configuration if there is none. Every backbone of a known family in the model is patched. If none is found,
    or one can't be patched, a ``UsageError`` says why, and nothing is changed. Patch before ``torch.compile``, DDP or
    FSDP.
    """
    expect_model(model)
    config = configured(keep_ratio, config, options)
    patched = [name for name, _ in patched_modules(model)]
    if patched:
        raise UsageError(
            f"the model is already patched ({len(patched)} modules, first {patched[0]!r}); "
            "call torchsbp.remove(model) first to change the configuration"
        )
    backbones = list(find_backbones(model))
    if not backbones:
        raise UsageError(nothing_found(model))
    strategies = [strategies_for(*backbone, config) for backbone in backbones]  # raises before anything is changed
    for entry_module, entry, bound in strategies:
        bind_entry(entry_module, entry)
        for module, strategy in bound:
            bind(module, strategy)
    return model


def remove(model: Model) -> Model:
    """Undo ``apply`` in place and return the model: every module is of its own class again, nothing of ours is left.

    Raise ``UsageError`` if the model is not patched, or was sharded (FSDP) after ``apply``.
    """
    expect_model(model)
    modules = list(patched_modules(model))
    if not modules:
        raise UsageError("the model is not patched: there is nothing to remove")
    for name, module in modules:
        if "sbp_origin" not in type(module).__dict__:
            raise UsageError(
                f"{name} was wrapped after torchsbp.apply (it is {qualified(module)}); remove before sharding the model"
            )
    for _, module in modules:
        unbind_entry(module)
        unbind(module)
    graphs.release()
    operators.release()
    return model


def kept(model: nn.Module) -> dict[str, Tensor]:
    """Return the positions that sampled modules kept in the last training forward, by the modules' names in the model.

    Positions are indices ``[B, k]``, ascending, of class and register tokens, which come first, and the flattened grid.
    Each call of a backbone has masks of its own: these are the last call's. Backbones whose sampled blocks have not
    trained are left out; if none has, ``UsageTimeError`` is raised. With ``sampler="norm"`` there is nothing to return,
    so that ``UsageError`` is raised.
    """
    positions = {}
    for entry, module, drawn in trained_entries(model):
        for number, site in enumerate(entry.masks.sites):
            positions[entry.prefix + site.name] = entry.masks.positions_kept(drawn, number, entry.step(module).device)
    return positions


def trained_entries(model: nn.Module) -> list[tuple[Entry, nn.Module, Drawn]]:
    """Return the entries whose sampled blocks have trained, with module and masks; raise UsageTimeError if none has."""
    found = []
    for entry, module in patched_entries(model):
        entry.check(module)
        if entry.masks.drawn is not None:
            found.append((entry, module, entry.masks.drawn))
    if not any(entry.masks.sites for entry, _, _ in found):
        raise UsageTimeError("no forward has run in training mode with gradients: there are no kept positions yet")
    return found


def set_step(model: nn.Module, step: int) -> None:
    """Set the training step of a patched model: masks continue from it, and a keep-ratio schedule takes its value.

    A counter in the model counts training forwards by itself and is not in the state dict. So call this after resuming,
    and, if ``keep_ratio`` is a schedule (``Milestones``), before every step.
    """
    found = list(patched_entries(model))
    if isinstance(step, bool) or not isinstance(step, int) or not 0 <= step < 2**63:
        raise UsageError(f"step must be an integer >= 0 (below 2**63), got {shown(step)}")
    for entry, module in found:
        entry.set_step(module, step)


def set_sizes(model: nn.Module, sizes: Sequence[Sequence[int]] | Tensor, padded: Sequence[int]) -> None:
    """Say how large the images of a padded batch are: kept positions are then taken from images before padding.

    Call it before each forward on such a batch. ``sizes`` are (height, width) of every image, which lies in the upper
    left corner; ``padded`` is (height, width) of the batch. The number of kept positions is the keep-ratio's share of
    the padded size, for every image, so a smaller image keeps a larger share of its own. An image with fewer positions
    keeps all of them, and padding makes up the rest. Windows of attention keep their usual number too, positions of the
    image first. Weighted rows, the default, do not allow this: apply with ``scale="none"``.
    """
    found = list(patched_entries(model))
    given, size = whole_sizes(sizes, padded)
    for entry, module in found:
        if entry.config.scale != "none" and min(entry.least_ratios()) < 1:
            raise UsageError(
                f'scale="{entry.config.scale}" weighs all images alike, but of a smaller one a larger share is kept; '
                'apply with scale="none", or leave set_sizes out: positions are then drawn from all of the padded size'
            )
        entry.masks.images = Images(sent(given, entry.step(module).device), size)


def whole_sizes(sizes: Sequence[Sequence[int]] | Tensor, padded: Sequence[int]) -> tuple[Tensor, tuple[int, int]]:
    """Return the sizes of images, ``[B, 2]``, and of their batch; raise UsageError if they are not sizes that fit."""
    try:
        height, width = (index(size) for size in padded)
    except (TypeError, ValueError):
        height = width = 0
    if height < 1 or width < 1:
        raise UsageError(
            f"padded={shown(padded)} is not allowed; allowed: (height, width) of the batch, whole numbers above 0"
        )
    try:
        given = sizes if isinstance(sizes, Tensor) else torch.tensor(sizes)
    except (TypeError, ValueError, RuntimeError):
        given = torch.empty(0)
    wrong = given.dim() != 2 or given.shape[1] != 2 or given.dtype not in (torch.int32, torch.int64)
    if not wrong and given.is_cpu:  # values on a GPU are not checked: that would wait for them
        wrong = not all(1 <= h <= height and 1 <= w <= width for h, w in given.tolist())
    if wrong:
        raise UsageError(
            f"sizes={shown(sizes)} is not allowed; allowed: (height, width) of every image, whole numbers from 1 to "
            f"those of the batch, {(height, width)}"
        )
    return given, (height, width)


def sent(values: Tensor, device: torch.device) -> Tensor:
    """Return the values on the device. They are copied from pinned memory, so that the CPU does not wait for a GPU that
    is busy with the previous step."""
    pinned = values.pin_memory() if values.is_cpu and device.type == "cuda" else values
    return pinned.to(device, non_blocking=True)


def patched_entries(model: nn.Module) -> Iterator[tuple[Entry, nn.Module]]:
    """Return the entries of a patched model and their modules; raise UsageError if it is not patched."""
    expect_model(model)
    found = list(entries(model))
    if not found:
        raise UsageError(f"the model is not patched ({qualified(model)}): call torchsbp.apply(model) first")
    return iter(found)


def expect_model(model: object) -> None:
    expect("model", model, nn.Module, "a torch.nn.Module, such as timm.create_model(…)")


def strategies_for(
    name: str, model: nn.Module, adapter: Adapter, layout: Layout, config: SBPConfig
) -> tuple[nn.Module, Entry, list[tuple[nn.Module, Strategy]]]:
    """Return what to bind in a backbone: the entry module, its strategy, and all other modules with theirs."""
    config = resolved(config, adapter.recommended_for(model))
    found = survey(model, adapter, layout, config)
    refuse_problems(adapter, found)
    entry_module = entry_module_of(model, adapter, layout)
    sampled = [its for its in found if its.depth is not None]
    rule = RULES[config.attention]
    masks = Masks(
        config.sampler,
        config.seed,
        config.per_sample,
        config.per_block is True,
        layout.prefix_of(model),
        tuple(stage.shrinks(model) for stage in layout.stages_of(model)),
        tuple(site_spec(its, rule.heads) for its in sampled),
        config.capture,
    )
    modules = tuple(SampledModule(s.name, s.module, s.depth, s.description) for s in sampled if s.depth is not None)
    entry = Entry(config, masks, layout, modules, f"{name}." if name else "", Backbone(model))
    least = entry.least_ratios()  # raises if a list has the wrong length
    if not isinstance(config.keep_ratio, schedules.Milestones):
        masks.ratios = least
    recomputing = round(config.recompute * len(found))  # the first blocks, since what the last ones save is freed first
    numbers = {its.name: number for number, its in enumerate(sampled)}
    bound = []
    for i, its in enumerate(found):
        site = numbers.get(its.name)
        sampling = Sampling(
            masks, site, RULES["query"] if site is None else rule, config.scope, config.scale,
            recompute=i < recomputing, capture=config.capture, spare=recomputing == len(found),
        )  # fmt: skip
        its_own = [(m, strategy_for(part, its.module, sampling)) for m, part in its.description.bindings(its.module)]
        if site is not None and config.sampler in samplers.IN_BACKWARD and least[site] < 1:
            check_can_choose(its, its_own[0][1], config)
        bound += its_own
    convolutions = stem(model, layout.stages_of(model))
    bound += [(conv, PatchEmbedding(entry)) for conv in convolutions if conv is not entry_module]
    return entry_module, entry, bound


def entry_module_of(model: nn.Module, adapter: Adapter, layout: Layout) -> nn.Module:
    """Return the module where a backbone makes positions; raise UsageError if that can't be patched."""
    module = layout.entry_of(model)
    if not isinstance(module, nn.Module) or next(module.parameters(), None) is None:
        name = layout.entry if isinstance(layout.entry, str) else layout.entry(model)
        raise UsageError(
            f"{adapter.name}: the entry {name!r} of {qualified(model)} is {class_of(module)}; allowed: the name of a "
            "module with a parameter, which makes positions of images"
        )
    for problem in name_taken(f"the entry, {qualified(module)}", module):
        raise UsageError(f"{adapter.name}: {problem}")
    return module


def check_can_choose(its: Found, strategy: Strategy, config: SBPConfig) -> None:
    """Raise UsageError if a sampled module must know in forward what it keeps: this sampler chooses in backward."""
    if not getattr(strategy, "chooses", False):
        raise UsageError(
            f"{its.name} ({qualified(its.module)}) can't choose positions in backward, as sampler={config.sampler!r} "
            f"does: it is not known part by part and run again on kept positions. Use another sampler: "
            f"{list(samplers.SAMPLERS)}"
        )


def site_spec(its: Found, samples_heads: bool) -> SiteSpec:
    heads = its.description.heads_of(its.module) if samples_heads else 0
    return SiteSpec(its.name, its.stage, heads, its.description.partition_of(its.module))
