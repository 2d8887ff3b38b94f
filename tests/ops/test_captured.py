"""Passes replayed from a graph: the same outputs and gradients, for every block of a kind. Without a GPU a graph is
stood in for by what it would do: run again on the memory that it was captured with."""

from collections import OrderedDict
from types import SimpleNamespace
from typing import NamedTuple
from weakref import WeakValueDictionary

import pytest
import torch
import torch._inductor.config
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd

from torchsbp.ops import graphs as module
from torchsbp.ops import operators
from torchsbp.ops.alive import Alive
from torchsbp.ops.block import transformer_block
from torchsbp.ops.conv_block import ConvParams, ConvSpec, conv_block
from torchsbp.ops.device import CPU, CUDA
from torchsbp.ops.heads import AttentionParams, AttentionSpec
from torchsbp.ops.layers import BackwardOptions
from torchsbp.ops.mlp import MLPParams, MLPSpec, mlp_branch
from torchsbp.ops.named import split
from torchsbp.ops.operators import laid_out, order_of

from .helpers import attention_params, gradients, kept_rows, mlp_params

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
B, N, C, HEADS = 2, 24, 48, 3
SPEC = AttentionSpec(HEADS, 0.25)


@pytest.fixture(autouse=True)
def graphs(monkeypatch):
    """Those of the test alone."""

    def again(run):
        def on(place):
            with monkeypatch.context() as patch:
                patch.setattr(module, "empty", place)
                return run()

        places, (results, extra) = on(lambda tensor: None if tensor is None else tensor.clone())

        def replay():
            there = iter(places)
            _, (found, _) = on(lambda tensor: next(there))
            for old, new in zip(results, found, strict=True):
                if old is not None:
                    old.copy_(new)

        return (places, (results, extra)), replay

    monkeypatch.setattr(module, "_GRAPHS", OrderedDict())
    monkeypatch.setattr(module, "_POOLS", WeakValueDictionary())
    monkeypatch.setattr(module, "_NEEDED", {})
    if DEVICE == "cpu":
        monkeypatch.setattr(CPU, "run_pass", CUDA.run_pass)
        monkeypatch.setattr(module, "suits", lambda given: True)
        monkeypatch.setattr(module, "pool_for", lambda device, alive: SimpleNamespace(record=again))
    return module


def on_device(params):
    return type(params)(*(None if t is None else t.detach().to(DEVICE).requires_grad_() for t in params))


class Leaf(NamedTuple):
    x: torch.Tensor


def block(seed: int, rows):
    torch.manual_seed(seed)
    x = torch.randn(B, N, C, device=DEVICE, requires_grad=True)
    p1 = on_device(attention_params(C, HEADS, dtype=torch.float32))
    p2 = on_device(mlp_params(C, 2 * C, dtype=torch.float32))
    return transformer_block(x, rows, p1, SPEC, p2, MLPSpec()), (x, *p1, *p2)


def mlp(seed: int, rows):
    torch.manual_seed(seed)
    x = torch.randn(B, 4, 6, C, device=DEVICE, requires_grad=True)
    p = on_device(mlp_params(C, 2 * C, dtype=torch.float32))
    return mlp_branch(x, rows, p, residual=False), (x, *p)


def conv(seed: int, rows):
    torch.manual_seed(seed)
    x = torch.randn(B, C, 4, 6, device=DEVICE).to(memory_format=torch.channels_last).requires_grad_()
    p1 = on_device(ConvParams(torch.randn(C, 1, 7, 7), torch.randn(C)))
    p2 = on_device(mlp_params(C, 2 * C, dtype=torch.float32))
    return conv_block(x, rows, p1, ConvSpec((3, 3), (1, 1), C), p2, MLPSpec()), (x, *p1, *p2)


