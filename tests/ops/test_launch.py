"""Kernels are bound once for a kind of arguments, and what Triton compiles for is all in that kind; in a compiled step
a launch is an operator."""

import inspect
import re
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor
from torch._dynamo.source import ConstantSource
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from torchsbp.ops import launch as module
from torchsbp.ops.block import transformer_block
from torchsbp.ops.device import CUDA, substituted
from torchsbp.ops.heads import AttentionSpec
from torchsbp.ops.launch import WRITTEN, launch, launch_later
from torchsbp.ops.layers import BackwardOptions, Norm
from torchsbp.ops.mlp import MLPSpec
from torchsbp.ops.rows import RowWeight

from .helpers import attention_params, gradients, kept_rows, mlp_params

pytest.importorskip("triton")


class Kernel:
    """Stands in for a compiling JITFunction: says what was bound by name, and what was handed over in order."""

    arg_names = ("x", "scale", "count", "eps", "C")
    function, packed_metadata = "handle", "metadata"

    def __init__(self) -> None:
        self.bound, self.direct = [], []

    def __getitem__(self, grid):
        def bind(**arguments):
            self.bound.append(arguments)
            return self

        return bind

    def run(self, *arguments):
        self.direct.append(arguments)


@pytest.fixture
def kernel(monkeypatch):
    from torchsbp.ops import row_kernels

    kernel = Kernel()
    monkeypatch.setattr(row_kernels, "take", kernel)
    monkeypatch.setattr(module, "_KERNELS", {})
    monkeypatch.setattr(module, "_COMPILED", {})
    monkeypatch.setattr(module, "stream", lambda device: "stream")
    return kernel


def test_a_second_launch_of_the_same_kind_is_direct(kernel):
    x, y = torch.zeros(16), torch.ones(32)
    launch("take", (4,), x=x, count=32, eps=1e-6, scale=None, C=8, num_warps=2)
    launch("take", (7,), x=y, count=48, eps=1e-5, scale=None, C=8, num_warps=2)
    assert len(kernel.bound) == 1
    assert kernel.bound[0]["scale"] is x  # not there, and not read: the launcher is that of all others
    hooks = None, None, None
    expected = 7, 1, 1, "stream", "handle", "metadata", *hooks, y.data_ptr(), None, 48, 1e-5, 8
    assert kernel.direct == [expected]


def test_a_second_launch_of_an_operator_is_direct(kernel, monkeypatch):
    """Its tensors are told apart by whether they are written to; it has them, numbers and constants in order."""
    monkeypatch.setattr(module, "_LAUNCHES", {})
    monkeypatch.setattr(module, "_BOUND", {})
    monkeypatch.setitem(WRITTEN, "take", {"x"})
    x, y, scale, hooks = torch.zeros(16), torch.ones(32), torch.zeros(8), (None, None, None)
    launch_later("take", (4,), {"x": x, "count": 32, "eps": 1e-6, "scale": scale, "C": 8, "num_warps": 2})
    ((name, later),) = module._LAUNCHES.items()
    assert (later.read, later.written, later.sizes) == (["scale"], ["x"], [])
    assert len(kernel.bound) == 1
    torch.ops.torchsbp.launch(name, [scale], [y], [])
    torch.ops.torchsbp.launch(name, [scale], [y[1:]], [])  # not aligned: another kernel
    expected = 4, 1, 1, "stream", "handle", "metadata", *hooks, y.data_ptr(), scale.data_ptr(), 32, 1e-6, 8
    assert kernel.direct == [expected]
    assert len(kernel.bound) == 2


def test_launches_go_to_the_gpu_of_their_tensors(kernel, monkeypatch):
    """Also while another one is the current GPU."""
    monkeypatch.setattr(module, "_LAUNCHES", {})
    monkeypatch.setattr(module, "_BOUND", {})
    current, visited = [1], []

    @contextmanager
    def visiting(device):
        visited.append(device)
        before, current[0] = current[0], device
        yield
        current[0] = before

    monkeypatch.setattr(module, "elsewhere", lambda device: device != current[0])
    monkeypatch.setattr(module.torch.cuda, "device", visiting)
    x = torch.zeros(16)  # of device -1
    given = {"x": x, "count": 32, "eps": 1e-6, "scale": None, "C": 8, "num_warps": 2}
    for _ in range(2):
        launch("take", (4,), **given)
    launch_later("take", (4,), given)
    assert visited == [-1] * 3
    assert len(kernel.bound) == 1
    assert len(kernel.direct) == 2


