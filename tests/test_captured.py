"""Training with backward passes that are replayed from graphs: the gradients of training without, in every way."""

import copy

import pytest
import torch

import torchsbp
from torchsbp.ops import graphs

from .models import LEAN, images
from .steps import assert_gradients

pytestmark = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def models(name: str, checkpointed: bool):
    wider = {"embed_dim": 96} if name.startswith("vit") else {}
    for seed in range(2):
        torch.manual_seed(seed)
        model = torchsbp.apply(LEAN[name].model(**wider).float().cuda(), keep_ratio=0.5, sampler="random")
        if checkpointed:
            model.set_grad_checkpointing()
        yield model


def steps(pair, way: str) -> list[dict[str, torch.Tensor]]:
    """Gradients of both models after each of five steps."""
    found = []
    x = images().float().cuda()
    for number in range(5):
        torch.manual_seed(number)  # of stochastic depth
        for model in pair:
            model.zero_grad(set_to_none=True)
        with torch.autocast("cuda", torch.bfloat16):
            losses = [model(x + number).float().square().sum() for model in pair]
            if way == "accumulated":
                losses += [model(x - number).float().square().sum() for model in pair]
        for loss in losses:
            loss.backward(retain_graph=way == "twice")
            if way == "twice":
                loss.backward()
        found += [{n: p.grad.clone() for n, p in model.named_parameters()} for model in pair]
    return found


@pytest.mark.parametrize("way", ["plain", "accumulated", "twice", "checkpointed", "one thread"])
@pytest.mark.parametrize("name", ["vit", "vit layer scale, drop path", "convnext"])
def test_two_models_have_the_gradients_that_they_have_without_graphs(name, way, monkeypatch):
    pair = list(models(name, way == "checkpointed"))
    expected_of = copy.deepcopy(pair)
    with torch.autograd.set_multithreading_enabled(way != "one thread"):
        found = steps(pair, way)
        assert any(isinstance(graph, graphs.Graph) for graph in graphs._GRAPHS.values())
        monkeypatch.setattr(graphs, "LARGEST", 0)
        for ours, theirs in zip(found, steps(expected_of, way), strict=True):
            assert_gradients(ours, theirs, rtol=1e-3)


def test_memory_grows_with_the_batch(monkeypatch):
    """Graphs that were there are captured anew in larger memory: none of them reads what another has left."""
    (model, _), x = models("vit", False), images().float().cuda()
    plain = copy.deepcopy(model)
    sizes = []
    for batch in (1, 1, 1, 3, 3, 3, 1, 1, 1, 3):
        found = []
        for its, largest in ((model, graphs.LARGEST), (plain, 0)):
            monkeypatch.setattr(graphs, "LARGEST", largest)
            its.zero_grad(set_to_none=True)
            with torch.autocast("cuda", torch.bfloat16):
                its(x[:1].expand(batch, -1, -1, -1)).float().square().sum().backward()
            found.append({n: p.grad.clone() for n, p in its.named_parameters()})
            monkeypatch.undo()
        assert_gradients(*found, rtol=1e-3)
        sizes += [pool.size for pool in graphs._POOLS.values()]
    assert sizes == sorted(sizes)
