"""An adapter: one model family, described. Which stages and blocks it has, and what these are made of."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor, nn

from .parts import Parts, qualified


@dataclass(frozen=True)
class Stage:
    """Blocks of one resolution, as dotted names in the model, and the layer that leads into them."""

    blocks: tuple[str, ...]
    downsample: str = ""


@dataclass(frozen=True)
class Adapter:
    """A model family.

    - ``model``: qualified name of the model class; subclasses match too.
    - ``entry``: dotted name of the module that makes positions of images; it runs once per forward, before the blocks.
    - ``grid``: (entry, its input, its output) -> the grid (h, w) or (t, h, w) of the first stage.
    - ``stages``: model -> its stages, in order.
    - ``blocks``: qualified block class -> its parts, several where releases of the library differ; blocks of other
      classes are refused.
    - ``recipe``: (blocks per stage, fraction or None) -> how the papers choose: for each stage a slice of its blocks.
    - ``prefix``: model -> number of class and register tokens in front, which are always kept.
    - ``downsample``: parts of the layers between stages, None where there are none to sample.
    """

    name: str
    model: str
    entry: str
    grid: Callable[[nn.Module, Tensor, Tensor], tuple[int, ...]]
    stages: Callable[[nn.Module], list[Stage]]
    blocks: dict[str, Parts | tuple[Parts, ...]]
    recipe: Callable[[list[int], float | None], list[range]]
    prefix: Callable[[nn.Module], int]
    downsample: Parts | None = None

    def parts(self, block: nn.Module) -> Parts | None:
        """The description of a block, None if there is none: of several, the one with the fewest problems."""
        known = self.blocks.get(qualified(block), ())
        several = known if isinstance(known, tuple) else (known,)
        return min(several, key=lambda parts: len(list(parts.problems(block))), default=None)


def last_blocks(depths: list[int], fraction: float | None = None) -> list[range]:
    """The last two thirds of a model with one stage, as the papers sample a ViT (8 of 12)."""
    (depth,) = depths
    return [range(depth - max(1, round(depth * (2 / 3 if fraction is None else fraction))), depth)]


def early_stages(depths: list[int], fraction: float | None = None) -> list[range]:
    """As the papers sample a ConvNeXt: stages 1 and 2, the first 6 of 9 or 21 of 27 blocks of stage 3, none of stage 4.

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


def no_prefix(model: nn.Module) -> int:
    return 0


def output_grid(entry: nn.Module, x: Tensor, y: Tensor) -> tuple[int, ...]:
    """The grid of an entry whose output is a feature map ``[B, C, h, w]`` or ``[B, C, t, h, w]``."""
    return tuple(y.shape[2:])
