"""Rows that are chosen in backward, in whole models."""

import copy
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.utils.checkpoint

import torchsbp
from torchsbp import SBPConfig
from torchsbp.errors import UsageError
from torchsbp.patching.entry import entries
from torchsbp.sampling.schedules import Milestones

from ..counting import SavedBytes
from ..models import GROUPED, MODELS
from ..oracle import check_definition, check_rule
from ..steps import FAULTS_OF_TORCH_2_11, assert_gradients, check_compiled, check_copies, check_left_as_it_was, step

NORM = SBPConfig(0.5, sampler="norm")
CHOOSING = [
    *(name for name, tiny in MODELS.items() if tiny.kind == "lean"),
    "eva", "eva02", "eva02, inner norm", "eva post norm", "dinov3", "mixed rope", "gated rope", "swiglu", "post norm",
    "beit", "beit shared bias", "relative class token", "relative post norm", "coatnet mixed stages", "maxvit",
    "torchvision maxvit", "swin", "swin, padded", "swin v2, padded", "swin CR, padded, norms", "torchvision swin v2",
    "torchvision swin, padded", "transformers swin, padded", "video swin", "video swin, padded", "hieradet", "edgenext",
]  # fmt: skip
RUN_AGAIN = [
    *(["dinov3 split qkv"] if GROUPED else []),
    "differential attention", "parallel", "one piece", "vit, own norm", "mixer", "resmlp", "coatnet", "convnext v2",
    "convnext simple norm", "swin, own norm", "video swin, own norm", "sam", "cait", "hiera", "gcvit", "volo", "mvit",
    "caformer", "focalnet", "mambaout",
]  # fmt: skip


@pytest.mark.parametrize("name", CHOOSING)
def test_gradients_are_those_of_the_twin_whose_gates_choose(name):
    tiny = MODELS[name]
    check_definition(tiny.model(), NORM, tiny.images())


@pytest.mark.parametrize("name", RUN_AGAIN)
def test_blocks_that_are_run_again_are_refused(name):
    model = MODELS[name].model()
    with pytest.raises(
        UsageError, match=r"can't choose positions in backward.* Use another sampler: \['grid', 'random'"
    ):
        torchsbp.apply(model, config=NORM)
    torchsbp.apply(model, 1.0, sampler="norm")  # nothing was changed, and nothing is chosen


@pytest.mark.parametrize("ratio", [(1.0, 1.0), Milestones(((0, 1.0),))])
def test_where_nothing_is_ever_chosen_blocks_need_not_choose(ratio):
    torchsbp.apply(MODELS["cait"].model(), ratio, sampler="norm")


@pytest.mark.parametrize("changes", [{"recompute": False}, {"blocks": 1.0}, {"keep_ratio": (0.75, 0.25)}], ids=str)
@pytest.mark.parametrize("name", ["vit", "convnext"])
def test_with_other_options(name, changes):
    tiny = MODELS[name]
    check_definition(tiny.model(), replace(NORM, **changes), tiny.images())


@pytest.mark.parametrize("name", ["vit", "transformers vit", "eva02"])
def test_of_the_mlp_alone(name):
    tiny = MODELS[name]
    check_rule(tiny.model(), replace(NORM, attention="exact"), tiny.images())


@pytest.mark.parametrize("name", ["vit", "convnext"])
def test_copies_remove_and_no_grad(name):
    tiny = MODELS[name]
    check_left_as_it_was(tiny.model(), tiny.images(), config=NORM)
    check_copies(torchsbp.apply(tiny.model(), config=NORM), tiny.images())


@pytest.mark.parametrize(
    "name, options, capture",
    [("vit", {"depth": 2}, True), ("vit", {"depth": 2}, False), ("convnext", {"depths": (1, 1, 1, 1)}, True)],
)
def test_compiled_steps_choose_as_eager_ones_do(name, options, capture):
    """Without ``capture`` the compiler sees how marks are drawn: it may not draw those of the next step in backward."""
    model = torchsbp.apply(MODELS[name].model(**options), config=replace(NORM, capture=capture))
    check_compiled(model, MODELS[name].images(), "aot_eager_decomp_partition", 3)


@FAULTS_OF_TORCH_2_11
def test_inductor():
    tiny = MODELS["vit"]
    check_compiled(torchsbp.apply(tiny.model(depth=2), config=NORM), tiny.images(), "inductor", 2)


@pytest.mark.parametrize("recompute", [True, False])
@pytest.mark.parametrize("name", ["vit", "convnext"])
def test_saved_is_what_exact_gradients_save_and_the_marks(name, recompute):
    tiny, saved = MODELS[name], []
    x = tiny.images()
    for config in (SBPConfig(1.0, recompute=recompute), replace(NORM, recompute=recompute)):
        model = torchsbp.apply(tiny.model(), config=config)
        with SavedBytes(model, x) as found:
            model(x)
        saved.append(found.total)
    marks = [site.marks for entry, _ in entries(model) for site in entry.masks.drawn.sites if site.marks is not None]
    assert saved[1] == saved[0] + sum(8 * its.numel() for its in marks)


@pytest.mark.parametrize("name", ["vit", "convnext"])
def test_draws_follow_from_the_step_and_samples_have_their_own(name):
    tiny = MODELS[name]
    model = torchsbp.apply(tiny.model(), config=NORM)
    first, second = (copy.deepcopy(step(model, tiny.images())[1]) for _ in range(2))
    marks = [site.marks for entry, _ in entries(model) for site in entry.masks.drawn.sites if site.marks is not None]
    starts = torch.cat([1 - its[:, 0] for its in marks])
    assert len(starts.unique()) == len(starts) == 2 * len(marks)
    assert float(starts.min()) > 0
    assert float(starts.max()) < 1
    torchsbp.set_step(model, 0)
    assert_gradients(step(model, tiny.images())[1], first, rtol=0)
    assert any(not torch.equal(first[parameter], g) for parameter, g in second.items())


def test_a_repeated_forward_of_checkpointing_chooses_the_same():
    tiny = MODELS["vit"]
    model = torchsbp.apply(tiny.model(), config=NORM)
    expected = copy.deepcopy(step(model, tiny.images())[1])
    torchsbp.set_step(model, 0)
    run = partial(torch.utils.checkpoint.checkpoint, model, use_reentrant=False)
    assert_gradients(step(model, tiny.images(), run)[1], expected, rtol=1e-12)


def test_check_knows_them_and_kept_says_that_they_are_not_held():
    tiny = MODELS["vit"]
    model = torchsbp.apply(tiny.model(), config=NORM)
    assert torchsbp.check(model, tiny.images()).passed
    step(model, tiny.images())
    with pytest.raises(UsageError, match=r'blocks.1: sampler="norm" chooses positions in backward'):
        torchsbp.kept(model)


def test_frames_are_not_chosen_in_backward():
    message = r"sampler='norm' chooses in backward, when every frame has been encoded; allowed here: 'random', 'st"
    with pytest.raises(UsageError, match=message):
        torchsbp.sbp_frames(torch.nn.Flatten(2), torch.randn(1, 4, 3, 8, 8), 0.5, sampler="norm", step=0)
