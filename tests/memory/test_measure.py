"""Memory is the product: saved bytes of whole models, at full size without allocating them."""

import pytest
import timm
import torch
import torch.nn.functional as F
from torch._subclasses import FakeTensorMode

import torchsbp

from .counting import SavedBytes
from .families import FAMILIES, images


def saved_bytes(name: str, batch: int, **options) -> int:
    """Of a bf16 autocast step at 224², counted on fake tensors; no options: the unpatched model."""
    with torch.device("meta"):
        model = timm.create_model(name)
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = model.to_empty(device="cpu").train()
        if options:
            torchsbp.apply(model, **options)
        x, labels = torch.empty(batch, 3, 224, 224), torch.zeros(batch, dtype=torch.long)
        with torch.autocast("cpu", torch.bfloat16), SavedBytes(model) as saved:
            F.cross_entropy(model(x), labels)
    return saved.total


@pytest.mark.parametrize(
    "name, batch, bound",
    [("vit_base_patch16_224", 64, 0.20), ("convnext_tiny", 128, 0.30)],
)
def test_saved_bytes_of_the_default_preset(name, batch, bound):
    assert saved_bytes(name, batch, keep_ratio=0.5) <= bound * saved_bytes(name, batch)


def test_saved_bytes_of_a_vit_block_by_formula():
    """Per block: x in bf16 (all rows), attention output in bf16 and log-sum-exp in float32 (kept rows)."""
    batch, n, c, heads = 64, 197, 768, 12
    fewer = saved_bytes("vit_base_patch16_224", batch, keep_ratio=0.25)
    more = saved_bytes("vit_base_patch16_224", batch, keep_ratio=0.75)
    per_row = 2 * c + 4 * heads
    blocks, rows, index = 8, batch * (147 - 49), 8
    assert more - fewer == rows * (blocks * per_row + index)
    exact = saved_bytes("vit_base_patch16_224", batch, keep_ratio=1.0)
    block = batch * n * (2 * c + per_row)
    assert exact - fewer == 8 * batch * (n - 50) * per_row - batch * 50 * index
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
    model = torchsbp.apply(FAMILIES["vit"].model().float(), keep_ratio=0.5, attention="qkv", blocks=[1])
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
    model = torchsbp.apply(FAMILIES["vit"].model(), keep_ratio=0.5)
    model.requires_grad_(False)
    model.head.requires_grad_(True)
    x = images()
    with SavedBytes(model, x) as saved:
        model(x)
    assert saved.total == 3 * 25 * 24 * 8  # the head's input, a view of the last norm's output
