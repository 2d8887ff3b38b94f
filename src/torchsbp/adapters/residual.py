"""A residual block of any make, described by what mixes its rows: everything else in it treats rows one by one."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

from torch import Tensor, nn

from .parts import Parts, find, qualified

DROP_PATHS = ("DropPath", "StochasticDepth")  # what the names of its classes end with: most libraries have their own


@dataclass(frozen=True)
class Mixer:
    """A part in which rows meet: attention, or an MLP over tokens.

    - ``name``: dotted name in the block; ``*`` stands for every member of a list.
    - ``source``: names of the modules through which the block's input reaches it, with spaces between; "" if directly.
    - ``dim``: where rows are in its input and output: 1 in ``[B, N, C]``, 2 in ``[B, C, N]``.
    """

    name: str = "attn"
    source: str = "norm1"
    dim: int = 1

    def members(self, block: nn.Module) -> Iterator["Mixer"]:
        """The mixer itself, or one for every member of the list that ``*`` stands for."""
        head, star, _ = self.name.partition("*")
        chain = find(block, head.rstrip(".")) if star else None
        if not isinstance(chain, nn.Module):
            yield self
            return
        for key, _ in chain.named_children():
            yield replace(self, name=self.name.replace("*", key), source=self.source.replace("*", key))

    def input_of(self, block: nn.Module, x: Tensor) -> Tensor:
        """What it sees if the block's input is ``x [B, N, C]``."""
        for name in self.source.split():
            x = find(block, name)(x)
        return x if self.dim == 1 else x.transpose(1, 2)


@dataclass(frozen=True)
class Residual(Parts):
    """``x + f₁(x) + …`` on ``[B, N, C]``, whose own forward is run again on kept rows in backward.

    - ``mixers``: the parts in which rows meet. Without any, rows meet in the block's own code: it is then run again on
      all rows, and must be ``x + f(x)``.
    - ``constant``: names of parts that do not see rows (a table of relative positions), where dropout may be active.
    """

    mixers: tuple[Mixer, ...] = (Mixer(),)
    constant: tuple[str, ...] = ()

    rules: ClassVar[tuple[str, ...]] = ("query",)
    hooks: ClassVar[str] = "would run twice in training"

    def members(self, block: nn.Module) -> list[Mixer]:
        return [member for mixer in self.mixers for member in mixer.members(block)]

    def draws(self, block: nn.Module) -> Iterator[tuple[str, nn.Module]]:
        """Parts whose randomness is drawn once for both runs: stochastic depth, dropout that does not see rows."""
        for name, module in block.named_modules():
            if is_drop_path(module) or (dropout_rate(module) and self._is_constant(name)):
                yield name, module

    def problems(self, block: nn.Module) -> Iterator[str]:
        yield from super().problems(block)
        members = self.members(block)
        for mixer in members:
            for name in (mixer.name, *mixer.source.split()):
                if not isinstance(find(block, name), nn.Module):
                    yield f"{name} is missing"
        for name, module in block.named_modules():
            if dropout_rate(module) and not self._is_constant(name):
                found = f"{bare_name(module)}(p={dropout_rate(module)})"
                yield f"{name} is {found}, which is not supported (allowed: absent, Identity, Dropout with p=0)"
            if isinstance(module, nn.modules.batchnorm._BatchNorm):
                yield f"{name} is {bare_name(module)}, whose statistics would be those of kept rows"
            if members and "Attention" in bare_name(module) and not any(_inside(name, m.name) for m in members):
                known = ", ".join(m.name for m in members)
                yield f"{name} is {bare_name(module)}, which is not among the described mixers ({known})"

    def _is_constant(self, name: str) -> bool:
        return any(_inside(name, part) for part in self.constant)


def _inside(name: str, part: str) -> bool:
    return name == part or name.startswith(f"{part}.")


def bare_name(module: nn.Module) -> str:
    """The name of its own class, without where that is from."""
    return qualified(module).rpartition(".")[2]


def is_drop_path(module: nn.Module) -> bool:
    """Stochastic depth, of any library."""
    return bare_name(module).endswith(DROP_PATHS)


def dropout_rate(module: nn.Module) -> float:
    """The probability with which a module drops elements, 0 if it does not."""
    if isinstance(module, nn.modules.dropout._DropoutNd):
        return module.p
    return module.dropout if isinstance(module, nn.MultiheadAttention) else 0.0
