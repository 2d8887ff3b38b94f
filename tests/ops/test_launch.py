"""Kernels are bound once for a kind of arguments, and what Triton compiles for is all in that kind."""

import pytest
import torch

from torchsbp.ops import launch as module
from torchsbp.ops.launch import launch

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
    hooks = None, None, None
    expected = 7, 1, 1, "stream", "handle", "metadata", *hooks, y.data_ptr(), None, 48, 1e-5, 8
    assert kernel.direct == [expected]


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
