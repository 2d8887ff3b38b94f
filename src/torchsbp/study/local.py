"""The papers' code for Drop QKV, for comparison: Algorithm 1 around whole attention layers.

Kept tokens attend to kept tokens and dropped tokens to dropped ones, so the forward pass differs in training. The
library's rule "qkv" has the full softmax (docs/method.md, section 7).
"""

from math import isqrt
from typing import Any

import torch
from torch import Tensor, nn

from ..ops.wrap import sbp
from ..sampling import samplers
from ..sampling.keys import draw_key


class Draw:
    """The kept tokens of a step, the class token among them. As the model's forward pre-hook it draws them anew."""

    def __init__(self, side: int, ratio: float) -> None:
        self.grid, self.ratio, self.step = (side, side), ratio, 0
        self.keep = torch.zeros(0)

    def __call__(self, *_: Any) -> None:
        key = draw_key(0, torch.tensor(self.step), 0, 1)
        order = samplers.ordered("grid", self.grid, (self.ratio,), key)
        kept = samplers.first(order, samplers.count("grid", self.grid, self.ratio)).flatten()
        self.keep, self.step = torch.cat([kept.new_zeros(1), kept + 1]), self.step + 1


class Apart(nn.Module):
    """Runs a module on kept tokens with gradients, and on the others without."""

    def __init__(self, inner: nn.Module, draw: Draw) -> None:
        super().__init__()
        self.inner, self.draw = inner, draw

    def forward(self, x: Tensor, **_: Any) -> Tensor:
        return sbp(self.inner, x, self.draw.keep.to(x.device)) if self.training else self.inner(x)


def apply_local(model: Any, keep_ratio: float) -> Draw:
    """Patch, in place, the last two thirds of the blocks of a ViT with a class token.

    Return the draw, whose ``step`` can be set."""
    blocks = model.blocks
    draw = Draw(isqrt(model.patch_embed.num_patches), keep_ratio)
    model.register_forward_pre_hook(draw)
    for block in blocks[len(blocks) - round(2 / 3 * len(blocks)) :]:
        block.attn, block.mlp = Apart(block.attn, draw), Apart(block.mlp, draw)
    return draw
