"""Descriptions of blocks of any make: they name what mixes rows, and everything else treats rows one by one."""

import copy
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import ParametrizationList

from .base import Bound, Description
from .lean import check_down, check_drop_path
from .names import bare_name, find, inside, missing

STOCHASTIC_DEPTH = ("DropPath", "StochasticDepth")  # endings of class names: most libraries have their own class


@dataclass(frozen=True)
class Mixer:
    """A part in which rows meet: attention, or an MLP over tokens.

    - ``name``: dotted name in the block; ``*`` stands for every member of a list.
    - ``source``: the modules through which the block's input reaches the mixer, separated by spaces; "" if directly.
    - ``dim``: where rows begin in its input and output: 1 in ``[B, N, C]``, 2 in ``[B, C, N]``; on maps likewise.
    - ``whole``: rows meet before the mixer too: in the block's own code (windows around attention) or in ``source``
      (pooling). So ``source``, which is one module here, passes all rows on even in the run on kept rows, and the mixer
      picks out the kept ones.
    """

    name: str = "attn"
    source: str = "norm1"
    dim: int = 1
    whole: bool = False

    def members(self, block: nn.Module) -> Iterator["Mixer"]:
        """Yield the mixer itself, or one mixer for every member of the list that ``*`` stands for."""
        head, star, _ = self.name.partition("*")
        chain = find(block, head.rstrip(".")) if star else None
        if not isinstance(chain, nn.Module):
            yield self
            return
        for key, _ in chain.named_children():
            yield replace(self, name=self.name.replace("*", key), source=self.source.replace("*", key))

    def input_of(self, block: nn.Module, x: Tensor) -> Tensor:
        """Return the input of the mixer if ``x [B, N, C]`` is the input of the block."""
        for name in self.source.split():
            x = find(block, name)(x)
        return x if self.dim == 1 else x.transpose(1, 2)


@dataclass(frozen=True)
class Source:
    """The source of a ``whole`` mixer: it gives all rows even in the run on kept rows."""


@dataclass(frozen=True)
class Draw:
    """A part that draws its random factor once for both runs: stochastic depth, or dropout that sees no rows."""

    name: str


@dataclass(frozen=True)
class Shortcut:
    """The module on the residual path."""

    name: str


@dataclass(frozen=True)
class Response:
    """A global response norm, whose statistic is over all rows."""

    name: str


@dataclass(frozen=True)
class RunAgain(Description):
    """A block whose own modules run again on kept rows, for the gradient."""

    kind: ClassVar[str] = "run again"
    meaning: ClassVar[str] = "its own forward runs again on kept rows"
    hooks: ClassVar[str] = "would run twice in training"

    def problems(self, block: nn.Module) -> Iterator[str]:
        yield from super().problems(block)
        once = [getattr(self, field) for field in self.called]
        for name, module in block.named_modules():
            its_part = any(inside(name, part) for part in once)
            if isinstance(module, ParametrizationList) and not its_part and changes(module):
                yield (
                    f"{name} is {', '.join(bare_name(its) for its in module)}, whose state changes in every forward; "
                    "this one would run twice: remove it (torch.nn.utils.parametrize.remove_parametrizations)"
                )


@dataclass(frozen=True)
class Residual(RunAgain):
    """``x + f₁(x) + …`` on ``[B, N, C]`` or a map. The block's own forward runs again on kept rows, for the gradient.

    - ``mixers``: the parts in which rows meet; ``()`` if they meet in the block's own code, which must be ``x + f(x)``
      and is then run again on all rows.
    - ``constant``: names of parts that do not see rows (a table of relative positions). Dropout may be active in them.
    - ``shortcut``: name of the module on the residual path, which may change the grid; "" if there is none.
    - ``dim``: where rows begin in the block's input: 1 in ``[B, N, C]`` and ``[B, H, W, C]``, 2 in ``[B, C, H, W]``.
    - ``passes``: the block returns a tuple of its output and its other arguments, unchanged (such as a grid).
    """

    mixers: tuple[Mixer, ...] = (Mixer(),)
    constant: tuple[str, ...] = ()
    shortcut: str = ""
    dim: int = 1
    passes: bool = False

    rules: tuple[str, ...] = ("query",)

    def members(self, block: nn.Module) -> list[Mixer]:
        return [member for mixer in self.mixers for member in mixer.members(block)]

    def bindings(self, block: nn.Module) -> Iterator[Bound]:
        yield from super().bindings(block)
        for mixer in self.members(block):
            yield find(block, mixer.name), mixer
            if mixer.whole:
                yield find(block, mixer.source), Source()
        for name, module in block.named_modules():
            if is_stochastic_depth(module) or (dropout_rate(module) and self._is_constant(name)):
                yield module, Draw(name)
        shortcut = self.path(block)
        if shortcut is not None:
            yield shortcut, Shortcut(self.shortcut)

    def path(self, block: nn.Module) -> nn.Module | None:
        """Return the module on the residual path; None if that path is the input itself."""
        shortcut = find(block, self.shortcut)
        return None if isinstance(shortcut, nn.Identity) else shortcut

    def problems(self, block: nn.Module) -> Iterator[str]:
        yield from super().problems(block)
        yield from not_row_by_row(block, self.constant)
        members = self.members(block)
        for mixer in members:
            yield from missing(block, mixer.name, *mixer.source.split())
        if not members or any(mixer.whole for mixer in members):
            return
        for name, module in block.named_modules():
            if "Attention" in bare_name(module) and not any(inside(name, m.name) for m in members):
                known = ", ".join(m.name for m in members)
                yield f"{name} is {bare_name(module)}, which is not among the described mixers ({known})"

    def _is_constant(self, name: str) -> bool:
        return any(inside(name, part) for part in self.constant)


