"""timm's further families: which blocks are sampled, what is saved, how they compose, what is refused."""

import pytest
import timm
import torch
from torch import Tensor, nn

import torchsbp
from torchsbp.errors import UsageError

from ..counting import SavedBytes
from ..models import MODELS, PYRAMIDS, VITS
from ..steps import check_compiled, check_copies, check_left_as_it_was, sampled_in

FAMILIES = VITS | PYRAMIDS
ONE_OF_EACH = ["cait", "convit", "hiera", "hieradet", "sam", "caformer", "mambaout"]


def saved(model: nn.Module, x: Tensor) -> int:
    with SavedBytes(model, x) as count:
        model(x)
    return count.total


@pytest.mark.parametrize("name", FAMILIES)
def test_less_is_saved(name):
    model, x = FAMILIES[name].model(drop_path=0.0), FAMILIES[name].images()
    plain = saved(model, x)
    assert saved(torchsbp.apply(model, keep_ratio=0.5), x) < 0.8 * plain


@pytest.mark.parametrize(
    "name, blocks",
    [
        ("convit", ["blocks.1", "blocks.2"]),  # the last of four has a class token
        ("hiera", ["blocks.0", "blocks.1", "blocks.3", "blocks.5"]),  # the first of a stage pools
        ("hieradet", ["blocks.0", "blocks.1", "blocks.4"]),
        ("caformer", ["stages.0.blocks.0", "stages.1.blocks.0"]),  # then, the residual path is scaled
        ("edgenext", ["stages.0.blocks.0", "stages.1.blocks.0", "stages.2.blocks.0"]),
    ],
)
def test_blocks_that_do_not_fit_stay_as_they_are(name, blocks):
    assert sampled_in(torchsbp.apply(FAMILIES[name].model(), keep_ratio=0.5)) == blocks


@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_copies_train_their_own_weights(name):
    check_copies(torchsbp.apply(FAMILIES[name].model(drop_path=0.5), keep_ratio=0.5), FAMILIES[name].images())


@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_eval_no_grad_and_remove_leave_the_model_as_it_was(name):
    check_left_as_it_was(FAMILIES[name].model(drop_path=0.5), FAMILIES[name].images(), keep_ratio=0.5)


@pytest.mark.parametrize("name, fewer", [("sam", {"depth": 1}), ("mambaout", {"depths": (1, 1, 1, 1)})], ids=str)
def test_compiled(name, fewer):
    model = torchsbp.apply(FAMILIES[name].model(drop_path=0.5, **fewer), keep_ratio=0.5)
    check_compiled(model, FAMILIES[name].images(), "aot_eager", steps=2)


@pytest.mark.parametrize("name", ["poolformer_s12", "poolformerv2_s12"])
def test_norms_of_whole_maps_are_refused(name):
    with torch.device("meta"):
        model = timm.create_model(name)
    with pytest.raises(UsageError, match=r"stages.0.blocks.0: norm1 is timm\.\S+GroupNorm1.*; supported: timm\.") as e:
        torchsbp.apply(model)
    assert "does nothing" not in str(e.value)


def test_a_hook_in_a_block_is_told_where_others_stay_as_they_are():
    model = FAMILIES["caformer"].model()
    model.stages[0].blocks[0].norm2.register_forward_hook(lambda *args: None)
    with pytest.raises(UsageError, match=r"stages.0.blocks.0: norm2 has hooks, which would run twice"):
        torchsbp.apply(model)


def test_patches_of_grids_that_differ_are_refused():
    model = torchsbp.apply(MODELS["naflex"].model(), keep_ratio=0.5)
    coordinates = torch.stack(torch.meshgrid(torch.arange(2), torch.arange(3), indexing="ij"), -1).flatten(0, 1)
    batch = {
        "patches": torch.randn(2, 6, 192, dtype=torch.float64),
        "patch_coord": coordinates.expand(2, -1, -1),
        "patch_valid": torch.ones(2, 6, dtype=torch.bool),
    }
    with pytest.raises(UsageError, match=r"NaFlexVit was given patches of shape \(2, 6, 192\).*images \[B, C, H, W\]"):
        model(batch)
    model.eval()(batch)