@pytest.mark.parametrize("ratio", [0.5, 1.0])
@pytest.mark.parametrize("op", [block, mlp, conv])
def test_replayed_passes_give_what_the_passes_give(op, ratio, graphs, monkeypatch):
    """Three blocks of one shape and other values: the first runs as it is, the third by the graphs of the second."""
    rows = kept_rows(B, N, ratio)
    rows = None if rows is None else rows.to(DEVICE)
    kept = []
    for seed in range(3):
        y, leaves = op(seed, rows)
        found = y, *gradients(y, torch.randn_like(y), leaves)
        torch.manual_seed(seed)
        with monkeypatch.context() as patch:
            patch.setattr(module, "LARGEST", 0)
            y, leaves = op(seed, rows)
            expected = y, *gradients(y, torch.randn_like(y), leaves)
        kept.append((found, [None if t is None else t.clone() for t in expected]))
    forward, backward = graphs._GRAPHS.values()
    assert isinstance(forward, module.Graph)
    assert isinstance(backward, module.Graph)
    for found, expected in kept:  # what was given stays as it was given
        for a, b in zip(found, expected, strict=True):
            assert (a is None) == (b is None)
            assert a is None or torch.equal(a, b)


@pytest.mark.parametrize("ratio", [0.5, 1.0])
def test_a_compiled_step_has_small_passes_as_calls(ratio, graphs, monkeypatch):
    """One call forward and one backward, replayed from the third step on; large ones are read by the compiler."""
    rows = kept_rows(B, N, ratio)
    rows = None if rows is None else rows.to(DEVICE)
    found = []

    def read(graph, inputs):
        found.append([str(node.target) for node in graph.graph.nodes].count("torchsbp.run_pass.default"))
        return make_boxed_func(graph.forward)

    backend = aot_autograd(fw_compiler=read, bw_compiler=read)

    def run(x, p1, p2):
        return transformer_block(x, rows, p1, SPEC, p2, MLPSpec())

    torch._dynamo.reset()
    compiled = torch.compile(run, backend=backend, fullgraph=True)
    for seed in range(4):
        _, leaves = block(seed, rows)
        x, p1, p2 = split(leaves, Leaf, AttentionParams, MLPParams)
        y = compiled(x.x, p1, p2)
        given = torch.randn_like(y)
        ours = y, *gradients(y, given, leaves)
        with monkeypatch.context() as patch:
            patch.setattr(module, "LARGEST", 0)
            y = run(x.x, p1, p2)
            theirs = y, *gradients(y, given, leaves)
        for a, b in zip(ours, theirs, strict=True):
            assert (a is None) == (b is None)
            assert a is None or torch.equal(a, b)
    assert found == [1, 1]
    names = {its.run.__qualname__ for its in operators._PASSES.values()}
    assert names == {"_TransformerBlock.forward", "_TransformerBlock.backward"}
    assert [type(each) for each in graphs._GRAPHS.values()] == [module.Graph, module.Graph]
    torch._dynamo.reset()
    monkeypatch.setattr(module, "MOST_COMPILED", 0)
    y = torch.compile(run, backend=backend, fullgraph=True)(x.x, p1, p2)
    assert all(a is None or torch.equal(a, b) for a, b in zip(gradients(y, given, leaves), theirs[1:], strict=True))
    assert found == [1, 1, 0, 0]
    torch._dynamo.reset()
    monkeypatch.setattr(module, "MOST_COMPILED", 2**22)
    with torch._inductor.config.patch({"triton.cudagraphs": True}):  # all of the step is captured
        y = torch.compile(run, backend=backend, fullgraph=True)(x.x, p1, p2)
    assert found[4:] == [0]
    assert torch.equal(y, theirs[0])


def test_passes_of_one_kind_have_outcomes_of_their_own(graphs):
    """Sampled and exact, with stochastic depth and without, in half precision and not: the options are the same."""
    rows = kept_rows(B, N, 0.5).to(DEVICE)
    p1 = on_device(attention_params(C, HEADS, dtype=torch.float32))
    p2 = on_device(mlp_params(C, 2 * C, dtype=torch.float32))
    half1, half2 = (type(p)(*(t if t is None else t.detach().bfloat16().requires_grad_() for t in p)) for p in (p1, p2))
    factor = torch.tensor([0.0, 2.0], device=DEVICE)

    def run(x):
        x = transformer_block(x, None, p1, SPEC, p2, MLPSpec())
        x = transformer_block(x, rows, p1, SPEC, p2, MLPSpec(), factors=(factor, None))
        x = transformer_block(x.bfloat16(), rows, half1, SPEC, half2, MLPSpec())
        return transformer_block(x, None, half1, SPEC, half2, MLPSpec()).float()

    torch._dynamo.reset()
    compiled = torch.compile(run, backend="aot_eager", fullgraph=True)
    for _ in range(4):
        x = torch.randn(B, N, C, device=DEVICE, requires_grad=True)
        leaves = (x, *p1, *p2, *half1, *half2)
        y, expected = compiled(x), run(x)
        found, wanted = gradients(y, torch.ones_like(y), leaves), gradients(expected, torch.ones_like(y), leaves)
        for a, b in zip((y, *found), (expected, *wanted), strict=True):
            assert a is None or torch.equal(a, b)
    assert len(operators._OUTCOMES.keys() & operators._PASSES.keys()) >= 8
    torch._dynamo.reset()


