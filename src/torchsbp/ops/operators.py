"""run_pass in a compiled step: what a compiler does not look into."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from .compiling import call_named, shapes_alone
from .graphs import Pass, Tensors, passed, run_pass, with_passed


class Outcome(NamedTuple):
    """Of a pass: how many results it has, which of them are made and which are what it was given, and what else."""

    results: int
    made: list[int]
    passed: dict[int, tuple[int, torch.Size]]
    extra: Any


_PASSES: dict[str, tuple[Pass, Any]] = {}
_OUTCOMES: dict[str, Outcome] = {}
torch.library.define("torchsbp::run_pass", "(str name, Tensor?[] given) -> Tensor[]")


def named_pass(run: Pass, static: Any, given: Tensors) -> tuple[Tensors, Any]:
    """``run_pass`` in a compiled step: the compiler has a name for the pass."""
    kinds = [None if t is None else (t.dtype, t.is_contiguous()) for t in given]
    name = call_named(run.__module__, run.__qualname__, static, kinds)
    _PASSES[name] = run, static
    made = torch.ops.torchsbp.run_pass(name, list(given))
    outcome = _OUTCOMES[name]
    found: list[Any] = [None] * outcome.results
    for number, tensor in zip(outcome.made, made, strict=True):
        found[number] = tensor
    return with_passed(found, outcome.passed, given), outcome.extra


@torch.library.impl("torchsbp::run_pass", ("cpu", "cuda"))
def _run_pass(name: str, given: Tensors) -> list[Tensor]:
    run, static = _PASSES[name]
    results, _ = run_pass(run, static, given, given[0].device)
    return [dense(results[number]) for number in _OUTCOMES[name].made]


@torch.library.register_fake("torchsbp::run_pass")
def _outcome(name: str, given: Tensors) -> list[Tensor]:
    run, static = _PASSES[name]
    with shapes_alone():
        results, extra = run(static, given)
    same = passed(results, given)
    made = [number for number, t in enumerate(results) if t is not None and number not in same]
    _OUTCOMES[name] = Outcome(len(results), made, same, extra)
    return [torch.empty_like(results[number]) for number in made]


def dense(tensor: Tensor) -> Tensor:
    """Without gaps, as graphs leave their results: the compiler relies on strides that do not change."""
    if tensor.is_contiguous() or torch.empty_like(tensor).stride() == tensor.stride():
        return tensor
    return tensor.clone()
