"""Rows chosen in backward, by their cotangents, for comparison. It is emulated densely and saves nothing.

With W the diagonal matrix of the rows' weights, zero where a row is dropped (docs/method.md, section 4):

- in blocks y = x + F(x): ``dx = dy + (dF/dx)ᵀ W dy``, ``dθ = (dF/dθ)ᵀ W dy``;
- in the weights of linear layers y = x θᵀ + b alone: ``dθ = (W dy)ᵀ x``. All other gradients are exact, dx too.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn

from ..adapters import find_backbones
from ..config import SBPConfig
from ..ops.chosen import probabilities
from ..patching.survey import survey
from ..sampling import samplers


def apply_chosen(model: nn.Module, keep_ratio: float, by: str = "norm", of: str = "blocks") -> "Draw":
    """Patch, in place, the blocks that SBP samples by default: ``by`` one of CHOICES, ``of`` "blocks" or "weights".
    Return the draw, whose ``step`` can be set."""
    ((_, backbone, adapter, layout),) = find_backbones(model)
    draw = Draw(keep_ratio, by, layout.prefix_of(backbone))
    model.register_forward_pre_hook(draw)
    found = survey(backbone, adapter, layout, SBPConfig(exact_downsampling=True))
    blocks = [its.module for its in found if its.depth is not None]
    if of == "blocks":
        for block in blocks:
            channels = 1 if hasattr(block, "conv_dw") else -1
            block.register_forward_hook(lambda _, args, y, at=channels: OfBlock.apply(y, args[0], draw, at))
    else:
        for layer in (its for block in blocks for its in block.modules() if isinstance(its, nn.Linear)):
            layer.register_forward_hook(lambda layer, args, y: OfWeight.apply(y, args[0], layer.weight, draw))
    return draw


def drawn(p: Tensor, start: Tensor) -> Tensor:
    """Which rows are kept, each with its probability ``p [B, n]``, and in every sample as many as these add up to.

    Probabilities are laid end to end from ``start [B, 1]`` in [0, 1); rows that reach or pass a whole number are kept.
    """
    return (p.cumsum(1) + start).floor().diff(dim=1, prepend=torch.zeros_like(start)) > 0


def weighed(norms: Tensor, k: int, random: Generator) -> Tensor:
    """1/p for kept rows, else 0. Rows lie in random order, so that equal norms make any k rows equally likely."""
    p = probabilities(norms, k)
    order, start = (torch.rand(len(p), n, generator=random, dtype=p.dtype).to(p.device) for n in (p.shape[1], 1))
    order = order.argsort(1)
    kept = drawn(p.gather(1, order), start).gather(1, order.argsort(1))
    return torch.where(kept, 1 / p, 0.0)


def even(norms: Tensor, k: int, random: Generator) -> Tensor:
    return weighed(torch.ones_like(norms), k, random)


def largest(norms: Tensor, k: int, random: Generator) -> Tensor:
    """1 for the k rows with the largest norms, else 0: biased."""
    return torch.zeros_like(norms).scatter(1, norms.topk(k).indices, 1.0)


CHOICES: dict[str, Callable[[Tensor, int, Generator], Tensor]] = {"norm": weighed, "even": even, "largest": largest}


class Draw:
    """Draws the weights of rows, as a function of ``step`` alone. The first ``prefix`` rows of a sample (class and
    register tokens) have weight 1."""

    def __init__(self, ratio: float, by: str, prefix: int) -> None:
        self.ratio, self.choice, self.prefix = ratio, CHOICES[by], prefix
        self.step, self.batch, self.random = 0, 0, Generator()

    def __call__(self, model: nn.Module, args: tuple[Tensor, ...]) -> None:
        """Forward pre-hook: begin the next step."""
        self.batch = len(args[0])
        self.random.manual_seed(self.step)
        self.step += 1

    def counts(self, norms: Tensor) -> Tensor:
        """The weights of rows, in the shape of their norms, whose first dimension is the samples."""
        flat = norms.reshape(self.batch, -1)[:, self.prefix :]
        counts = self.choice(flat, samplers.count("random", flat.shape[1:], self.ratio), self.random)
        return F.pad(counts, (self.prefix, 0), value=1.0).to(norms.dtype).view_as(norms)


class OfBlock(torch.autograd.Function):
    """Identity on the output y of a block with input x: W dy goes back through the block, (1 − W) dy around it to x."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, x: Tensor, draw: Draw, channels: int) -> Tensor:
        ctx.draw, ctx.channels = draw, channels
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, None, None]:
        counts = ctx.draw.counts(dy.norm(dim=ctx.channels, keepdim=True))
        return counts * dy, (1 - counts) * dy, None, None


class OfWeight(torch.autograd.Function):
    """Identity on the output y of a linear layer: dy passes unchanged, the weight gets ((W − 1) dy)ᵀ x in addition."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, x: Tensor, weight: Tensor, draw: Draw) -> Tensor:
        ctx.save_for_backward(x)
        ctx.draw = draw
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, Tensor, None]:
        (x,) = ctx.saved_tensors
        counts = ctx.draw.counts(dy.norm(dim=-1, keepdim=True) * x.norm(dim=-1, keepdim=True))
        more = ((counts - 1) * dy).flatten(0, -2).T @ x.flatten(0, -2).to(dy.dtype)
        return dy, None, more, None
