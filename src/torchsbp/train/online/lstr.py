"""LSTR, the long short-term transformer (Xu et al., NeurIPS 2021), written from the paper's description.

    c = stage₂(Q₂, stage₁(Q₁, m_long + s_long))      learned queries compress the long memory, twice
    y = classifier(decoder(m_work + s_work, c))      the work memory, causal, attends to what they hold

m are the projected features of frames; s are sinusoids of a slot's place in the window. A stage is a stack of
transformer decoder units: self-attention, cross-attention, feed-forward, each with a residual path and then a norm.
Keys and values of m and of s are computed apart (W(m + s) = Wm + Ws), so that those of a frame can be kept while it
moves to older slots.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...errors import UsageError
from ..data.window import Window
from ..ranges import COUNT, SHARE_BELOW_1

KeysValues = tuple[Tensor, Tensor]


@dataclass
class Temporal:
    """LSTR's sizes; the defaults are the published ones."""

    width: int = field(default=1024, metadata=COUNT)
    heads: int = field(default=16, metadata=COUNT)
    feedforward: int = field(default=1024, metadata=COUNT)
    """the width within feed-forward layers"""
    dropout: float = field(default=0.2, metadata=SHARE_BELOW_1)
    queries: tuple[int, int] = field(default=(16, 32), metadata=COUNT)
    """how many queries the long memory is compressed to, in the first and in the second stage"""
    units: tuple[int, int, int] = field(default=(1, 2, 2), metadata=COUNT)
    """decoder units of the first stage, the second stage, and the work memory"""

    def __post_init__(self) -> None:
        if self.width % max(1, 2 * self.heads):  # heads below 1 are refused with the other numbers
            raise UsageError(
                f"task.temporal.width={self.width} is not allowed; allowed: multiples of 2 · heads = {2 * self.heads}"
            )


class Attention(nn.Module):
    """Attention of x to a memory whose keys and values are given."""

    def __init__(self, sizes: Temporal) -> None:
        super().__init__()
        self.heads, self.dropout = sizes.heads, sizes.dropout
        self.q, self.out = nn.Linear(sizes.width, sizes.width), nn.Linear(sizes.width, sizes.width)
        self.kv = nn.Linear(sizes.width, 2 * sizes.width)

    def memory(self, m: Tensor) -> KeysValues:
        """Return keys and values ``[…, n, width]`` of m alone, without a slot."""
        k, v = self.kv(m).chunk(2, -1)
        return k, v

    def placed(self, memory: KeysValues, s: Tensor) -> KeysValues:
        """Return these keys and values with the share of slots ``s [n, width]`` added."""
        k, v = F.linear(s, self.kv.weight).chunk(2, -1)
        return memory[0] + k, memory[1] + v

    def forward(self, x: Tensor, memory: KeysValues, allowed: Tensor | None = None, causal: bool = False) -> Tensor:
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(-2, -3) for part in (self.q(x), *memory))
        dropout = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, allowed, dropout, is_causal=causal)
        return self.out(y.transpose(-2, -3).flatten(-2))


class Unit(nn.Module):
    """A transformer decoder unit."""

    def __init__(self, sizes: Temporal) -> None:
        super().__init__()
        self.own, self.cross = Attention(sizes), Attention(sizes)
        self.up, self.down = nn.Linear(sizes.width, sizes.feedforward), nn.Linear(sizes.feedforward, sizes.width)
        self.norms = nn.ModuleList(nn.LayerNorm(sizes.width) for _ in range(3))
        self.drop = nn.Dropout(sizes.dropout)

    def forward(self, x: Tensor, memory: KeysValues, allowed: Tensor | None = None, causal: bool = False) -> Tensor:
        x = self.norms[0](x + self.drop(self.own(x, self.own.memory(x), causal=causal)))
        x = self.norms[1](x + self.drop(self.cross(x, memory, allowed)))
        return self.norms[2](x + self.drop(self.down(self.drop(F.relu(self.up(x))))))


class LSTR(nn.Module):
    """Maps features of a window's frames to logits of its work frames."""

    slots: Tensor

    def __init__(self, features: int, classes: int, window: Window, sizes: Temporal) -> None:
        super().__init__()
        self.window = window
        self.project = nn.Sequential(nn.Linear(features, sizes.width), nn.ReLU(), nn.Dropout(sizes.dropout))
        self.queries = nn.ParameterList(torch.randn(count, sizes.width) for count in sizes.queries)
        self.first, self.second, self.decoder = (
            nn.ModuleList(Unit(sizes) for _ in range(count)) for count in sizes.units
        )
        self.classifier = nn.Linear(sizes.width, classes)
        self.register_buffer("slots", sinusoids(window.long + window.work, sizes.width), persistent=False)

    def forward(self, features: Tensor, empty: Tensor) -> Tensor:
        """Map ``features [B, long + work, …]`` and ``empty [B, long]``, as in ``View``, to ``[B, work, classes]``."""
        long, work = self.project(features).split((self.window.long, self.window.work), 1)
        memories = [unit.cross.memory(long) for unit in self.units(self.first)]
        return self.decode(work, self.compress(memories, empty))

    def compress(self, memories: Sequence[KeysValues], empty: Tensor) -> Tensor:
        """Compress the long memory, given as keys and values for each unit of stage 1, to ``[B, queries, width]``."""
        samples, slots = empty.shape[0], self.slots[: self.window.long]
        allowed = ~empty[:, None, None, :]
        x = self.queries[0].expand(samples, -1, -1)
        for unit, memory in zip(self.units(self.first), memories, strict=True):
            x = unit(x, unit.cross.placed(memory, slots), allowed)
        c = self.queries[1].expand(samples, -1, -1)
        for unit in self.units(self.second):
            c = unit(c, unit.cross.memory(x))
        return c

    def decode(self, work: Tensor, compressed: Tensor) -> Tensor:
        """Map projected work frames ``[B, n, width]``, those of the first n slots, to logits ``[B, n, classes]``."""
        x = work + self.slots[self.window.long :][: work.shape[1]]
        for unit in self.units(self.decoder):
            x = unit(x, unit.cross.memory(compressed), causal=True)
        return self.classifier(x)

    @staticmethod
    def units(stage: nn.ModuleList) -> list[Unit]:
        return list(stage)  # type: ignore[arg-type]


def sinusoids(slots: int, width: int) -> Tensor:
    """Return ``[slots, width]``: sines and cosines of wave lengths from 2π to 10000 · 2π."""
    rates = torch.exp(-math.log(10000) / width * torch.arange(0, width, 2))
    angles = torch.arange(slots)[:, None] * rates
    return torch.stack((angles.sin(), angles.cos()), -1).flatten(1)
