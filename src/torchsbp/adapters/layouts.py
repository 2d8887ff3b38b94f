"""Layouts: which module of a model makes positions of its images, and which stages of blocks follow."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from .names import class_name, find, qualified

Grid = tuple[int, ...]
Shrink = Callable[[Grid], Grid]


@dataclass(frozen=True)
class Stage:
    """The blocks of one resolution, as dotted names in the model, and the layer that leads into them.

    - ``downsample``: dotted name of that layer; "" if there is none.
    - ``shrink``: the grid before the layer -> the grid after it; None if the layer's convolutions and pools tell.
    """

    blocks: tuple[str, ...]
    downsample: str = ""
    shrink: Shrink | None = None

    def shrinks(self, model: nn.Module) -> tuple[Shrink, ...]:
        """Return how the grid changes on the way into the stage: functions to be called one after the other."""
        if self.shrink is not None:
            return (self.shrink,)
        layer = find(model, self.downsample)
        kinds = (nn.Conv2d, nn.AvgPool2d, nn.MaxPool2d)
        return () if layer is None else tuple(Stride.of(m) for m in layer.modules() if isinstance(m, kinds))


@dataclass(frozen=True)
class Stride:
    """How a convolution or a pool changes the grid: its kernel (with dilation), stride and padding. With ``ceil`` a
    pool has one more window if positions would be left out, provided that the window begins inside the grid."""

    kernel: Grid
    stride: Grid
    padding: Grid
    ceil: bool = False

    def __call__(self, grid: Grid) -> Grid:
        return tuple(map(self.along, grid, self.kernel, self.stride, self.padding))

    def along(self, n: int, k: int, s: int, p: int) -> int:
        """Return the size of one dimension."""
        count = (n + 2 * p - k) // s + 1
        return count + (self.ceil and (n + 2 * p - k) % s > 0 and count * s < n + p)

    @classmethod
    def of(cls, layer: Any) -> "Stride":
        kernel, stride, padding, dilation = (
            tuple(value) if isinstance(value, (tuple, list)) else (value, value)
            for value in (layer.kernel_size, layer.stride, layer.padding, getattr(layer, "dilation", 1))
        )
        if qualified(layer).endswith("Same"):  # timm's layers that pad as needed: ⌈n / stride⌉ outputs
            return cls((1, 1), stride, (0, 0))
        spans = tuple((k - 1) * d + 1 for k, d in zip(kernel, dilation, strict=True))
        return cls(spans, stride, padding, getattr(layer, "ceil_mode", False))


def output_grid(entry: nn.Module, x: Tensor, y: Tensor) -> Grid:
    """Return the grid of an entry whose output is a feature map ``[B, C, h, w]`` or ``[B, C, t, h, w]``."""
    return tuple(y.shape[2:])


def channels_last_grid(entry: nn.Module, x: Tensor, y: Tensor) -> Grid:
    """Return the grid of an entry whose output is ``[B, h, w, C]`` or ``[B, t, h, w, C]``."""
    return tuple(y.shape[1:-1])


def halved(grid: Grid) -> Grid:
    """Return the grid after Swin's patch merging: height and width are halved, odd ones rounded up."""
    return (*grid[:-2], *(-(-n // 2) for n in grid[-2:]))


def member_names(model: nn.Module, chain: str) -> tuple[str, ...]:
    """Return the dotted names of a chain's members; empty if the model has no such chain."""
    return tuple(f"{chain}.{key}" for key in getattr(find(model, chain), "_modules", ()))


@dataclass(frozen=True)
class Layout:
    """Where a model class makes positions of images, and which stages of blocks follow.

    - ``model``: the class or its qualified name; subclasses match too.
    - ``entry``: dotted name of the module that makes positions, or a function from the model to that name. The module
      has a parameter, and its own forward runs once in a call of the model, before the blocks.
    - ``grid``: (entry, its input, its output) -> the grid of the first stage, (h, w) or (t, h, w).
    - ``stages``: dotted name of the list of all blocks, if they are one stage; or a function from the model to its
      stages, in order.
    - ``prefix``: number of class and register tokens in front, which are always kept; or a function from the model to
      that number.
    - ``holds_any``: the class is a wrapper that may hold any family. The layout then counts only for models that have
      its entry, and a block of the adapter in its stages.
    """

    model: str | type[nn.Module]
    entry: str | Callable[[nn.Module], str] = "patch_embed"
    grid: Callable[[nn.Module, Tensor, Any], Grid] = output_grid
    stages: str | Callable[[nn.Module], list[Stage]] = "blocks"
    prefix: int | Callable[[nn.Module], int] = 0
    holds_any: bool = False
    family: str = field(default="", repr=False)
    """The name of the adapter, which fills it in."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "model", class_name(self.model))

    def __reduce__(self) -> Any:
        """Pickle by name, as the fields may be lambdas. The adapter must be registered before loading."""
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
        """Return whether the model's output is read at a token in front: if there is one, unless timm's ``global_pool``
        says otherwise. Wrappers of any family return maps, and so do transformers' models with a token for masked
        patches."""
        pooled_there = getattr(model, "global_pool", "token") == "token"
        returns_maps = self.holds_any or find(model, "embeddings.mask_token") is not None
        return self.prefix_of(model) > 0 and pooled_there and not returns_maps


def last_blocks(depths: list[int], fraction: float | None = None) -> list[range]:
    """Choose the last two thirds of a model with one stage, as the papers sample a ViT (8 of 12), or ``fraction``."""
    (depth,) = depths
    return [range(depth - max(1, round(depth * (2 / 3 if fraction is None else fraction))), depth)]


def early_stages(depths: list[int], fraction: float | None = None) -> list[range]:
    """Choose stages 1 and 2, the first 6 of 9 or 21 of 27 blocks of stage 3, and none of stage 4, as the papers sample
    a ConvNeXt; and a Video Swin, with 4 of 6 blocks of stage 3.

    A third stage of another depth is sampled in the proportion of the nearer of the two. With ``fraction``, that share
    of all blocks is chosen, from the first block on.
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
