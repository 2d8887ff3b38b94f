"""Every model of the table on a GPU: gradients of the gated twin in float64, mixed precision as close as plain,
compiled as eager."""

import copy

import pytest
import torch
import torch._dynamo

import torchsbp
from torchsbp import SBPConfig

from .models import MODELS, QUERY
from .oracle import check_definition, check_rule
from .steps import distance, gradients_of, step

pytestmark = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

COMPILED = ["eva02", "beit", "mixer", "coatnet", "convnext v2", "swin"]


@pytest.mark.parametrize("name", MODELS)
def test_gradients_equal_the_oracle(name):
    tiny = MODELS[name]
    check_definition(tiny.model().cuda(), SBPConfig(keep_ratio=0.5), tiny.images().cuda())


@pytest.mark.parametrize(
    "name, rule", [(name, rule) for name, tiny in MODELS.items() for rule in tiny.rules if tiny.rules != QUERY]
)
def test_rules_equal_the_oracle(name, rule):
    tiny = MODELS[name]
    check_rule(tiny.model(drop_path=0.5).cuda(), SBPConfig(keep_ratio=0.5, attention=rule), tiny.images().cuda())


@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")  # of rms_norm, plain or not
@pytest.mark.parametrize("name", MODELS)
def test_mixed_precision_is_as_close_as_plain(name):
    plain, x = MODELS[name].model().float().cuda(), MODELS[name].images().float().cuda()
    model = torchsbp.apply(copy.deepcopy(plain), keep_ratio=1.0)
    exact_y, exact = step(plain, x)
    with torch.autocast("cuda", torch.bfloat16):
        (y, found), (expected_y, expected) = step(model, x), step(plain, x)
    assert (y - expected_y).norm() <= 2 * (expected_y - exact_y).norm()
    assert distance(found, exact) <= 2 * distance(expected, exact)


@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores")  # Inductor's, on what is not enabled here
@pytest.mark.parametrize("name", COMPILED)
def test_compiled_gradients_are_those_of_eager(name):
    eager, x = MODELS[name].model().float().cuda(), MODELS[name].images().float().cuda()
    torchsbp.apply(eager, keep_ratio=0.5)
    model = copy.deepcopy(eager)
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for i in range(3):
            for m, run in ((model, compiled), (eager, eager)):
                m.zero_grad()
                run(x + i).square().sum().backward()
            found, expected = gradients_of(model), gradients_of(eager)
            assert distance(found, expected) <= 1e-3 * sum(g.square().sum() for g in expected.values()).sqrt()
