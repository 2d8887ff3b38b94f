"""``run_pass`` in a compiled step: an operator, into which the step's compiler does not look.

The step calls the operator once for every block. The pass that it runs is compiled by itself, once for all blocks of a
kind, and captured in a CUDA graph. So the step compiles in less time than if every block were traced, and has as few
launches as an eager one.
"""

from collections.abc import Callable, Hashable, Sequence
from functools import cache
from operator import getitem
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch.utils._python_dispatch import _get_current_dispatch_mode

from .compiling import call_named, captured_later, read_by_inductor, shapes_alone
from .graphs import Pass, Tensors, passed, run_pass, surroundings, with_passed


class NamedPass(NamedTuple):
    """A pass, its static arguments, and whether Inductor compiles it: not in steps of another backend, which was chosen
    instead, nor for dynamic sizes, as it would be compiled for each of them."""

    run: Pass
    static: Any
    compiles: bool


class Outcome(NamedTuple):
    """What is known of a pass before it runs: how many results it has, which of them are made, in which order the
    dimensions of these lie in memory, which are inputs passed through (``graphs.passed``), and its ``extra``."""

    results: int
    made: list[int]
    orders: list[tuple[int, ...]]
    passed: dict[int, tuple[int, torch.Size]]
    extra: Any

    def placed(self, made: Sequence[Tensor]) -> list[Any]:
        """All results: these where they are made, None elsewhere."""
        found: list[Any] = [None] * self.results
        for number, tensor in zip(self.made, made, strict=True):
            found[number] = tensor
        return found


_PASSES: dict[str, NamedPass] = {}
_OUTCOMES: dict[str, Outcome] = {}
torch.library.define("torchsbp::run_pass", "(str name, Tensor?[] given) -> Tensor[]")


def named_pass(run: Pass, static: Any, given: Tensors) -> tuple[Tensors, Any]:
    """``run_pass`` in a compiled step, which knows the pass by a name."""
    constant = all(type(size) is int for t in given if t is not None for size in t.shape)
    how = laid if constant else ordered  # the layout of inputs decides that of results, which is kept by name
    kinds = [None if t is None else (t.dtype, *how(t)) for t in given]
    compiles = constant and read_by_inductor()
    name = call_named(run.__module__, run.__qualname__, static, kinds, compiles)
    _PASSES[name] = NamedPass(run, static, compiles)
    made = torch.ops.torchsbp.run_pass(name, list(given))
    outcome = _OUTCOMES[name]
    return with_passed(outcome.placed(made), outcome.passed, given), outcome.extra


@torch.library.impl("torchsbp::run_pass", ("cpu", "cuda"))
def _run_pass(name: str, given: Tensors) -> list[Tensor]:
    run, static, compiles = _PASSES[name]
    results, _ = run_pass(compiled_pass(name) if compiles else run, static, given, given[0].device)
    outcome = _OUTCOMES[name]
    return [laid_out(results[number], order) for number, order in zip(outcome.made, outcome.orders, strict=True)]


@torch.library.register_fake("torchsbp::run_pass")
def _outcome(name: str, given: Tensors) -> list[Tensor]:
    run, static, _ = _PASSES[name]
    with shapes_alone():
        results, extra = run(static, given)
    same = passed(results, given)
    made = [number for number, t in enumerate(results) if t is not None and number not in same]
    found = [torch.empty_like(results[number]) for number in made]
    _OUTCOMES[name] = Outcome(len(results), made, [order_of(t) for t in found], same, extra)
    return found


def laid(tensor: Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return tuple(tensor.shape), tensor.stride()


def ordered(tensor: Tensor) -> tuple[tuple[int, ...], bool]:
    return order_of(tensor), tensor.is_contiguous()


def order_of(tensor: Tensor) -> tuple[int, ...]:
    """The dimensions by stride, the largest first. Those of equal strides, where one has size 1, stay in order."""
    strides = tensor.stride()
    return tuple(sorted(range(len(strides)), key=lambda dim: -strides[dim]))


def laid_out(tensor: Tensor, order: tuple[int, ...]) -> Tensor:
    """The tensor without gaps in memory, its dimensions in that order: the compiled step relies on its strides."""
    turned = tensor.permute(order)
    if turned.is_contiguous():
        return tensor
    return turned.contiguous().permute([order.index(dim) for dim in range(len(order))])


@cache
def compiled_pass(name: str) -> Pass:
    """The pass, compiled when it first runs on tensors of these shapes and strides, on this device and with these
    settings; for all streams."""
    run = _PASSES[name].run
    compiled: dict[Hashable, Callable[..., Any]] = {}

    def run_compiled(static: Any, given: Tensors) -> tuple[Tensors, Any]:
        if _get_current_dispatch_mode() is not None:  # which has to see every operator
            return run(static, given)
        tensors = [t.detach() for t in given if t is not None]
        device = tensors[0].device
        kind = device, *surroundings(device)[2:], *map(laid, tensors)
        if kind not in compiled and in_capture(device):  # the user's: to compile runs kernels, which fails there
            return run(static, given)
        with torch.no_grad():
            if kind not in compiled:
                compiled[kind] = torch._inductor.compile(read_again(name, given), tensors)
            made = compiled[kind](*tensors)
        outcome = _OUTCOMES[name]
        return outcome.placed(made), outcome.extra

    return run_compiled


def in_capture(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def read_again(name: str, given: Tensors) -> fx.GraphModule:
    """A graph of one call of the pass, into which the compiler looks this time."""
    graph = fx.Graph()
    places = [None if t is None else graph.placeholder(f"given_{number}") for number, t in enumerate(given)]
    found = graph.call_function(made_by, (name, *places))
    graph.output(tuple(graph.call_function(getitem, (found, i)) for i in range(len(_OUTCOMES[name].made))))
    return fx.GraphModule({}, graph)


def made_by(name: str, *given: Any) -> list[Tensor]:
    run, static, _ = _PASSES[name]
    with captured_later():
        results, _ = run(static, given)
    return [results[number] for number in _OUTCOMES[name].made]
