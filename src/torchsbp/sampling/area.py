"""Where images end: positions of padding come last in an order, so that none is kept while image is left.

Images ``[h, w]`` lie in the upper left corner of a padded batch ``[H, W]``. A position of a grid ``[g, …]`` belongs to
its image if it sees a pixel of it: i·H < h·g, in height and width; frames come before these.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from ..ops.constants import constant

Grid = tuple[int, ...]


class Images(NamedTuple):
    """The sizes ``[B, 2]`` of images, height and width, and the size that they are padded to."""

    sizes: Tensor
    padded: Grid


def outside(images: Images, grid: Grid) -> Tensor:
    """True at the positions of a grid that see nothing of their image, ``[B, n]``."""
    sizes, (height, width) = images.sizes, images.padded
    *frames, h, w = grid
    below = _scaled(h, height, sizes.device) >= sizes[:, :1] * h
    beside = _scaled(w, width, sizes.device) >= sizes[:, 1:] * w
    found = (below[:, :, None] | beside[:, None, :]).flatten(1)
    return found.repeat(1, math.prod(frames)) if frames else found


@constant
def _scaled(n: int, pixels: int, device: torch.device) -> Tensor:
    """i·H, ``[n]``."""
    return torch.arange(n, device=device) * pixels


def images_first(order: Tensor, outside: Tensor) -> Tensor:
    """The order ``[1 or B, n]`` with the positions of images before those of padding ``[B, n]``, for each of them."""
    order = order.expand(len(outside), -1)
    return order.gather(1, outside.gather(1, order).to(torch.int8).argsort(dim=1, stable=True))
