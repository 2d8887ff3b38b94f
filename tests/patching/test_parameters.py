"""What lean ops take of a block."""

from torch import nn

from torchsbp.adapters.lean import TransformerBlock
from torchsbp.patching.parameters import projection_of


def test_the_bias_beside_a_weight_that_is_a_parameter_by_itself():
    """Also in a module whose own name has "weight" in it."""
    block = nn.Module()
    block.weighted = nn.MultiheadAttention(8, 2)
    (weight,), bias = projection_of(block, "weighted.in_proj_weight", TransformerBlock())
    assert weight is block.weighted.in_proj_weight
    assert bias is block.weighted.in_proj_bias
