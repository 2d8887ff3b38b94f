"""The largest batch that fits: the next larger one does not, and what is measured decides."""

from functools import partial

import pytest
import timm
import torch
import torchvision

from torchsbp import SBPConfig, estimate
from torchsbp.memory.largest import Largest, largest, on_gpu, usual
from torchsbp.memory.sizes import MIB

SHAPE = (4, 3, 160, 160)
USABLE = 300 * MIB

build = partial(timm.create_model, "test_vit", depth=2)


@pytest.fixture(scope="module")
def model() -> torch.nn.Module:
    with torch.device("meta"):
        return build()


def test_one_more_does_not_fit(model):
    for config in ("full", SBPConfig(0.5)):
        found = largest(model, SHAPE, USABLE, config, "bf16", "adamw")
        assert found.batch > 1
        assert found.predicted == estimate(model, (found.batch, *SHAPE[1:]), config).peak <= USABLE
        assert estimate(model, (found.batch + 1, *SHAPE[1:]), config).peak > USABLE
        assert found.measured is None


def test_what_is_measured_decides(model):
    """Here a GPU that needs a quarter more than was predicted, and has no memory at all for the first batch."""
    predicted = largest(model, SHAPE, USABLE, "full", "bf16", "adamw").batch
    asked: list[int] = []

    def measure(batch, config):
        asked.append(batch)
        return None if batch == predicted else int(1.25 * estimate(model, (batch, *SHAPE[1:]), config).peak)

    found = largest(model, SHAPE, USABLE, "full", "bf16", "adamw", measure)
    assert asked[0] == predicted
    assert asked == sorted(asked, reverse=True)
    assert found.batch == asked[-1] < predicted
    assert found.measured == measure(found.batch, "full") <= USABLE
    assert all(measure(batch, "full") is None or measure(batch, "full") > USABLE for batch in asked[:-2])


def test_nothing_may_fit(model):
    assert largest(model, SHAPE, MIB, "full", "bf16", "adamw") == Largest(
        "full", 0, estimate(model, (1, *SHAPE[1:]), "full").peak, None
    )
    assert largest(model, SHAPE, USABLE, "full", "bf16", "adamw", lambda batch, config: None).batch == 0


def test_a_model_that_is_not_covered_can_only_be_checkpointed_if_it_has_blocks(model):
    assert usual(model) == ["full", SBPConfig(1.0), "checkpoint", SBPConfig(0.5), SBPConfig(0.5, blocks=1.0)]
    assert usual(torchvision.models.resnet18()) == ["full", "checkpoint"]
    assert usual(torch.nn.Linear(2, 2)) == ["full"]


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_the_batch_that_is_found_fits(model):
    measure = on_gpu(build, SHAPE, "bf16", "adamw")
    found = largest(model, SHAPE, USABLE, SBPConfig(0.5), "bf16", "adamw", measure)
    assert found.batch > 0
    assert found.measured <= USABLE
