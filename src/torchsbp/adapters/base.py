"""Adapters: each describes one model family, by descriptions of its blocks and layouts of the models that hold them."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from torch import nn

from ..ops.rules import RULES
from ..sampling.recommended import UNTRIED, Recommended, read_elsewhere
from .layouts import Grid, Layout, last_blocks
from .names import class_name, class_of, find, inside, qualified

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
RECORDERS = ("transformers.utils.output_capturing",)  # their hooks are allowed: they record outputs when a caller asks
NAME = "sbp"
"""The one attribute that patching puts into a module."""

Bound = tuple[nn.Module, Any]
"""A module to patch, and what it is: a described block, or a part of one that has a task of its own (``Mixer``)."""


@dataclass(frozen=True)
class Description:
    """What a block is made of. Parts are named by their dotted names in the block.

    - ``idle``: parts that must do nothing, such as inner dropout, extra norms, gates.
    - ``classes``: part -> the classes it may have. Another class may compute something else from the same parameters.
    - ``ignored``: keyword arguments of the block's forward that do not change its result.
    - ``rules``: the attention rules that can be used for such a block.
    """

    idle: tuple[str, ...] = ()
    classes: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    ignored: tuple[str, ...] = ()
    rules: tuple[str, ...] = tuple(RULES)

    kind: ClassVar[str]
    meaning: ClassVar[str]
    """How backward runs, told to the user: ``kind`` is a short name for it, ``meaning`` explains the name."""
    called: ClassVar[tuple[str, ...]] = ()
    """Fields whose modules are called once per forward, so that hooks on them are fine. Other parts are never called
    (the ops only read their parameters), or twice (in blocks that are run again)."""
    hooks: ClassVar[str] = "would not run in training"

    def problems(self, block: nn.Module) -> Iterator[str]:
        """Yield the reasons why this description does not fit a block, one sentence each; nothing if it fits."""
        for name, allowed in self.classes.items():
            if class_of(find(block, name)) not in allowed:
                yield f"{name} is {class_of(find(block, name))}; supported: {', '.join(allowed)}"
        if "forward" in vars(block):
            yield "its forward was replaced, which hides the one for training; restore its class's"
        called = [getattr(self, name) for name in self.called]
        for name, module in block.named_modules():
            if name and not any(inside(name, part) for part in called):
                yield from self._altered(name, module)
        for name in self.idle:
            part = find(block, name)
            if not _is_idle(part):
                yield f"{name} is {part}, which is not supported (allowed: absent, Identity, Dropout with p=0)"

    def _altered(self, name: str, module: nn.Module) -> Iterator[str]:
        if "forward" in vars(module):
            yield f"{name} has a forward that is not its class's, which {self.hooks}"
        if _has_hooks(module):
            yield f"{name} has hooks, which {self.hooks}; remove them first"

    def bindings(self, block: nn.Module) -> Iterator[Bound]:
        """Yield the modules to patch, which behave differently in training: the block itself, and parts of it."""
        yield block, self

    def heads_of(self, block: nn.Module) -> int:
        """Return the number of heads that can be sampled; 0 if there are none."""
        return 0

    def partition_of(self, block: nn.Module) -> Callable[[Grid], Any] | None:
        """Return a function from a grid to its windows if equally many positions are kept in each window, else None."""
        return None


@dataclass(frozen=True)
class Plain(Description):
    """A block that is not sampled and stays as it is: its rows meet everywhere, or batch norm must see all of them.

    ``where`` restricts this to blocks in which the part of that name exists and does something; "" means all blocks of
    the class.
    """

    rules: tuple[str, ...] = ()
    where: str = ""

    kind: ClassVar[str] = "plain"
    meaning: ClassVar[str] = "stays as it is"

    def problems(self, block: nn.Module) -> Iterator[str]:
        if self.where and _is_idle(find(block, self.where)):
            yield f"{self.where} does nothing: such blocks are sampled"

    def bindings(self, block: nn.Module) -> Iterator[Bound]:
        return iter(())


def untouched(module: nn.Module) -> bool:
    """Return whether calling a module runs its class's forward and nothing else."""
    return "forward" not in vars(module) and not _has_hooks(module)


def _has_hooks(module: nn.Module) -> bool:
    hooks = (hook for kind in HOOKS for hook in (getattr(module, kind) or {}).values())
    return any(getattr(hook, "__module__", "") not in RECORDERS for hook in hooks)


def _is_idle(part: Any) -> bool:
    """Return whether a part is absent, switched off, or a module that does nothing."""
    idle_dropout = isinstance(part, nn.Dropout) and part.p == 0
    return part is None or part in (0, False) or isinstance(part, nn.Identity) or idle_dropout