@dataclass(frozen=True)
class PointwiseBlock(RunAgain):
    """``shortcut(x) + drop(scale · f(conv(pool(x))))`` on ``[B, C, H, W]``, where f is run again on kept rows.

    ``pointwise`` names the modules of f, in order. They treat rows one by one, except for ``response``, a global
    response norm, and work on ``[B, H, W, C]``, or on ``[B, C, H, W]`` if they have 1×1 convolutions.
    """

    called: ClassVar[tuple[str, ...]] = ("conv", "pool", "shortcut", "drop")

    conv: str = "conv_dw"
    pointwise: tuple[str, ...] = ("norm", "mlp")
    response: str = "mlp.grn"
    scale: str = "gamma"
    drop: str = "drop_path"
    pool: str = ""
    shortcut: str = ""

    def bindings(self, block: nn.Module) -> Iterator[Bound]:
        yield from super().bindings(block)
        response = find(block, self.response)
        if response is not None:
            yield response, Response(self.response)

    def dim(self, block: nn.Module) -> int:
        """Return where rows begin in the input of f: dimension 2 of ``[B, C, H, W]``, or 1 of ``[B, H, W, C]``."""
        layers = (layer for name in self.pointwise for layer in find(block, name).modules())
        return 2 if any(isinstance(layer, nn.Conv2d) for layer in layers) else 1

    def problems(self, block: nn.Module) -> Iterator[str]:
        yield from super().problems(block)
        yield from missing(block, self.conv, *self.pointwise)
        yield from check_drop_path(self.drop, find(block, self.drop))
        for name in self.pointwise:
            yield from not_row_by_row(find(block, name), prefix=f"{name}.")


@dataclass(frozen=True)
class Patches(RunAgain):
    """``down(f(x))`` on ``[B, C, H, W]`` with stride ≥ kernel, run again on the patches of kept outputs."""

    down: str = "1"

    def problems(self, block: nn.Module) -> Iterator[str]:
        yield from super().problems(block)
        yield from check_down(self.down, find(block, self.down))
        yield from not_row_by_row(block)


def changes(parametrization: ParametrizationList) -> bool:
    """Return whether a forward in training changes a parametrization's buffers, as a power iteration does. It is tried
    on a copy."""
    if not any(True for _ in parametrization.buffers()):
        return False
    tried = copy.deepcopy(parametrization).train()
    before = [(id(buffer), buffer._version) for buffer in tried.buffers()]
    with torch.no_grad():
        tried()
    return before != [(id(buffer), buffer._version) for buffer in tried.buffers()]


def not_row_by_row(block: nn.Module | None, constant: tuple[str, ...] = (), prefix: str = "") -> Iterator[str]:
    """Yield why a block's result on kept rows would differ: dropout outside of its ``constant`` parts, batch norm."""
    for name, module in () if block is None else block.named_modules():
        found = f"{prefix}{name}".rstrip(".")
        if dropout_rate(module) and not any(inside(name, part) for part in constant):
            rate = f"{bare_name(module)}(p={dropout_rate(module)})"
            yield f"{found} is {rate}, which is not supported (allowed: absent, Identity, Dropout with p=0)"
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            yield f"{found} is {bare_name(module)}, whose statistics would be those of kept rows"


def is_stochastic_depth(module: nn.Module) -> bool:
    """Return whether a module is stochastic depth, of any library."""
    return bare_name(module).endswith(STOCHASTIC_DEPTH)


def dropout_rate(module: nn.Module) -> float:
    """Return the probability with which a module drops elements; 0 if it does not."""
    if isinstance(module, nn.modules.dropout._DropoutNd):
        return module.p
    return module.dropout if isinstance(module, nn.MultiheadAttention) else 0.0
