"""Training steps of tiny models, and the checks that tests of many rooms share."""

import copy
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import Tensor, nn

import torchsbp
from torchsbp import SBPConfig, adapters
from torchsbp.patching.entry import entries
from torchsbp.sampling.recommended import Recommended

Gradients = dict[str, Tensor]
GRID = SBPConfig.preset("paper", attention="query")
"""One mask for the batch, all blocks and the layers between stages, nothing weighted: what needs that to be tested."""
FAULTS_OF_TORCH_2_11 = pytest.mark.xfail(
    torch.__version__.startswith("2.11."), reason="its compiler for CPUs (docs/method.md, section 9)", strict=True
)


def step(model: nn.Module, x: Tensor, run: Any = None) -> tuple[Tensor, Gradients]:
    """Output and gradients of one training step, with the same randomness each time; ``run``: the model, compiled."""
    model.zero_grad()
    torch.manual_seed(2)
    y = (model if run is None else run)(x)
    loss_of(y).backward()
    return y.detach(), gradients_of(model)


def loss_of(y: Tensor) -> Tensor:
    weights = torch.linspace(-1, 1, y.numel(), dtype=y.dtype, device=y.device).view_as(y)
    return (y * weights + y.square()).sum()


def gradients_of(model: nn.Module) -> Gradients:
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def entry_of(model: nn.Module) -> nn.Module:
    """The module in which a patched model's forward begins."""
    return next(module for _, module in entries(model))


def sampled_in(model: nn.Module) -> list[str]:
    """The names of the sampled modules in their backbone."""
    return [site.name for entry, _ in entries(model) for site in entry.masks.sites]


@contextmanager
def recommending(recommended: Recommended, adapter: adapters.Adapter) -> Iterator[None]:
    """Inside, this is what keep-ratios that are names mean for the adapter's family."""
    known = list(adapters.ADAPTERS)
    torchsbp.register(replace(adapter, recommended=recommended))
    try:
        yield
    finally:
        adapters.ADAPTERS[:] = known


def distance(found: Gradients, exact: Gradients) -> Tensor:
    return sum((found[k] - exact[k]).square().sum() for k in exact).sqrt()


def assert_gradients(ours: Gradients, theirs: Gradients, rtol: float = 1e-9) -> None:
    assert ours.keys() == theirs.keys()
    scale = max(g.norm() for g in theirs.values())
    for name, expected in theirs.items():
        error = (ours[name] - expected).norm()
        assert error <= rtol * expected.norm() + 1e-13 * scale, f"{name}: {error:.2e} of {expected.norm():.2e}"


def check_compiled(eager: nn.Module, x: Tensor, backend: Any, steps: int) -> None:
    """A full graph, new masks in every step, no recompilation; output and gradients are those of the eager model."""
    torch._dynamo.reset()
    model = copy.deepcopy(eager)
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for i in range(steps):
            (y, found), (expected_y, expected) = step(model, x + i, compiled), step(eager, x + i)
            torch.testing.assert_close(y, expected_y, rtol=1e-10, atol=1e-10)
            assert_gradients(found, expected)
    torch._dynamo.reset()


def check_copies(model: nn.Module, x: Tensor) -> None:
    """Copies of a patched model train their own weights, to the same gradients."""
    _, expected = step(model, x)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        torchsbp.set_step(twin, 0)
        model.zero_grad()
        _, found = step(twin, x)
        assert all(p.grad is None for p in model.parameters())
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], g) for name, g in expected.items())
        assert entry_of(twin).sbp.masks is not entry_of(model).sbp.masks


def check_left_as_it_was(plain: nn.Module, x: Tensor, **options: Any) -> None:
    """Patched, the model has its state; under no_grad and in eval mode it computes the same; ``remove`` undoes all."""
    model = copy.deepcopy(plain)
    keys, classes = list(model.state_dict()), [type(m) for m in model.modules()]
    parameters, attributes = list(model.parameters()), [set(m.__dict__) for m in model.modules()]
    buffers = [name for name, _ in model.named_buffers()]
    torchsbp.apply(model, **options)
    assert list(model.state_dict()) == keys
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    with torch.no_grad():
        torch.manual_seed(2)
        expected_y = plain(x)
        torch.manual_seed(2)
        assert torch.equal(model(x), expected_y)
    (y, gradients), (expected_y, expected) = step(model.eval(), x), step(plain.eval(), x)
    assert torch.equal(y, expected_y)
    assert all(torch.equal(gradients[name], g) for name, g in expected.items())
    assert entry_of(model).sbp_step == 0
    step(model.train(), x)
    torchsbp.remove(model)
    assert [type(m) for m in model.modules()] == classes
    assert [set(m.__dict__) for m in model.modules()] == attributes
    assert [name for name, _ in model.named_buffers()] == buffers