@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores")
def test_a_compiled_step_has_calls_for_any_batch(graphs):
    """One compiled step; what a pass leaves has no gaps, whether it is replayed or not."""
    p1 = on_device(attention_params(C, HEADS, dtype=torch.float32))
    p2 = on_device(mlp_params(C, 2 * C, dtype=torch.float32))

    def run(x):
        return transformer_block(x, None, p1, SPEC, p2, MLPSpec())

    torch._dynamo.reset()
    compiled = torch.compile(run, backend="aot_eager", fullgraph=True, dynamic=True)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for batch in (4, 3, 4, 3, 4):
            x = torch.randn(batch, N, C, device=DEVICE, requires_grad=True)
            y, expected = compiled(x), run(x)
            dy = torch.randn_like(y)
            found, wanted = gradients(y, dy, (x, *p1, *p2)), gradients(expected, dy, (x, *p1, *p2))
            for a, b in zip((y, *found), (expected, *wanted), strict=True):
                assert a is None or torch.equal(a, b)
    assert sum(isinstance(each, module.Graph) for each in graphs._GRAPHS.values()) == 4
    torch._dynamo.reset()


def test_strides_of_results(graphs):
    """What is made has no gaps, and its dimensions in the order that the compiler was told."""
    with_gaps = torch.randn(2, 3, 32)[..., :25]
    found = laid_out(with_gaps, order_of(torch.empty_like(with_gaps)))
    assert found.stride() == (75, 25, 1)
    assert torch.equal(found, with_gaps)
    by_columns = torch.randn(4, 5).t()
    assert order_of(by_columns) == (1, 0)
    assert laid_out(by_columns, (1, 0)) is by_columns
    other = laid_out(by_columns, (0, 1))
    assert other.stride() == (4, 1)
    assert torch.equal(other, by_columns)
    last = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    assert order_of(last) == (0, 2, 3, 1)
    assert laid_out(last.contiguous(), (0, 2, 3, 1)).stride() == last.stride()


@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores")
@pytest.mark.parametrize("ratio", [0.5, 1.0])
def test_the_passes_of_a_compiled_step_are_compiled_once_for_all_blocks(ratio, graphs, monkeypatch):
    """By themselves: of two blocks a forward and a backward pass are read."""
    rows = kept_rows(B, N, ratio)
    rows = None if rows is None else rows.to(DEVICE)
    read, compile_graph = [], torch._inductor.compile

    def compile_pass(graph, given):
        read.append(graph)
        return compile_graph(graph, given)

    monkeypatch.setattr(torch._inductor, "compile", compile_pass)
    kind = {"dtype": torch.float32}
    params = [
        (on_device(attention_params(C, HEADS, **kind)), on_device(mlp_params(C, 2 * C, **kind))) for _ in range(2)
    ]

    def run(x):
        for p1, p2 in params:
            x = transformer_block(x, rows, p1, SPEC, p2, MLPSpec())
        return x

    torch._dynamo.reset()
    compiled = torch.compile(run, fullgraph=True)
    for _ in range(4):
        x = torch.randn(B, N, C, device=DEVICE, requires_grad=True, **kind)
        leaves = (x, *(t for pair in params for its in pair for t in its))
        y, expected = compiled(x), run(x)
        found, wanted = gradients(y, torch.ones_like(y), leaves), gradients(expected, torch.ones_like(y), leaves)
        for a, b in zip((y, *found), (expected, *wanted), strict=True):
            assert (a is None) == (b is None)
            assert a is None or (a - b).norm() <= 1e-5 * b.norm()
    assert len(read) == 2
    assert [type(each) for each in graphs._GRAPHS.values()].count(module.Graph) == 4  # of compiled and eager passes
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")  # other kernels may run
    try:
        compiled(x).sum().backward()
    finally:
        torch.set_float32_matmul_precision(before)
    assert len(read) == 4
    torch._dynamo.reset()


