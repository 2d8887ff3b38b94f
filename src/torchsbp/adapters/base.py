"""An adapter: one model family, described. Which stages and blocks it has, and what these are made of."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from .parts import Parts, find, qualified


@dataclass(frozen=True)
class Stage:
    """Blocks of one resolution, as dotted names in the model, and the layer that leads into them.

    ``shrink``: the grid before that layer -> the one behind it; None: read from its last convolution.
    """

    blocks: tuple[str, ...]
    downsample: str = ""
    shrink: Callable[[tuple[int, ...]], tuple[int, ...]] | None = None


def output_grid(entry: nn.Module, x: Tensor, y: Tensor) -> tuple[int, ...]:
    """The grid of an entry whose output is a feature map ``[B, C, h, w]`` or ``[B, C, t, h, w]``."""
    return tuple(y.shape[2:])


def last_blocks(depths: list[int], fraction: float | None = None) -> list[range]:
    """The last two thirds of a model with one stage, as the papers sample a ViT (8 of 12)."""
    (depth,) = depths
    return [range(depth - max(1, round(depth * (2 / 3 if fraction is None else fraction))), depth)]


@dataclass(frozen=True)
class Adapter:
    """A model family.

    - ``model``: the model class or its qualified name; subclasses match too.
    - ``blocks``: block class or its qualified name -> its parts, or several descriptions of them, of which the first
      that has no problems with a block is taken; blocks of other classes are refused.
    - ``entry``: dotted name of the module that makes positions of images; it runs once per forward, before the blocks.
    - ``grid``: (entry, its input, its output) -> the grid (h, w) or (t, h, w) of the first stage.
    - ``stages``: dotted name of the list of all blocks, which are one stage then, or model -> its stages, in order.
    - ``prefix``: number of class and register tokens in front, which are always kept, or model -> that number.
    - ``recipe``: (blocks per stage, fraction or None) -> how the papers choose: for each stage a slice of its blocks.
    - ``downsample``: parts of the layers between stages, described as blocks are; None where there are none to sample.
    """

    name: str
    model: str | type[nn.Module]
    blocks: Mapping[Any, Parts | tuple[Parts, ...]]
    entry: str = "patch_embed"
    grid: Callable[[nn.Module, Tensor, Tensor], tuple[int, ...]] = output_grid
    stages: str | Callable[[nn.Module], list[Stage]] = "blocks"
    prefix: int | Callable[[nn.Module], int] = 0
    recipe: Callable[[list[int], float | None], list[range]] = last_blocks
    downsample: Parts | tuple[Parts, ...] | None = None

    def __post_init__(self) -> None:
        named = {class_name(block): parts for block, parts in self.blocks.items()}
        object.__setattr__(self, "blocks", named)
        object.__setattr__(self, "model", class_name(self.model))

    def __reduce__(self) -> Any:
        """By name, since its functions may have none: who loads a patched model has registered the adapter."""
        from . import registered

        return registered, (self.model,)

    def stages_of(self, model: nn.Module) -> list[Stage]:
        if callable(self.stages):
            return self.stages(model)
        return [Stage(tuple(f"{self.stages}.{key}" for key in find(model, self.stages)._modules))]

    def prefix_of(self, model: nn.Module) -> int:
        return self.prefix if isinstance(self.prefix, int) else self.prefix(model)

    def parts(self, block: nn.Module) -> Parts | None:
        """The description that fits a block; None for another class."""
        return fitting(self.blocks.get(qualified(block), ()), block)


def fitting(described: Parts | tuple[Parts, ...], module: nn.Module) -> Parts | None:
    """The first description that fits the module; if none does, the last of those with the fewest problems."""
    choices = described if isinstance(described, tuple) else (described,)
    counts = [len(list(parts.problems(module))) for parts in choices]
    if 0 in counts:
        return choices[counts.index(0)]
    return choices[max(i for i, count in enumerate(counts) if count == min(counts))] if choices else None


def class_name(cls: str | type) -> str:
    return cls if isinstance(cls, str) else qualified(cls)


def early_stages(depths: list[int], fraction: float | None = None) -> list[range]:
    """As the papers sample a ConvNeXt: stages 1 and 2, the first 6 of 9 or 21 of 27 blocks of stage 3, none of stage 4;
    and a Video Swin, where that is 4 of 6.

    A third stage of another depth is sampled in the proportion of the nearer of the two. ``fraction`` counts all blocks
    from the first.
    """
    if fraction is None:
        third = depths[2] if len(depths) > 2 else 0
        wanted = [*depths[:2], round(third * (6 / 9 if third < 18 else 21 / 27))]
    else:
        left, wanted = max(1, round(sum(depths) * fraction)), []
        for depth in depths:
            wanted.append(min(depth, left))
            left -= wanted[-1]
    return [range(n) for n in (*wanted, *[0] * len(depths))[: len(depths)]]
