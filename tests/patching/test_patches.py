"""Convolutions that cut patches: found by what they are, exact, nothing of them changed but their backward."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

import torchsbp
from torchsbp import SBPConfig
from torchsbp.ops import patches as ops
from torchsbp.patching import patches
from torchsbp.patching.patches import PatchEmbedding, cuts_patches
from torchsbp.patching.site import Site, patched_modules

from ..counting import SavedBytes, counting_backend
from ..models import LEAN, MODELS, Tiny, images
from ..oracle import check_definition
from ..steps import assert_gradients, check_compiled, check_copies, check_left_as_it_was, loss_of, step

STEMS = {
    "vit": "patch_embed.proj",
    "convnext": "stem.0",
    "swin, padded": "patch_embed.proj",
    "video swin": "patch_embed.proj",
    "torchvision vit": "conv_proj",  # the entry itself
    "torchvision swin": "features.0.0",
    "transformers siglip": "vision_model.embeddings.patch_embedding",  # padding="valid"
    "transformers videomae": "videomae.embeddings.patch_embeddings.projection",
    "transformers convnext": "convnext.embeddings.patch_embeddings",
    "vit_tiny_r_s16_p8_224": "patch_embed.proj",  # behind a ResNet
}


@pytest.fixture
def calls(monkeypatch) -> list[torch.Size]:
    """The shapes of weights with which the op is called."""
    found: list[torch.Size] = []

    def counted(x, weight, *others):
        found.append(weight.shape)
        return ops.patch_embedding(x, weight, *others)

    monkeypatch.setattr(patches, "patch_embedding", counted)
    return found


@pytest.mark.parametrize("name", STEMS)
def test_the_stem_is_found_and_its_gradients_equal_the_oracle(name, calls):
    tiny = MODELS[name]
    model = tiny.bare()
    weight = model.get_submodule(STEMS[name]).weight.shape
    scores, x = tiny.model(), tiny.images()
    check_definition(scores, SBPConfig(keep_ratio=0.5), x)
    assert calls == [weight]
    step(scores.eval(), x)
    with torch.no_grad():
        scores.train()(x)
    assert calls == [weight]


@pytest.mark.parametrize("name, fewer", [("vit", {"depth": 1}), ("torchvision vit", {"num_layers": 1})])
def test_compiled_there_is_no_convolution(name, fewer):
    """Full graph, no recompilation, the gradients of eager mode."""
    backend, convolutions = counting_backend((torch.ops.aten.convolution.default,))
    model = torchsbp.apply(MODELS[name].model(**fewer), keep_ratio=0.5)
    check_compiled(model, MODELS[name].images(), backend, steps=2)
    assert convolutions == [0]


def test_an_entry_that_cuts_patches_itself_is_copied_and_removed():
    tiny = MODELS["torchvision vit"]
    check_left_as_it_was(tiny.model(), tiny.images(), keep_ratio=0.5)
    check_copies(torchsbp.apply(tiny.model(), keep_ratio=0.5), tiny.images())


@pytest.mark.parametrize("name", ["maxvit", "convnext simple norm, overlapping stem"])
def test_patches_that_overlap_are_left_alone(name):
    model = torchsbp.apply(MODELS[name].model(), keep_ratio=0.5)
    assert not any(isinstance(site.sbp, PatchEmbedding) for _, site in patched_modules(model))


@pytest.mark.parametrize(
    "conv, cuts",
    [
        (nn.Conv2d(3, 4, 2, 2), True),
        (nn.Conv2d(3, 4, (2, 4), (2, 4), padding="valid", bias=False), True),
        (nn.Conv3d(3, 4, (1, 2, 2), (1, 2, 2)), True),
        (nn.Conv2d(3, 4, 1), False),
        (nn.Conv2d(3, 4, 2), False),
        (nn.Conv2d(3, 4, 2, 3), False),
        (nn.Conv2d(4, 4, 2, 2, groups=2), False),
        (nn.Conv2d(3, 4, 2, 2, padding=1), False),
        (nn.Conv2d(3, 4, 2, 2, dilation=2), False),
        (nn.Conv1d(3, 4, 2, 2), False),
        (nn.ConvTranspose2d(3, 4, 2, 2), False),
        (parametrizations.weight_norm(nn.Conv2d(3, 4, 2, 2)), False),
        (nn.MaxPool2d(2), False),
    ],
    ids=str,
)
def test_what_cuts_patches(conv, cuts):
    assert cuts_patches(conv) == cuts


def test_blocks_and_layers_between_stages_are_not_looked_into():
    model = torchsbp.apply(MODELS["convnext simple norm"].model(), keep_ratio=0.5)
    assert [name for name, site in patched_modules(model) if isinstance(site.sbp, PatchEmbedding)] == ["stem.0"]
    assert any(cuts_patches(m) for stage in model.stages for m in stage.downsample.modules())


@pytest.mark.parametrize("name", ["vit", "convnext", "swin", "torchvision vit"])
def test_images_are_saved_by_no_copy(name):
    """Of a batch that the caller holds nothing is saved, in the precision of products neither."""
    tiny = MODELS[name]
    assert saved_by_stem(tiny) == 0
    assert saved_by_stem(tiny, patched=False) > 2 * tiny.images().numel()


@pytest.mark.parametrize("name", ["video swin", "transformers siglip"])
def test_what_may_be_held_by_nobody_else_is_saved_as_by_the_convolution(name):
    """torchvision pads clips, by a copy also where nothing is to be padded; in transformers a larger model has the
    backbone, as a detector has, which normalises images first."""
    tiny = MODELS[name]
    assert saved_by_stem(tiny) == 2 * tiny.images().numel()


def saved_by_stem(tiny: Tiny, patched: bool = True) -> int:
    """Bytes that the convolution saves under autocast, besides parameters and the images."""
    model, x = tiny.model().float(), tiny.images().float()
    if patched:
        torchsbp.apply(model, keep_ratio=0.5)
    conv = next(m for m in model.modules() if cuts_patches(m))
    counted = SavedBytes(model, x)

    def begin(*_: object) -> None:
        counted.__enter__()

    def end(*_: object) -> None:
        counted.__exit__()

    conv.register_forward_pre_hook(begin)
    conv.register_forward_hook(end)
    with torch.autocast("cpu", torch.bfloat16):
        model(x)
    return counted.total


def test_frozen_it_is_the_convolution(calls):
    model = torchsbp.apply(LEAN["vit"].model(), keep_ratio=0.5)
    model.patch_embed.requires_grad_(False)
    step(model, images())
    assert calls == []
    model.patch_embed.proj.bias.requires_grad_()
    _, found = step(model, images())
    assert len(calls) == 1
    assert "patch_embed.proj.bias" in found
    assert "patch_embed.proj.weight" not in found


def test_gradients_reach_images():
    plain = LEAN["convnext"].model()
    model, found = torchsbp.apply(copy.deepcopy(plain), keep_ratio=1.0), []
    for its in (plain, model):
        x = images(size=(65, 99)).requires_grad_()
        loss_of(its(x)).backward()
        found.append(x.grad)
    torch.testing.assert_close(*found, rtol=1e-9, atol=1e-12)
    assert not found[1][..., 64:, :].any()


@pytest.mark.parametrize("name", ["vit", "torchvision vit"])
def test_lora_on_it_equals_the_oracle_in_either_order(name):
    """peft makes the adapters of the convolution's class: that of a patched one."""
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=3, target_modules=STEMS[name], init_lora_weights=False)

    def adapted(model: nn.Module) -> nn.Module:
        torch.manual_seed(0)
        return peft.get_peft_model(model, config)

    x = MODELS[name].images()
    found = check_definition(adapted(MODELS[name].model()), SBPConfig(keep_ratio=0.5), x)[1]
    model = adapted(torchsbp.apply(MODELS[name].model(), keep_ratio=0.5))
    _, before = step(model, x)
    assert_gradients(before, found)
    torchsbp.remove(model)
    assert not any(isinstance(m, Site) for m in model.modules())


def test_hooks_run():
    model = torchsbp.apply(LEAN["vit"].model(), keep_ratio=0.5)
    seen = []
    model.patch_embed.proj.register_forward_hook(lambda module, args, y: seen.append(y.shape[1]))
    model.patch_embed.proj.register_full_backward_hook(lambda module, dx, dy: seen.append(dy[0].shape[1]))
    step(model, images().requires_grad_())
    assert seen == [24, 24]


@pytest.mark.parametrize("change", ["stride", "padding", "parametrization"])
def test_what_it_has_become_since_is_what_runs(change, calls):
    """A convolution whose patches overlap; one whose weight is made of others."""
    plain = LEAN["convnext"].model()
    model = torchsbp.apply(copy.deepcopy(plain), keep_ratio=1.0)
    for conv in (plain.stem[0], model.stem[0]):
        if change == "stride":
            conv.stride = (3, 3)
        elif change == "padding":
            conv.padding = (2, 2)
        else:
            parametrizations.weight_norm(conv)
    (_, expected), (_, found) = (step(its.train(), images()) for its in (plain, model))
    assert_gradients(found, expected)
    assert calls == []
