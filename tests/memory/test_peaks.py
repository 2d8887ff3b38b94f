"""What is short-lived in an op on a GPU, forward and backward: no more of the widest tensors than needed at once."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode

from tests.ops.helpers import attention_params, mlp_params
from torchsbp.memory.live import Live, no_workspace
from torchsbp.memory.simulated import gpu
from torchsbp.ops.activations import GATED
from torchsbp.ops.block import transformer_block
from torchsbp.ops.heads import AttentionSpec
from torchsbp.ops.layers import Norm
from torchsbp.ops.mlp import MLPSpec, mlp_branch

B, N, C, HEADS, HIDDEN = 256, 256, 64, 2, 1024
ROWS = B * N
LAYER = 2 * ROWS * HIDDEN  # bytes of a hidden layer
EXTRA = 3 * 4 * ROWS * C + 2**24  # its narrow neighbours in float32; the buffer for sums, weights and statistics


def peaks(op: Callable[[Tensor], Tensor]) -> tuple[int, int]:
    """Of forward and of backward, above what is alive before."""
    x = torch.randn(B, N, C, requires_grad=True)
    live = Live(no_workspace, lambda: None)
    with live:
        with torch.autocast("cpu", torch.bfloat16):
            y = op(x)
        forward, live.peak, before = live.peak, 0, live.now
        y.backward(torch.ones_like(y))
    return forward, live.peak - before


@pytest.mark.parametrize(
    "act, inner_norm, forward, backward",
    [("gelu", False, 1, 1), ("silu", True, 2, 1.5), (GATED + "silu", False, 3, 1.5), (GATED + "silu", True, 3, 2)],
)
def test_hidden_layers_alive_at_once(act, inner_norm, forward, backward):
    """A gate's hidden layer is two of them; the norm's float32 is that of a part of the rows; backward has one half of
    the rows after the other."""
    with FakeTensorMode(), gpu():
        p = mlp_params(C, HIDDEN, gated=act.startswith(GATED), inner_norm=inner_norm, dtype=torch.float32)
        spec = MLPSpec(act=act, inner_norm=Norm() if inner_norm else None)
        found = peaks(lambda x: mlp_branch(x, None, p, spec))
    assert found[0] <= forward * LAYER + EXTRA
    assert found[1] <= backward * LAYER + EXTRA


def test_a_block_has_no_more_alive_than_its_mlp():
    with FakeTensorMode(), gpu():
        p1 = attention_params(C, HEADS, dtype=torch.float32)
        p2 = mlp_params(C, HIDDEN, dtype=torch.float32)
        block = peaks(lambda x: transformer_block(x, None, p1, AttentionSpec(HEADS, 0.25), p2, MLPSpec()))
        mlp = peaks(lambda x: mlp_branch(x, None, p2, MLPSpec()))
    saved = 2 * 2 * ROWS * C + 4 * ROWS * HEADS  # attention's x and output, log-sum-exp
    assert block[0] <= mlp[0] + saved + 4 * ROWS * C  # and its sum with x