@pytest.mark.parametrize("device", ["cuda:1", "cpu"])
@pytest.mark.parametrize("read", [True, False])
def test_kernels_of_a_gpu_are_built_while_a_compiler_reads(kernel, monkeypatch, device, read):
    """In its second reading, and where it asks an operator for shapes alone; not if a number is not known."""
    built = []
    monkeypatch.setattr(module, "build_ahead", lambda *given: built.append(given))
    monkeypatch.setattr(module, "compiling", lambda: read)
    monkeypatch.setattr(module, "no_data", lambda: not read)
    shapes = ShapeEnv()
    unknown = shapes.create_symintnode(shapes.create_symbol(7, ConstantSource("n")), hint=7)
    with FakeTensorMode(shape_env=shapes):
        x = torch.empty(16, dtype=torch.bfloat16, device=device)
        for count in (32, 48, unknown):
            launch("take", (4,), x=x, count=count, eps=1e-6, scale=None, C=8, num_warps=2)
    arguments, options = [torch.bfloat16, torch.bfloat16, 32, 1e-6, 8], {"num_warps": 2}
    assert [given[1:] for given in built[:1]] == [(kernel, 1, arguments, options)] * (device != "cpu")
    assert len(built) == 2 * (device != "cpu")
    assert len({given[0] for given in built}) == (device != "cpu")  # both are one kind


@pytest.mark.parametrize(
    "other",
    [
        {"x": torch.zeros(17)[1:]},
        {"x": torch.zeros(16, dtype=torch.bfloat16)},
        {"scale": torch.zeros(16)},
        {"count": 33},
        {"count": 1},
        {"count": 2**40},
        {"C": 16},
        {"num_warps": 4},
    ],
)
def test_another_kind_is_bound_anew(kernel, other):
    arguments = {"x": torch.zeros(16), "scale": None, "count": 32, "eps": 1e-6, "C": 8, "num_warps": 2}
    launch("take", (4,), **arguments)
    launch("take", (4,), **arguments | other)
    assert len(kernel.bound) == 2
    assert not kernel.direct


def test_constants_of_kernels_are_in_capitals():
    """``launch`` tells them by that."""
    triton = pytest.importorskip("triton")
    from torchsbp.ops import kernels, row_kernels, window_kernels

    names = {**vars(kernels), **vars(row_kernels), **vars(window_kernels)}
    found = [value for value in names.values() if isinstance(value, triton.runtime.KernelInterface)]
    assert found
    parameters = [parameter for function in found for parameter in getattr(function, "params", ())]
    assert all(parameter.is_constexpr == parameter.name.isupper() for parameter in parameters)


def test_what_kernels_write_to_is_told():
    """To the compiler, which relies on it."""
    stores = re.compile(r"(?:tl\.store|tl\.atomic_add|store_rows)\((\w+)")
    for name, written in WRITTEN.items():
        text = inspect.getsource(module.function_named(name).fn)
        found = set(stores.findall(text))
        if "at" in found:  # an address that was computed before
            assert "sums" in written or "d_bias" in written
            found = (found - {"at"}) | (written & {"sums", "d_bias"})
        assert found == written, name


class Interpreted(CUDA):
    """Our kernels, where there is no GPU; not PyTorch's."""

    def attention_kernel(self, q: Tensor, fused: bool) -> str:
        return "plain"

    def weight_gradient(self, weight: Tensor, *pairs: tuple[Tensor, Tensor]) -> Tensor:
        return torch.cat([dy.t() @ x for dy, x in pairs])


@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are interpreted without one")
@pytest.mark.parametrize("recompute", [True, False])
def test_compiled_steps_launch_the_same(recompute, monkeypatch):
    """The second reading has operators instead."""
    launched, original = [], module.function_named
    monkeypatch.setattr(module, "function_named", lambda name: launched.append(name) or original(name))
    monkeypatch.setattr(module, "_KERNELS", {})
    batch, n, width = 2, 12, 16
    rows, options = kept_rows(batch, n, 0.5), BackwardOptions(recompute=recompute, row_weight=RowWeight(2.0, 1))
    p1, p2 = attention_params(width, 2, dtype=torch.float32), mlp_params(width, 2 * width, dtype=torch.float32)
    x = torch.randn(batch, n, width, requires_grad=True)

    def run(x):
        spec = AttentionSpec(2, 0.35)
        return transformer_block(x, rows, p1, spec, p2, MLPSpec(Norm(1e-5)), options=options._replace(capture=False))

    with substituted(Interpreted()):
        y = run(x)
        dy = torch.randn_like(y)
        expected = y, *gradients(y, dy, (x, *p1, *p2))
        kernels = set(launched)
        launched.clear()
        module._KERNELS.clear()
        torch._dynamo.reset()
        y = torch.compile(run, fullgraph=True)(x)
        found = y, *gradients(y, dy, (x, *p1, *p2))
    steps = {"cotangent", "normalise", "activation", "norm_backward", "stack", "last_layer"}
    assert kernels == {*steps, "keep"}  # compiled, what else it does is fused with what was before
    assert set(launched) == {*steps, "take"}
    for a, b in zip(found, expected, strict=True):
        assert (a is None) == (b is None)
        assert a is None or (a - b).norm() <= 1e-5 * b.norm()
