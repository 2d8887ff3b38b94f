"""What a compiler finds of an op: one call when it reads the bytecode, and casts that it does not keep."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd

from torchsbp.ops import compiling, mlp
from torchsbp.ops.compiling import op
from torchsbp.ops.layers import BackwardOptions, Norm
from torchsbp.ops.mlp import MLPSpec, mlp_branch
from torchsbp.ops.rows import RowWeight

from .helpers import assert_same_gradients, gradients, kept_rows, mlp_params

B, N, C = 2, 12, 16


def read(graphs):
    def compiler(graph, inputs):
        graphs.append(graph.graph)
        return make_boxed_func(graph.forward)

    return compiler


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def test_bytecode_has_a_call_for_an_op():
    found = []

    def backend(graph, inputs):
        found.extend(node for node in graph.graph.nodes if node.op == "call_function")
        return graph.forward

    p, rows = mlp_params(C, 2 * C), kept_rows(B, N, 0.5)
    x = torch.randn(B, N, C, dtype=torch.float64, requires_grad=True)
    options = BackwardOptions(row_weight=RowWeight(2.0, 1))

    def run(x):
        return mlp_branch(x, rows, p, MLPSpec(Norm(1e-5)), options=options)

    y, expected = torch.compile(run, backend=backend, fullgraph=True)(x), run(x)
    assert len(found) == 1
    assert torch.equal(y, expected)
    dy = torch.randn_like(y)
    assert_same_gradients(gradients(y, dy, (x, *p)), gradients(expected, dy, (x, *p)), rtol=0)


def test_options_come_through_as_they_are():
    options = BackwardOptions(weight_scale=0.5, row_weight=RowWeight(2.0, 1))
    given = (options, (2, (1, 1)), None, 3.0, torch.bfloat16, "gelu", True)
    found = compiling._unpacked(compiling._packed(given))
    assert found == given
    assert isinstance(found[0], BackwardOptions)
    assert isinstance(found[0].row_weight, RowWeight)


def test_marks_are_those_of_the_compiler():
    def function():
        pass

    for marked in (compiling._are_calls, compiling._name):
        assert vars(torch.compiler.assume_constant_result(function)) == vars(marked)


def test_the_second_reading_is_noticed():
    seen = []

    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            seen.append(compiling.compiling())
            return 2 * x

        @staticmethod
        def backward(ctx, dy):
            seen.append(compiling.compiling())
            return 2 * dy

    x, run = torch.ones(2, requires_grad=True), op(Function)
    torch.compile(run, backend="aot_eager", fullgraph=True)(x).sum().backward()
    assert len(seen) >= 2
    assert all(seen)
    assert torch.equal(x.grad, torch.full((2,), 2.0))
    seen.clear()
    run(x).sum().backward()
    assert seen == [False, False]


def test_weights_are_cast_again_in_backward():
    """What is cast is not saved, but for biases."""
    graphs = []
    p, rows = mlp_params(C, 3 * C, dtype=torch.float32), kept_rows(B, N, 0.5)
    x = torch.randn(B, N, C, requires_grad=True)

    def run(x):
        return mlp_branch(x, rows, p)

    compiled = torch.compile(run, backend=aot_autograd(fw_compiler=read(graphs), bw_compiler=read(graphs)))
    with torch.autocast("cpu", torch.bfloat16):
        y, expected = compiled(x), run(x)
        dy = torch.randn_like(y)
        found, wanted = gradients(y, dy, (x, *p)), gradients(expected, dy, (x, *p))
    assert_same_gradients([y, *found], [expected, *wanted], rtol=0)
    (output,) = (node for node in graphs[0].nodes if node.op == "output")
    made = [node.meta["val"] for node in output.args[0] if node is not None and node.op != "placeholder"]
    assert 3 * C * C not in {t.numel() for t in made}
    zeros = [node for node in graphs[1].nodes if node.target is torch.ops.aten.nan_to_num.default]
    assert len(zeros) == 2  # one for all weights, one for x


def test_large_hidden_layers_are_computed_in_halves(monkeypatch):
    """Where memory comes first."""
    p, rows = mlp_params(C, 2 * C), kept_rows(B, N, 0.5)
    x = torch.randn(B, N, C, dtype=torch.float64, requires_grad=True)
    dy = torch.randn_like(x)

    def products(part, spare=True):
        """How many there are in backward, and the gradients."""
        graphs = []
        monkeypatch.setattr(mlp, "PART", part)
        torch._dynamo.reset()
        backend = aot_autograd(fw_compiler=read(graphs), bw_compiler=read(graphs))
        options = BackwardOptions(spare=spare)
        y = torch.compile(lambda x: mlp_branch(x, rows, p, options=options), backend=backend, fullgraph=True)(x)
        found = gradients(y, dy, (x, *p))
        return sum("mm" in str(node.target) for node in graphs[1].nodes), found

    (whole, expected), (halves, found) = products(2**24), products(1)
    assert (whole, halves) == (5, 10)
    assert_same_gradients(found, expected)
    assert products(1, spare=False)[0] == 5


def test_what_one_thread_asks_for_is_not_asked_of_another():
    """Two steps that are compiled at once."""
    with compiling.shapes_alone(), compiling.captured_later(), ThreadPoolExecutor(1) as other:
        assert (compiling.no_data(), compiling.read_to_be_captured()) == (True, True)
        assert other.submit(lambda: (compiling.no_data(), compiling.read_to_be_captured())).result() == (False, False)
    assert (compiling.no_data(), compiling.read_to_be_captured()) == (False, False)