def test_passes_of_grids_of_other_dimensions_do_not_meet(graphs):
    """What is known of the results of one, their layout, is not said of the other's."""
    p1, p2 = (on_device(p) for p in (attention_params(C, HEADS), mlp_params(C, 2 * C)))

    def run(x):
        return transformer_block(x, None, p1, SPEC, p2, MLPSpec())

    torch._dynamo.reset()
    compiled = torch.compile(run, backend="aot_eager", fullgraph=True, dynamic=False)
    image, clip = (torch.randn(B, *grid, C, dtype=torch.float64, device=DEVICE) for grid in ((4, 6), (2, 3, 4)))
    for x in (image, clip, image):
        y = compiled(x.requires_grad_())
        assert y.shape == x.shape
        (found,) = gradients(y, torch.ones_like(y), (x,))
        (expected,) = gradients(run(x), torch.ones_like(y), (x,))
        assert torch.allclose(found, expected)
    torch._dynamo.reset()


@pytest.fixture
def compiled_pass(graphs, monkeypatch):
    """Of one tensor, which it gives back where it is not compiled, and the devices that it is compiled for."""
    made = []

    def compile_pass(graph, given):
        device = given[0].device
        made.append(device.type)
        return lambda *tensors: [torch.empty(2, device=device)]

    monkeypatch.setattr(torch._inductor, "compile", compile_pass)
    monkeypatch.setattr(operators, "surroundings", lambda device: (device, 0))
    monkeypatch.setitem(operators._PASSES, "mine", operators.NamedPass(lambda static, given: (given, None), None, True))
    monkeypatch.setitem(operators._OUTCOMES, "mine", operators.Outcome(1, [0], [(0,)], {}, None))
    return operators.compiled_pass.__wrapped__("mine"), made


def test_what_is_compiled_for_a_device_runs_there_alone(compiled_pass):
    run, made = compiled_pass
    for device in ("cpu", "meta", "cpu", "meta"):
        (result,), _ = run(None, [torch.empty(2, device=device)])
        assert result.device.type == device
    assert made == ["cpu", "meta"]


def test_nothing_is_compiled_while_a_user_captures(compiled_pass, monkeypatch):
    run, made = compiled_pass
    run(None, [torch.empty(2)])
    monkeypatch.setattr(operators, "in_capture", lambda device: True)
    for size, same in ((2, False), (3, True)):  # what is compiled already runs so
        given = torch.empty(size)
        (result,), _ = run(None, [given])
        assert (result is given) == same
    assert made == ["cpu"]


def test_what_is_passed_on_is_not_copied(graphs):
    """Parameters, and x where it is saved as it is, are saved themselves by a replayed forward pass."""
    for seed in range(3):
        y, leaves = block(seed, None)
        y.sum().backward(retain_graph=True)
    saved = y.grad_fn.saved_tensors
    assert {t.data_ptr() for t in leaves if t is not None} <= {t.data_ptr() for t in saved if t is not None}


def test_other_shapes_and_other_needs_have_graphs_of_their_own(graphs):
    for rows in (kept_rows(B, N, 0.5), kept_rows(B, N, 0.25), None):
        y, leaves = mlp(0, None if rows is None else rows.to(DEVICE))
        gradients(y, torch.ones_like(y), leaves)
    x, *p = leaves
    mlp_branch(x.detach(), None, MLPParams(*p), residual=False).sum().backward()
    assert len(graphs._GRAPHS) == 7  # whether x needs a gradient makes no difference in forward


def test_blocks_of_one_step_are_not_captured(graphs):
    """Image sizes that come once are not worth it."""
    rows = kept_rows(B, N, 0.5).to(DEVICE)
    (y, _), (z, _) = mlp(0, rows), mlp(1, rows)
    (y + z).sum().backward()
    assert all(isinstance(step, int) for step in graphs._GRAPHS.values())


