"""A GPU stood in for: its functions are seen in forward, in backward, and in what is computed again there."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from torchsbp.memory.simulated import DEVICE, SimulatedSteps, gpu
from torchsbp.ops.device import device_of
from torchsbp.ops.layers import BackwardOptions
from torchsbp.ops.rerun import rerun
from torchsbp.ops.steps import Steps

from ..counting import Operators

EFFICIENT = "aten._scaled_dot_product_efficient_attention.default"


@contextmanager
def traced() -> Iterator[Operators]:
    with FakeTensorMode(), gpu(), Operators() as operators:
        yield operators


def attend(x: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(x, x, x)


def test_functions_are_seen_inside_functions_of_pytorch():
    with traced() as operators:
        x = torch.randn(2, 3, 8)
        nn.MultiheadAttention(8, 2, batch_first=True)(x, x, x, need_weights=False)
    assert EFFICIENT in operators.names


@pytest.mark.parametrize("shape, name", [((6, 4, 8), EFFICIENT), ((2, 3, 2, 4, 8), "aten._safe_softmax.default")])
def test_attention_of_three_and_of_five_dimensions(shape, name):
    """SAM and Hiera have such: PyTorch makes four of three, and writes attention of five out."""
    with traced() as operators:
        x = torch.randn(shape)
        assert F.scaled_dot_product_attention(x, x, x, torch.zeros(*shape[:-1], 4)).shape == shape
        assert attend(x).shape == shape
    assert operators.names.count(name) == 2


def test_functions_of_pytorch_that_ask_elsewhere_are_left_to_it():
    with traced():
        rows, columns = torch.meshgrid(torch.arange(2), torch.arange(3), indexing="ij")
        torch._assert(rows.shape == columns.shape, "of one grid")
    assert rows.shape == (2, 3)


def test_functions_are_seen_where_a_checkpoint_is_computed_again():
    with traced() as operators:
        y = checkpoint(attend, torch.randn(1, 1, 4, 8, requires_grad=True), use_reentrant=False)
        y.sum().backward()
    assert operators.names.count(EFFICIENT) == 2


@pytest.mark.parametrize("depth", [1, 2])
def test_functions_are_seen_where_a_block_is_run_again(depth):
    """Also in a block inside of a block, whose gradient is taken while the other's is."""

    def again(x, rows, *tensors, left=depth - 1):
        y = attend(x)
        return y if not left else nested(y)

    def nested(x):
        with torch.no_grad():
            y = attend(x)
        return rerun(lambda x, rows: attend(x), y, x, x, None, (), BackwardOptions())

    with traced() as operators:
        x = torch.randn(1, 1, 4, 8, requires_grad=True)
        rerun(again, torch.zeros(1, 1, 4, 8), x, x, None, (), BackwardOptions()).sum().backward()
    assert operators.names.count(EFFICIENT) == (1 if depth == 1 else 3)


def test_autocast_is_that_of_a_gpu_and_dropout_keeps_a_mask_of_bytes():
    with traced() as operators, torch.autocast("cpu", torch.bfloat16):
        x = torch.randn(2, 8, dtype=torch.bfloat16, requires_grad=True)
        assert F.layer_norm(x, (8,)).dtype == torch.float32
        assert x.softmax(-1).dtype == torch.float32
        assert F.gelu(x).dtype == torch.bfloat16
        F.dropout(x, 0.5)
    assert "aten.native_dropout.default" in operators.names


def test_a_tensor_method_that_is_python_around_c_runs():
    with traced():
        assert torch.randn(6, 2).unflatten(0, (2, 3)).shape == (2, 3, 2)
        assert torch.randn(6, 2).split(2)[0].shape == (2, 2)


def test_ops_ask_the_simulated_device_and_no_kernel_is_launched():
    with gpu():
        x = torch.zeros(4, 8)
        assert device_of(x) is DEVICE
        steps = device_of(x).steps(x, 8)
        assert type(steps) is SimulatedSteps
        steps.stack(x, total="qkv")  # would need a GPU, or Triton's interpreter
        assert steps.totals()["qkv"].shape == (8,)
        assert type(device_of(x).steps(x.double(), 8)) is Steps
    assert device_of(x) is not DEVICE
