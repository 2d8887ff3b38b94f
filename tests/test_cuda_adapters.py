"""Every adapter on a GPU: gradients of the oracle in float64, mixed precision as close as plain, compiled as eager."""

import copy
from collections.abc import Callable

import pytest
import torch
import torch._dynamo
from torch import nn

import torchsbp
from torchsbp import SBPConfig

from . import hf, hybrids, residuals, windows
from .families import step

pytestmark = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

Case = tuple[nn.Module, torch.Tensor, Callable[[nn.Module, SBPConfig, torch.Tensor], None]]


def rerun(name: str) -> Case:
    model = residuals.model_of(name)
    return model, residuals.images_for(model), residuals.check_against_oracle


def hybrid(name: str) -> Case:
    return hybrids.model_of(name), hybrids.images(), hybrids.check_against_oracle


def windowed(name: str) -> Case:
    family = windows.FAMILIES[name]
    return family.model(), family.images(), lambda *args: windows.check_against_oracle(family, *args)


def transformer(name: str) -> Case:
    def check(model: nn.Module, config: SBPConfig, x: torch.Tensor) -> None:
        hf.check_against_oracle(model, copy.deepcopy(model), config, x)

    return hf.Scores(hf.model_of(name)), hf.pixels(name), check


FAMILIES = {rerun: residuals.MODELS, hybrid: hybrids.MODELS, windowed: windows.FAMILIES, transformer: hf.FAMILIES}
CASES = {f"{case.__name__}: {name}": (case, name) for case, names in FAMILIES.items() for name in names}
COMPILED = ["rerun: eva02", "rerun: beit", "rerun: mixer", "hybrid: coatnet", "hybrid: v2", "windowed: timm"]


@pytest.mark.parametrize("case", CASES)
def test_gradients_equal_the_oracle(case):
    kind, name = CASES[case]
    model, x, check = kind(name)
    check(model.cuda(), SBPConfig(keep_ratio=0.5), x.cuda())


def distance(found: dict[str, torch.Tensor], exact: dict[str, torch.Tensor]) -> torch.Tensor:
    return sum((found[k] - exact[k]).square().sum() for k in exact).sqrt()


@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")  # of rms_norm, plain or not
@pytest.mark.parametrize("case", CASES)
def test_mixed_precision_is_as_close_as_plain(case):
    kind, name = CASES[case]
    plain, x, _ = kind(name)
    x = x.float().cuda()
    model = torchsbp.apply(copy.deepcopy(plain.float().cuda()), keep_ratio=1.0)
    exact_y, exact = step(plain, x)
    with torch.autocast("cuda", torch.bfloat16):
        (y, found), (expected_y, expected) = step(model, x), step(plain, x)
    assert (y - expected_y).norm() <= 2 * (expected_y - exact_y).norm()
    assert distance(found, exact) <= 2 * distance(expected, exact)


@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores")  # Inductor's, on what is not enabled here
@pytest.mark.parametrize("case", COMPILED)
def test_compiled_gradients_are_those_of_eager(case):
    kind, name = CASES[case]
    plain, x, _ = kind(name)
    eager, x = torchsbp.apply(plain.float().cuda(), keep_ratio=0.5), x.float().cuda()
    model = copy.deepcopy(eager)
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for i in range(3):
            for m, run in ((model, compiled), (eager, eager)):
                m.zero_grad()
                run(x + i).square().sum().backward()
            found, expected = ({n: p.grad for n, p in m.named_parameters()} for m in (model, eager))
            assert distance(found, expected) <= 1e-3 * sum(g.square().sum() for g in expected.values()).sqrt()