def shares_inputs(module: nn.Module) -> bool:
    """Return whether a module is a convolution with kernel > stride: its outputs share inputs, so that kept outputs
    have none of their own."""
    if not isinstance(module, nn.Conv2d):
        return False
    return any(k > s for k, s in zip(module.kernel_size, module.stride, strict=True))


Descriptions = Description | tuple[Description, ...]


@dataclass(frozen=True)
class Adapter:
    """A model family: descriptions of its blocks, and layouts of the models that hold them.

    - ``blocks``: block class or its qualified name -> a description or a tuple of them. The first that has no problems
      with a block is taken; blocks of other classes are refused.
    - ``layouts``: a layout of the model class, and one of every other class that holds such blocks, such as a wrapper.
    - ``default_blocks``: (number of blocks per stage, fraction or None) -> the blocks to sample, a range per stage. The
      fraction is the option ``blocks`` if that is a number; None stands for the papers' choice.
    - ``downsample``: descriptions of the layers between stages; None if there are none to sample.
    - ``recommended``: what ``keep_ratio="default"`` and ``"fast"`` mean for the family.
    """

    name: str
    blocks: Mapping[Any, Descriptions]
    layouts: Layout | tuple[Layout, ...]
    default_blocks: Callable[[list[int], float | None], list[range]] = last_blocks
    downsample: Descriptions | None = None
    recommended: Recommended = UNTRIED

    def __post_init__(self) -> None:
        named = {class_name(block): descriptions for block, descriptions in self.blocks.items()}
        object.__setattr__(self, "blocks", named)
        layouts = (self.layouts,) if isinstance(self.layouts, Layout) else self.layouts
        object.__setattr__(self, "layouts", tuple(replace(layout, family=self.name) for layout in layouts))

    @property
    def every_layout(self) -> tuple[Layout, ...]:
        assert isinstance(self.layouts, tuple)
        return self.layouts

    def layout_for(self, model: nn.Module) -> Layout | None:
        """Return the layout for the model's class or a base class of it; None if there is none."""
        names = {qualified(cls) for cls in type(model).__mro__}
        layouts = (layout for layout in reversed(self.every_layout) if layout.model in names)
        return next((layout for layout in layouts if not layout.holds_any or self._is_in(model, layout)), None)

    def recommended_for(self, model: nn.Module) -> Recommended:
        """Return ``recommended`` for one model: a ViT that is not read at a class token counts as untried."""
        layout = self.layout_for(model)
        assert layout is not None
        return self.recommended if layout.read_at_token(model) else read_elsewhere(self.recommended)

    def _is_in(self, model: nn.Module, layout: Layout) -> bool:
        blocks = (find(model, name) for stage in layout.stages_of(model) for name in stage.blocks)
        return layout.entry_of(model) is not None and any(self.knows(block) for block in blocks)

    def knows(self, module: nn.Module) -> bool:
        """Return whether a module is a block of a described class."""
        return qualified(module) in self.blocks

    def describe(self, block: nn.Module) -> Description | None:
        """Return the description that fits a block, or comes closest; None if its class is not described."""
        return fitting(self.blocks.get(qualified(block), ()), block)

    def describe_downsample(self, layer: nn.Module) -> Description:
        """Return the description of a layer between stages. It is plain if the family describes none, if outputs share
        inputs, or if tracing left a bare ``nn.Module`` that is not called itself, only its parts."""
        traced = type(layer) is nn.Module
        if self.downsample is None or traced or any(map(shares_inputs, layer.modules())):
            return Plain()
        found = fitting(self.downsample, layer)
        assert found is not None
        return found

    def sampled(self, block: nn.Module) -> bool:
        """Return whether a block can be sampled at all."""
        return not isinstance(self.describe(block), Plain)


def several(descriptions: Descriptions) -> tuple[Description, ...]:
    return descriptions if isinstance(descriptions, tuple) else (descriptions,)


def fitting(descriptions: Descriptions, module: nn.Module) -> Description | None:
    """Return the first description that fits the module. If none fits, return the one with the fewest problems, which
    the user is told; of several the last, and never ``Plain``."""
    choices = several(descriptions)
    counts = [len(list(its.problems(module))) for its in choices]
    if 0 in counts:
        return choices[counts.index(0)]
    told = [(count, its) for count, its in zip(counts, choices, strict=True) if not isinstance(its, Plain)]
    return min(reversed(told), key=lambda pair: pair[0])[1] if told else None