def test_as_many_graphs_as_are_held(graphs, monkeypatch):
    monkeypatch.setattr(module, "HELD", 2)
    for ratio in (0.25, 0.5, 0.75):
        y, leaves = mlp(0, kept_rows(B, N, ratio).to(DEVICE))
        gradients(y, torch.ones_like(y), leaves)
    assert len(graphs._GRAPHS) == 2


def test_nothing_is_captured_that_shall_not_be(graphs):
    for _ in range(3):
        x = torch.randn(B, N, C, device=DEVICE, requires_grad=True)
        p = on_device(mlp_params(C, 2 * C, dtype=torch.float32))
        mlp_branch(x, None, p, options=BackwardOptions(capture=False)).sum().backward()
    assert not graphs._GRAPHS


def test_what_can_not_be_captured_runs_as_it_stands(graphs, monkeypatch):
    def refuse(device, alive):
        raise RuntimeError("not while capturing\nmore of it")

    monkeypatch.setattr(module, "pool_for", refuse)
    rows = kept_rows(B, N, 0.5).to(DEVICE)

    def step():
        y, leaves = mlp(0, rows)
        return gradients(y, torch.ones_like(y), leaves)

    first = step()
    with pytest.warns(UserWarning, match="takes longer: not while capturing$") as told:
        second = step()
    assert len(told) == 2  # forward and backward
    for found in (second, step()):  # told once
        assert all(torch.equal(a, b) for a, b in zip(first, found, strict=True) if a is not None)


def test_the_pool_has_room_for_what_a_pass_was_seen_to_need(graphs, monkeypatch):
    """At least what it is given and gives."""
    needed, before = [], module.pool_for
    monkeypatch.setattr(module, "pool_for", lambda device, alive: needed.append(alive) or before(device, alive))
    monkeypatch.setattr(module, "_NEEDED", {})
    for _ in range(2):
        y, leaves = mlp(0, None)
        found = gradients(y, torch.ones_like(y), leaves)
    least = sum(t.nbytes for t in leaves if t is not None) + y.nbytes
    assert least < needed[0] == needed[1]
    assert needed[1] > least + sum(t.nbytes for t in found if t is not None)


@pytest.mark.parametrize(
    "shape, eager, compiled",
    [
        ((32, 197, 768), True, True),  # ViT-B
        ((64, 197, 768), True, True),
        ((64, 257, 768), True, False),  # EVA02-B: more work than launching it
        ((128, 196, 384), True, True),  # the third stage of Swin-T: as many elements, half as wide
        ((128, 784, 192), False, False),  # its second: the copies would be too large
    ],
)
def test_which_passes_are_small(shape, eager, compiled, monkeypatch):
    x = torch.empty(shape, device="meta")
    assert module.small(x, 1.0) is eager
    monkeypatch.setattr(module, "compiling", lambda: True)
    assert module.small(x, 1.0) is compiled
    monkeypatch.setattr(module, "captured_whole", lambda: True)
    assert module.small(x, 1.0) is False


def test_a_first_pass_that_fails_is_captured_later(graphs, monkeypatch):
    """When its memory has been measured."""
    errors = [RuntimeError("out of memory")]

    def run(static, given):
        if errors:
            raise errors.pop()
        return [given[0] + 1], None

    x = torch.ones(2, device=DEVICE)
    with pytest.raises(RuntimeError, match="out of memory"):
        graphs.run_pass(run, None, [x], x.device)
    assert not graphs._GRAPHS
    for _ in range(2):
        monkeypatch.setattr(graphs, "_steps", [graphs._steps[0] + 1])
        (found,), _ = graphs.run_pass(run, None, [x], x.device)
        assert torch.equal(found, x + 1)
    assert isinstance(next(iter(graphs._GRAPHS.values())), graphs.Graph)


def test_what_a_pass_is_given_is_not_counted_twice():
    x = torch.ones(1024)
    with Alive(x, None) as alive:
        y = x.view(32, 32) + 1
    assert alive.peak == y.nbytes
