"""An adapter: one model family, described. What its blocks are made of, and in which layouts they stand."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from torch import nn

from ..ops.rules import RULES
from ..sampling.recommended import UNTRIED, Recommended, read_elsewhere
from .layouts import Grid, Layout, last_blocks
from .names import class_name, class_of, find, inside, qualified

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
RECORDERS = ("transformers.utils.output_capturing",)  # modules whose hooks record outputs where a caller asks for them
NAME = "sbp"
"""The one attribute that patching puts into a module."""

Bound = tuple[nn.Module, Any]
"""A module, and what it is: a description, or a part of a described block that does something of its own there."""


@dataclass(frozen=True)
class Description:
    """What a block is made of, as dotted names in it.

    ``idle`` names parts that must do nothing: inner dropout, extra norms, gates. ``classes`` says of which classes the
    modules that hold the parts must be: another one may compute something else from the same parts. ``ignored`` names
    keyword arguments of the block's forward that change nothing in it. ``rules`` are the attention rules that the ops
    have for such a block.
    """

    idle: tuple[str, ...] = ()
    classes: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    ignored: tuple[str, ...] = ()
    rules: tuple[str, ...] = tuple(RULES)

    kind: ClassVar[str]
    meaning: ClassVar[str]
    """How backward runs: a word for the user, and what that means."""
    called: ClassVar[tuple[str, ...]] = ()
    """Fields whose modules are still called as modules; of the others the ops only read the parameters."""
    hooks: ClassVar[str] = "would not run in training"

    def problems(self, block: nn.Module) -> Iterator[str]:
        """Why the ops can't run this block, one sentence each; nothing if they can."""
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
        if any(_acts(hook) for kind in HOOKS for hook in (getattr(module, kind) or {}).values()):
            yield f"{name} has hooks, which {self.hooks}; remove them first"

    def bindings(self, block: nn.Module) -> Iterator[Bound]:
        """The modules that behave otherwise in training: the block itself, and parts of it."""
        yield block, self

    def heads_of(self, block: nn.Module) -> int:
        """The number of heads that can be sampled; 0: none."""
        return 0

    def partition_of(self, block: nn.Module) -> Callable[[Grid], Any] | None:
        """How the block cuts a grid into windows; None if it does not."""
        return None


@dataclass(frozen=True)
class Plain(Description):
    """A block that is not sampled and stays as it is: its rows meet everywhere, or batch norm must see them all.

    ``where`` names a part that only such blocks have, or in which it does something; "": all blocks of the class.
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
    """Whether a call of it runs its class's forward and nothing else."""
    hooks = [hook for kind in HOOKS for hook in (getattr(module, kind) or {}).values()]
    return "forward" not in vars(module) and not any(map(_acts, hooks))


def _acts(hook: Any) -> bool:
    return getattr(hook, "__module__", "") not in RECORDERS


def _is_idle(part: Any) -> bool:
    """Absent, switched off, or a module that does nothing."""
    idle_dropout = isinstance(part, nn.Dropout) and part.p == 0
    return part is None or part in (0, False) or isinstance(part, nn.Identity) or idle_dropout


def shares_inputs(module: nn.Module) -> bool:
    """Whether it is a convolution with kernel > stride: kept outputs have no inputs of their own then."""
    if not isinstance(module, nn.Conv2d):
        return False
    return any(k > s for k, s in zip(module.kernel_size, module.stride, strict=True))


Descriptions = Description | tuple[Description, ...]


@dataclass(frozen=True)
class Adapter:
    """A model family: descriptions of its blocks, and the layouts in which these stand.

    - ``blocks``: block class or its qualified name -> its description, or several, of which the first that has no
      problems with a block is taken; blocks of other classes are refused.
    - ``layouts``: of the model class, and of the classes that hold its blocks otherwise.
    - ``default_blocks``: (blocks per stage, fraction or None) -> how the papers choose: for each stage a slice.
    - ``downsample``: descriptions of the layers between stages; None where there are none to sample.
    - ``recommended``: what keep-ratios that are names mean for the family; ``recommended_for``: for one of its models.
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
        """The layout of the model's class or of a class it derives from."""
        names = {qualified(cls) for cls in type(model).__mro__}
        layouts = (layout for layout in reversed(self.every_layout) if layout.model in names)
        return next((layout for layout in layouts if not layout.holds_any or self._is_in(model, layout)), None)

    def recommended_for(self, model: nn.Module) -> Recommended:
        layout = self.layout_for(model)
        assert layout is not None
        return self.recommended if layout.read_at_token(model) else read_elsewhere(self.recommended)

    def _is_in(self, model: nn.Module, layout: Layout) -> bool:
        blocks = (find(model, name) for stage in layout.stages_of(model) for name in stage.blocks)
        return layout.entry_of(model) is not None and any(self.knows(block) for block in blocks)

    def knows(self, module: nn.Module) -> bool:
        """Whether it is one of the described blocks."""
        return qualified(module) in self.blocks

    def describe(self, block: nn.Module) -> Description | None:
        """The description that fits a block; None for another class."""
        return fitting(self.blocks.get(qualified(block), ()), block)

    def describe_downsample(self, layer: nn.Module) -> Description:
        """That of a layer between stages: plain where outputs share inputs, or where a trace calls its parts alone."""
        traced = type(layer) is nn.Module
        if self.downsample is None or traced or any(map(shares_inputs, layer.modules())):
            return Plain()
        found = fitting(self.downsample, layer)
        assert found is not None
        return found

    def sampled(self, block: nn.Module) -> bool:
        """Whether the block can be sampled at all."""
        return not isinstance(self.describe(block), Plain)


def fitting(descriptions: Descriptions, module: nn.Module) -> Description | None:
    """The first description that fits the module; if none does, the last of those with the fewest problems, of which a
    user should hear why it is not sampled."""
    choices = descriptions if isinstance(descriptions, tuple) else (descriptions,)
    counts = [len(list(its.problems(module))) for its in choices]
    if 0 in counts:
        return choices[counts.index(0)]
    told = [(count, -i) for i, count in enumerate(counts) if not isinstance(choices[i], Plain)]
    return choices[-min(told)[1]] if told else None
