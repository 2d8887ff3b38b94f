"""Where images end in padded batches. Padding comes last in an order: none is kept while there is image left.

An image of size (h, w) lies in the upper left corner of a batch padded to (H, W). Position i of g along the height
belongs to the image if it sees a pixel of it, i·H < h·g, and likewise along the width. In grids of videos, frames are
the dimension before these two.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from ..ops.constants import constant

Grid = tuple[int, ...]


class Images(NamedTuple):
    """The sizes ``[B, 2]`` of images, height and width, and the size to which they are padded."""

    sizes: Tensor
    padded: Grid


def outside(images: Images, grid: Grid) -> Tensor:
    """Return True at the positions of a grid that see nothing of their image, ``[B, n]``."""
    sizes, (height, width) = images.sizes, images.padded
    *frames, h, w = grid
    below = _scaled(h, height, sizes.device) >= sizes[:, :1] * h
    beside = _scaled(w, width, sizes.device) >= sizes[:, 1:] * w
    found = (below[:, :, None] | beside[:, None, :]).flatten(1)
    return found.repeat(1, math.prod(frames)) if frames else found


@constant
def _scaled(n: int, pixels: int, device: torch.device) -> Tensor:
    """Return i·H for i = 0 … n − 1, ``[n]``; H is ``pixels``."""
    return torch.arange(n, device=device) * pixels


def images_first(order: Tensor, outside: Tensor) -> Tensor:
    """Return the order ``[1 or B, n]`` for each image, ``[B, n]``: positions ``outside`` of the image come last."""
    order = order.expand(len(outside), -1)
    return order.gather(1, outside.gather(1, order).to(torch.int8).argsort(dim=1, stable=True))
