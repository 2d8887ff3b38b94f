"""How a layer changes the grid, against what it does to a map."""

from itertools import product

import pytest
import torch
from torch import nn

from torchsbp.adapters.layouts import Stride

LAYERS = [
    nn.Conv2d(1, 1, 2, 2),
    nn.Conv2d(1, 1, 3, 2, 1),
    nn.Conv2d(1, 1, 3, 2, 2, dilation=2),
    nn.Conv2d(1, 1, (2, 3), (2, 1), (0, 1)),
    nn.MaxPool2d(2),
    nn.MaxPool2d(3, 2, 1, ceil_mode=True),
    *(nn.AvgPool2d(k, s, p, ceil_mode=True) for k, s, p in [(2, 2, 0), (2, 2, 1), (2, 3, 1), (3, 2, 1), (1, 3, 0)]),
]


@pytest.mark.parametrize("layer", LAYERS, ids=repr)
def test_the_grid_behind_a_layer(layer):
    stride = Stride.of(layer)
    for grid in product(range(5, 10), (6, 7)):
        assert stride(grid) == tuple(layer(torch.zeros(1, 1, *grid)).shape[2:]), grid
