"""Where images end: positions of padding come last in an order, so that none is kept while image is left.

Images ``[h, w]`` lie in the upper left corner of a padded batch ``[H, W]``. A position of a grid ``[g, …]`` belongs to
its image if it sees a pixel of it: i·H < h·g, in height and width.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

Grid = tuple[int, ...]


class Images(NamedTuple):
    """The sizes ``[B, 2]`` of images, height and width, and the size that they are padded to."""

    sizes: Tensor
    padded: Grid


def inside(images: Images, grid: Grid) -> Tensor:
    """True at the positions of a grid that see their image, ``[B, n]``."""
    sizes, padded = images
    found = torch.ones(len(sizes), *[1] * len(grid), dtype=torch.bool, device=sizes.device)
    for side, dim in enumerate(range(len(grid) - 2, len(grid))):  # frames come before height and width
        shape = [1] * len(grid)
        shape[dim] = grid[dim]
        positions = torch.arange(grid[dim], device=sizes.device).view(1, *shape)
        size = sizes[:, side].view(-1, *[1] * len(grid))
        found = found & (positions * padded[side] < size * grid[dim])
    return found.expand(-1, *grid).reshape(len(sizes), math.prod(grid))


def images_first(order: Tensor, inside: Tensor) -> Tensor:
    """The order ``[1 or B, n]`` with the positions of images ``[B, n]`` before those of padding, for each of them."""
    order = order.expand(len(inside), -1)
    padding = ~inside.gather(1, order)
    return order.gather(1, padding.to(torch.int8).argsort(dim=1, stable=True))
