"""What is short-lived in an op on a GPU, forward and backward: no more of the widest tensors than needed at once."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode

from tests.ops.helpers import attention_params, mlp_params
from torchsbp.memory.live import Live, no_workspace
from torchsbp.memory.simulated import PASSES, gpu
from torchsbp.ops.activations import GATED
from torchsbp.ops.block import transformer_block
from torchsbp.ops.heads import AttentionSpec
from torchsbp.ops.layers import Norm
from torchsbp.ops.mlp import MLPSpec, mlp_branch

N, C, HEADS, HIDDEN = 256, 64, 2, 1024
LARGE, SMALL = 2048, 256  # batches: the smaller one's passes are captured


def rows_and_layer(batch: int) -> tuple[int, int]:
    """Rows, and the bytes of a hidden layer."""
    return batch * N, 2 * batch * N * HIDDEN


def peaks(op: Callable[[Tensor], Tensor], batch: int) -> tuple[int, int]:
    """Of forward and of backward, above what is alive before; where they are captured, what graphs hold."""
    x = torch.randn(batch, N, C, requires_grad=True)
    live = Live(no_workspace, lambda: None)
    with live:
        with torch.autocast("cpu", torch.bfloat16):
            y = op(x)
        in_graphs = live.pools[PASSES]
        forward, before = in_graphs or live.peak, 0 if in_graphs else live.now
        live.peak = live.pools[PASSES] = 0
        y.backward(torch.ones_like(y))
    return forward, (live.pools[PASSES] or live.peak) - before


CASES = [
    ("gelu", False, 1, 2),
    ("silu", True, 2, 3),
    (GATED + "silu", False, 3, 3),
    (GATED + "silu", True, 3, 4),
]


@pytest.mark.parametrize("batch", [LARGE, SMALL])
@pytest.mark.parametrize("act, inner_norm, forward, backward", CASES)
def test_hidden_layers_alive_at_once(act, inner_norm, forward, backward, batch):
    """A gate's hidden layer is two of them; the norm's float32 is that of a part of the rows. A backward pass that is
    captured has one half of the rows after the other."""
    rows, layer = rows_and_layer(batch)
    with FakeTensorMode(), gpu():
        p = mlp_params(C, HIDDEN, gated=act.startswith(GATED), inner_norm=inner_norm, dtype=torch.float32)
        spec = MLPSpec(act=act, inner_norm=Norm() if inner_norm else None)
        found = peaks(lambda x: mlp_branch(x, None, p, spec), batch)
    extra = 4 * 4 * rows * C + 2**24  # its narrow neighbours; the buffer for sums, weights and statistics
    assert found[0] <= forward * layer + extra
    assert found[1] <= backward * layer / (2 if batch == SMALL else 1) + extra


def test_a_block_has_no_more_alive_than_its_mlp():
    with FakeTensorMode(), gpu():
        p1 = attention_params(C, HEADS, dtype=torch.float32)
        p2 = mlp_params(C, HIDDEN, dtype=torch.float32)
        block, _ = peaks(lambda x: transformer_block(x, None, p1, AttentionSpec(HEADS, 0.25), p2, MLPSpec()), LARGE)
        mlp, _ = peaks(lambda x: mlp_branch(x, None, p2, MLPSpec()), LARGE)
    rows, _ = rows_and_layer(LARGE)
    saved = 2 * 2 * rows * C + 4 * rows * HEADS  # attention's x and output, log-sum-exp
    assert block <= mlp + saved + 4 * rows * C  # and its sum with x
