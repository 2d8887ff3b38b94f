"""Layouts: where a model makes positions of its images, and which stages of blocks follow."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from .names import class_name, find, qualified

Grid = tuple[int, ...]
Shrink = Callable[[Grid], Grid]


@dataclass(frozen=True)
class Stage:
    """Blocks of one resolution, as dotted names in the model, and the layer that leads into them.

    ``shrink``: the grid before that layer -> the one behind it; None: read from its convolutions and pools.
    """

    blocks: tuple[str, ...]
    downsample: str = ""
    shrink: Shrink | None = None

    def shrinks(self, model: nn.Module) -> tuple[Shrink, ...]:
        """What becomes of the grid on the way into the stage, layer after layer."""
        if self.shrink is not None:
            return (self.shrink,)
        layer = find(model, self.downsample)
        kinds = (nn.Conv2d, nn.AvgPool2d, nn.MaxPool2d)
        return () if layer is None else tuple(Stride.of(m) for m in layer.modules() if isinstance(m, kinds))


@dataclass(frozen=True)
class Stride:
    """How a convolution or a pool changes the grid: its kernel (with dilation), stride and padding."""

    kernel: Grid
    stride: Grid
    padding: Grid

    def __call__(self, grid: Grid) -> Grid:
        sizes = zip(grid, self.kernel, self.stride, self.padding, strict=True)
        return tuple((n + 2 * p - k) // s + 1 for n, k, s, p in sizes)

    @classmethod
    def of(cls, layer: Any) -> "Stride":
        kernel, stride, padding, dilation = (
            tuple(value) if isinstance(value, (tuple, list)) else (value, value)
            for value in (layer.kernel_size, layer.stride, layer.padding, getattr(layer, "dilation", 1))
        )
        if qualified(layer).endswith("Same"):  # timm's, which pad as they need: ⌈n / stride⌉
            return cls((1, 1), stride, (0, 0))
        spans = tuple((k - 1) * d + 1 for k, d in zip(kernel, dilation, strict=True))
        return cls(spans, stride, padding)


def output_grid(entry: nn.Module, x: Tensor, y: Tensor) -> Grid:
    """The grid of an entry whose output is a feature map ``[B, C, h, w]`` or ``[B, C, t, h, w]``."""
    return tuple(y.shape[2:])


def channels_last_grid(entry: nn.Module, x: Tensor, y: Tensor) -> Grid:
    """The same for ``[B, h, w, C]`` or ``[B, t, h, w, C]``."""
    return tuple(y.shape[1:-1])


def halved(grid: Grid) -> Grid:
    """The grid behind Swin's patch merging: height and width halved, odd ones padded."""
    return (*grid[:-2], *(-(-n // 2) for n in grid[-2:]))


def member_names(model: nn.Module, chain: str) -> tuple[str, ...]:
    """The dotted names of a chain's members; none where the model has no such chain."""
    return tuple(f"{chain}.{key}" for key in getattr(find(model, chain), "_modules", ()))


@dataclass(frozen=True)
class Layout:
    """Where a model class makes positions of images, and which stages follow.

    - ``model``: the class or its qualified name; subclasses match too.
    - ``entry``: dotted name of the module that makes positions; it runs once per forward, before the blocks. A model
      -> that name, where models of the class differ.
    - ``grid``: (entry, its input, its output) -> the grid (h, w) or (t, h, w) of the first stage.
    - ``stages``: dotted name of the list of all blocks, which are one stage then, or model -> its stages, in order.
    - ``prefix``: number of class and register tokens in front, which are always kept, or model -> that number.
    - ``holds_any``: the class is a wrapper that may hold any family: this layout is taken where it has the entry, and
      a block of the adapter where the stages say.
    """

    model: str | type[nn.Module]
    entry: str | Callable[[nn.Module], str] = "patch_embed"
    grid: Callable[[nn.Module, Tensor, Any], Grid] = output_grid
    stages: str | Callable[[nn.Module], list[Stage]] = "blocks"
    prefix: int | Callable[[nn.Module], int] = 0
    holds_any: bool = False
    family: str = field(default="", repr=False)
    """the name of its adapter, which that fills in"""

    def __post_init__(self) -> None:
        object.__setattr__(self, "model", class_name(self.model))

    def __reduce__(self) -> Any:
        """By name, since its functions may have none: who loads a patched model has registered the adapter."""
        from . import registered

        return registered, (self.family, self.model)

    def entry_of(self, model: nn.Module) -> nn.Module:
        return find(model, self.entry if isinstance(self.entry, str) else self.entry(model))

    def stages_of(self, model: nn.Module) -> list[Stage]:
        if callable(self.stages):
            return self.stages(model)
        return [Stage(member_names(model, self.stages))]

    def prefix_of(self, model: nn.Module) -> int:
        return self.prefix if isinstance(self.prefix, int) else self.prefix(model)

    def read_at_token(self, model: nn.Module) -> bool:
        """Whether the model's output is made of a token in front. timm's models say how they are pooled; wrappers of
        any family give maps, and of transformers' models those with a token for masked patches are read at these."""
        at_token = getattr(model, "global_pool", "token") == "token" and find(model, "embeddings.mask_token") is None
        return not self.holds_any and self.prefix_of(model) > 0 and at_token


def last_blocks(depths: list[int], fraction: float | None = None) -> list[range]:
    """The last two thirds of a model with one stage, as the papers sample a ViT (8 of 12)."""
    (depth,) = depths
    return [range(depth - max(1, round(depth * (2 / 3 if fraction is None else fraction))), depth)]


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
