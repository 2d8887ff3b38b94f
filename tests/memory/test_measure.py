"""Memory is the product: what is measured is what is counted and predicted, also at full size, without allocating."""

from functools import partial

import pytest
import timm
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses import FakeTensorMode

import torchsbp
from torchsbp import SBPConfig
from torchsbp.errors import UsageTimeError
from torchsbp.memory.estimate import checkpoint_blocks
from torchsbp.memory.measure import measure_config

from ..counting import SavedBytes
from ..models import LEAN, images

SHAPE = (3, 3, 64, 96)


def saved_bytes(name: str, batch: int, **options) -> int:
    """Of a bf16 autocast step at 224², besides its images, counted on fake tensors; no options: the unpatched model."""
    with torch.device("meta"):
        model = timm.create_model(name)
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = model.to_empty(device="cpu").train()
        if options:
            torchsbp.apply(model, **options)
        x, labels = torch.empty(batch, 3, 224, 224), torch.zeros(batch, dtype=torch.long)
        with torch.autocast("cpu", torch.bfloat16), SavedBytes(model, x) as saved:
            F.cross_entropy(model(x), labels)
    return saved.total


@pytest.mark.parametrize(
    "name, batch, bound",
    [("vit_base_patch16_224", 64, 0.20), ("convnext_tiny", 128, 0.30)],
)
def test_saved_bytes_of_the_default_preset(name, batch, bound):
    assert saved_bytes(name, batch, keep_ratio=0.5) <= bound * saved_bytes(name, batch)


def test_saved_bytes_of_a_vit_block_by_formula():
    """Per block: x in bf16 (all rows), attention output in bf16, log-sum-exp in float32 and an index (kept rows)."""
    batch, n, c, heads = 64, 197, 768, 12
    fewer = saved_bytes("vit_base_patch16_224", batch, keep_ratio=0.25)
    more = saved_bytes("vit_base_patch16_224", batch, keep_ratio=0.75)
    per_row = 2 * c + 4 * heads
    blocks, rows, index = 8, batch * (147 - 49), 8
    assert more - fewer == blocks * rows * (per_row + index)
    exact = saved_bytes("vit_base_patch16_224", batch, keep_ratio=1.0)
    block = batch * n * (2 * c + per_row)
    assert exact - fewer == blocks * batch * ((n - 50) * per_row - 50 * index)
    assert 12 * block < exact < 12 * block + 2**26


def test_recompute_is_a_dial_over_blocks():
    """Of 12 blocks the first ones recompute; the others save x in float32, Q, K, V and the hidden layer as well."""
    batch, n, c = 64, 197, 768
    more = batch * n * (2 * c + 2 * 3 * c + 2 * 4 * c)
    least, half, most = (
        saved_bytes("vit_base_patch16_224", batch, keep_ratio=1.0, recompute=share) for share in (True, 0.5, False)
    )
    assert half - least == 6 * more
    assert most - least == 12 * more


def test_real_tensors_save_what_fake_ones_do():
    """The formula above, on a real model at small size, kept rows only."""
    model = torchsbp.apply(LEAN["vit"].model().float(), keep_ratio=0.5, attention="qkv", blocks=[1])
    x = images().float()
    with SavedBytes(model, x) as half:
        model(x)
    torchsbp.remove(model)
    torchsbp.apply(model, keep_ratio=0.25, attention="qkv", blocks=[1])
    with SavedBytes(model, x) as quarter:
        model(x)
    rows, c, heads = 3 * (13 - 7), 24, 3
    assert half.total - quarter.total == rows * (4 * (c + c + heads) + 8)


def test_nothing_is_saved_for_a_frozen_branch():
    """With everything before and in a block frozen, its backward does not exist."""
    model = torchsbp.apply(LEAN["vit"].model(), keep_ratio=0.5)
    model.requires_grad_(False)
    model.head.requires_grad_(True)
    x = images()
    with SavedBytes(model, x) as saved:
        model(x)
    assert saved.total == 3 * 25 * 24 * 8  # the head's input, a view of the last norm's output


def test_measured_on_cpu_is_what_is_counted_and_predicted():
    model, x = torchsbp.apply(LEAN["vit"].model().float(), keep_ratio=0.5), images().float()

    def step() -> None:
        F.cross_entropy(model(x), torch.zeros(3, dtype=torch.long)).backward()

    found = torchsbp.measure(model, step)
    predicted = torchsbp.estimate(model, SHAPE, precision="float32", device="cpu")
    assert found.saved == predicted.saved
    assert found.saved_bytes == predicted.saved_bytes + x.nbytes  # which is saved by the patch embedding
    assert (found.peak, found.reserved) == (None, None)
    assert str(found).startswith("measured on cpu")
    assert model.head.weight.grad is not None


@pytest.mark.parametrize("config", ["checkpoint", SBPConfig(keep_ratio=0.5)], ids=["checkpoint", "run again"])
def test_what_backward_computes_again_is_not_counted_as_saved(config):
    def build() -> nn.Module:
        return timm.create_model("eva02_tiny_patch14_224", depth=3, img_size=56)

    found = measure_config(build, (2, 3, 56, 56), config, "float32", device="cpu")
    assert found.saved == torchsbp.estimate(build, (2, 3, 56, 56), config, "float32", device="cpu").saved


def test_a_forward_that_checkpointing_stops_early_has_ended():
    """So that what a loss saves behind a second one in the same step is not counted to a block."""
    model = checkpoint_blocks(timm.create_model("vit_tiny_patch16_224", depth=2, img_size=32))

    def step(times: int) -> None:
        for _ in range(times):
            F.cross_entropy(model(torch.ones(2, 3, 32, 32)), torch.tensor([0, 1])).backward()

    once, twice = (torchsbp.measure(model, partial(step, times)) for times in (1, 2))
    assert twice.saved == {name: 2 * size for name, size in once.saved.items()}
    assert twice.saved_elsewhere == 2 * once.saved_elsewhere


def test_a_prediction_can_be_measured():
    """On CPU, what is saved."""
    config = SBPConfig(keep_ratio=0.5)
    found = measure_config(LEAN["vit"].build, SHAPE, config, "float32", "momentum", device="cpu")
    assert found.saved == torchsbp.estimate(LEAN["vit"].build, SHAPE, config, "float32", device="cpu").saved


@pytest.mark.parametrize("gradients", [False, True])
def test_a_step_that_trains_nothing_is_no_measurement(gradients):
    model = nn.Linear(2, 2)

    def step() -> None:
        if not gradients:
            with torch.no_grad():
                model(torch.ones(1, 2))

    with pytest.raises(UsageTimeError, match=r"step\(\) saved nothing for backward: it must run a forward pass"):
        torchsbp.measure(model, step)
