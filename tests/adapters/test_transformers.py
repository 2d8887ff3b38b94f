"""Hugging Face models: where backbones are found, and the library's own ways of calling, training and saving."""

import copy
import sys

import pytest
import torch
import transformers
from torch import Tensor, nn

import torchsbp
from torchsbp import SBPConfig
from torchsbp.adapters import find_backbones
from torchsbp.errors import UsageError
from torchsbp.patching.site import Site

from ..counting import SavedBytes
from ..models import (
    CONVNEXT,
    DINOV2,
    LAYERS,
    MODELS,
    TOWER,
    TRANSFORMERS,
    VIDEOMAE,
    VIT,
    VJEPA2,
    Scores,
    transformers_model,
)
from ..oracle import check_definition
from ..steps import (
    GRID,
    assert_gradients,
    check_compiled,
    check_copies,
    check_left_as_it_was,
    distance,
    entry_of,
    gradients_of,
    step,
)

FAMILIES = {name.removeprefix("transformers "): tiny for name, tiny in TRANSFORMERS.items()}


@pytest.fixture(params=FAMILIES)
def family(request) -> str:
    return request.param


def model_of(family: str, **options) -> nn.Module:
    return FAMILIES[family].bare(drop_path=0.5, **options)


def pixels(family: str = "vit", batch: int = 2, size: tuple[int, int] = (64, 64)) -> Tensor:
    return FAMILIES[family].images(batch, size)


@pytest.mark.parametrize("sampler", ["grid", "random", "frames", "frames_jitter", "checkerboard"])
@pytest.mark.parametrize("name", ["videomae", "vjepa2"])
def test_samplers_of_video(name, sampler):
    model = Scores(model_of(name))
    check_definition(model, SBPConfig(keep_ratio=0.5, sampler=sampler), pixels(name))
    for positions in torchsbp.kept(model).values():
        kept = torch.zeros(2 * 4 * 4).index_fill(0, positions[0], 1).view(2, 4, 4)
        assert kept.sum() == 16
        if sampler == "grid":
            assert torch.equal(kept[0], kept[1])
        if sampler.startswith("frames"):
            assert sorted(kept.mean((1, 2)).tolist()) == [0, 1]


@pytest.mark.parametrize("name, prefix", [("vit", 1), ("deit", 2), ("dinov2 with registers", 3), ("siglip", 0)])
def test_class_and_register_tokens_are_always_kept(name, prefix):
    model = torchsbp.apply(Scores(model_of(name)), keep_ratio=0.25)
    step(model, pixels())
    for positions in torchsbp.kept(model).values():
        assert positions.shape == (2, prefix + 4)
        assert positions[:, :prefix].tolist() == [list(range(prefix))] * 2


@pytest.mark.parametrize("name", ["vit", "dinov2", "clip", "siglip"])
def test_images_of_other_sizes(name):
    arguments = {} if name.startswith("dinov2") else {"interpolate_pos_encoding": True}
    model = Scores(model_of(name), **arguments)
    for size in ((64, 96), (96, 64), (64, 64)):
        check_definition(copy.deepcopy(model), SBPConfig(0.5), pixels(size=size))


def test_masked_image_modeling():
    """Mask tokens take the places of patches: positions stay what they are."""
    model = transformers_model("ViTForMaskedImageModeling", **VIT, encoder_stride=16)
    hidden = torch.arange(16).expand(2, 16) % 3 == 0
    check_definition(Scores(model, bool_masked_pos=hidden, return_dict=False), SBPConfig(0.5), pixels())


def test_eval_no_grad_and_remove_leave_the_model_as_it_was(family):
    check_left_as_it_was(Scores(model_of(family)), pixels(family), keep_ratio=0.5)


def test_copies_train_their_own_weights(family):
    check_copies(torchsbp.apply(Scores(model_of(family)), keep_ratio=0.5), pixels(family))


def test_save_and_load(family, tmp_path):
    """A patched model saves as a plain one, which is patched and trains like it."""
    model = torchsbp.apply(model_of(family).float(), keep_ratio=0.5)
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path).train()
    state, expected = loaded.state_dict(), model.state_dict()
    assert state.keys() == expected.keys()
    assert all(torch.equal(state[name], value) for name, value in expected.items())
    torchsbp.apply(loaded, keep_ratio=0.5)
    assert_gradients(*(step(Scores(each).double(), pixels(family))[1] for each in (loaded, model)))


def test_a_trainers_step(family):
    """Called with labels and the number of items, as transformers.Trainer does; at ratio 1 the weights are plain's."""
    plain = model_of(family)
    model = torchsbp.apply(copy.deepcopy(plain), keep_ratio=1.0)
    batch = {plain.main_input_name: pixels(family), "labels": torch.tensor([1, 3])}
    if getattr(type(plain), "accepts_loss_kwargs", True):
        batch["num_items_in_batch"] = torch.tensor(2)
    for each in (plain, model):
        optimizer = torch.optim.SGD(each.parameters(), lr=0.1)
        torch.manual_seed(0)
        each(**batch).loss.backward()
        optimizer.step()
    for name, p in model.named_parameters():
        torch.testing.assert_close(p, plain.get_parameter(name), rtol=1e-9, atol=1e-12)


def test_hidden_states_are_given_and_carry_gradients(family):
    """They are recorded by hooks, some of them inside of blocks, that stay: patching and training go on."""
    plain = model_of(family)
    model = torchsbp.apply(copy.deepcopy(plain), keep_ratio=1.0)
    gradients = []
    for each in (plain, model):
        torch.manual_seed(0)
        states = each(pixels(family), output_hidden_states=True).hidden_states
        sum(state.square().sum() for state in states).backward()
        gradients.append(gradients_of(each))
    assert_gradients(gradients[1], gradients[0])
    model.eval().train()
    torchsbp.apply(torchsbp.remove(model))


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("name", [name for name in FAMILIES if name != "convnext"])
def test_gradient_checkpointing_repeats_the_same_masks(name, reentrant):
    model = torchsbp.apply(Scores(model_of(name)), keep_ratio=0.5)
    _, expected = step(model, pixels(name))
    torchsbp.set_step(model, 0)
    its = model.model  # transformers 5.23 has another name for it
    enable = getattr(its, "activation_checkpointing_enable", None) or its.gradient_checkpointing_enable
    enable({"use_reentrant": reentrant})
    assert_gradients(step(model, pixels(name))[1], expected)
    assert entry_of(model).sbp_step == 1


@pytest.mark.parametrize("name", ["vit", "vjepa2", "convnext"])
def test_compiled_gradients_are_those_of_eager(name):
    """Full graph, new masks at every step, no recompilation."""
    release = tuple(int(number) for number in transformers.__version__.split(".")[:2])
    if name == "vit" and (5, 9) <= release < (5, 18):
        pytest.skip("these releases give their ViT an attention mask of ones where they are compiled")
    one = {"num_hidden_layers": 1, "num_pooler_layers": 0}
    fewer = {"vit": {"num_hidden_layers": 2}, "vjepa2": one, "convnext": {"depths": [1, 1, 1, 1]}}[name]
    model = torchsbp.apply(Scores(model_of(name, **fewer)), keep_ratio=0.5, sampler="random")
    check_compiled(model, pixels(name), "aot_eager", steps=3)


def test_autocast_forward_equals_plain_and_gradients_are_as_close(family):
    plain = Scores(model_of(family)).float()
    model = torchsbp.apply(copy.deepcopy(plain), keep_ratio=1.0)
    x = pixels(family).float()
    exact_y, exact = step(plain, x)
    with torch.autocast("cpu", torch.bfloat16):
        y, found = step(model, x)
        expected_y, expected = step(plain, x)
    assert y.dtype == expected_y.dtype
    # Ours scales queries, has a bias, or has stochastic depth as one factor: rounded otherwise, not worse.
    if "eager" in family or family in ("beit", "data2vec", "vjepa2"):
        assert (y - exact_y).norm() <= 2 * (expected_y - exact_y).norm()
    else:
        torch.testing.assert_close(y, expected_y, rtol=0, atol=1e-5)
    assert distance(found, exact) <= 1.5 * distance(expected, exact)


def test_frozen_projections_get_no_gradient_and_the_rest_keeps_its_own():
    model = torchsbp.apply(Scores(model_of("vit")), keep_ratio=0.5)
    _, everything = step(model, pixels())
    torchsbp.set_step(model, 0)
    for name, p in model.named_parameters():
        p.requires_grad_("q_proj" not in name and "query" not in name and "v_proj.bias" not in name)
    _, some = step(model, pixels())
    assert 0 < len(some) < len(everything)
    assert_gradients(some, {name: everything[name] for name in some})


@pytest.mark.parametrize("name", ["vit", "videomae", "convnext"])
def test_estimate_predicts_the_bytes_that_are_saved(name):
    model, config = Scores(model_of(name).float()), SBPConfig(keep_ratio=0.5)
    x = pixels(name, 8).float()
    predicted = torchsbp.estimate(model, x.shape, config, "float32", device="cpu", loss=torch.sum)
    torchsbp.apply(model, config=config)
    with SavedBytes(model, x) as saved:
        model(x).sum()
    assert predicted.saved_bytes == pytest.approx(saved.total, rel=0.01)
    assert predicted.saved_bytes < torchsbp.estimate(model, x.shape, "full", "float32", device="cpu").saved_bytes


TEXT = {"hidden_size": 24, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 3}
PAIR = {**TOWER, "text_config": TEXT, "projection_dim": 16}
WITHIN = {
    "CLIPModel": (PAIR, ["vision_model"]),
    "CLIPVisionModel": (TOWER["vision_config"], [""]),
    "CLIPVisionModelWithProjection": (TOWER["vision_config"], ["vision_model"]),
    "SiglipModel": (PAIR, ["vision_model"]),
    "SiglipVisionModel": (TOWER["vision_config"], [""]),
    "SiglipForImageClassification": (TOWER, ["vision_model"]),
    "ViTModel": (VIT, [""]),
    "DeiTForImageClassificationWithTeacher": (VIT, ["deit"]),
    "Dinov2Model": (DINOV2, [""]),
    "Dinov2Backbone": (DINOV2, [""]),
    "Dinov2WithRegistersBackbone": (DINOV2, [""]),
    "VideoMAEModel": (VIDEOMAE, [""]),
    "VJEPA2Model": (VJEPA2, [""]),
    "ConvNextModel": (CONVNEXT, [""]),
    "ConvNextBackbone": (CONVNEXT, [""]),
}


@pytest.mark.parametrize("cls", WITHIN)
def test_a_backbone_is_found_once_wherever_it_is(cls):
    options, names = WITHIN[cls]
    model = transformers_model(cls, **options)
    assert [name for name, *_ in find_backbones(model)] == names
    torchsbp.apply(model, config=GRID)
    entry = entry_of(model).sbp
    assert entry.prefix == "".join(f"{name}." for name in names if name)
    assert len(entry.sampled) == (6 if cls.startswith("ConvNext") else 2)


def test_clip_trains_with_its_text_tower():
    plain = transformers_model("CLIPModel", **PAIR)
    model = torchsbp.apply(copy.deepcopy(plain), keep_ratio=1.0)
    batch = {"pixel_values": pixels(), "input_ids": torch.arange(10).view(2, 5), "return_loss": True}
    for each in (plain, model):
        each(**batch).loss.backward()
    assert_gradients(gradients_of(model), gradients_of(plain))


@pytest.mark.parametrize("cls", ["Dinov2Backbone", "ConvNextBackbone"])
def test_feature_maps_of_a_backbone(cls):
    plain = transformers_model(cls, **WITHIN[cls][0])
    model = torchsbp.apply(copy.deepcopy(plain), keep_ratio=0.5)
    torch.manual_seed(0)
    expected = plain(pixels()).feature_maps
    torch.manual_seed(0)
    found = model(pixels()).feature_maps
    assert len(found) == len(expected)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    "family, options, message",
    [
        ("vit", {"attention_probs_dropout_prob": 0.1}, r"attention.*drop\w* is 0.1, which is not supported"),
        ("vit", {"hidden_dropout_prob": 0.1}, r"dropout is Dropout\(p=0.1"),
        ("videomae", {"hidden_dropout_prob": 0.1}, r"attention.output.dropout is Dropout(.|\n)*output.dropout is Drop"),
        ("clip", {"vision_config": {**VIT, "attention_dropout": 0.1}}, r"self_attn.dropout is 0.1"),
        ("vit", {"hidden_act": "mish"}, r"is transformers.activations.MishActivation; supported activations: .*GELU"),
        ("vit", {"output_attentions": True, "attn_implementation": "eager"}, r"output_attentions is True"),
        (
            "dinov2",
            {"attention_probs_dropout_prob": 0.1},
            r"attention.*drop\w* is 0.1, which is not supported",
        ),
    ],
    ids=str,
)
def test_unsupported_parts_are_refused_by_name(family, options, message):
    model = model_of(family, **options)
    with pytest.raises(ValueError, match=message):
        torchsbp.apply(model)
    assert not any(isinstance(m, Site) for m in model.modules())


def test_other_attention_kernels_are_refused_by_name():
    model = model_of("vit")
    model.config._attn_implementation = "flash_attention_2"
    message = r"config._attn_implementation is 'flash_attention_2'; supported: 'sdpa', 'eager'"
    with pytest.raises(ValueError, match=message):
        torchsbp.apply(model)


@pytest.mark.parametrize("ratio", [1.0, 0.5])
@pytest.mark.parametrize(
    "cls, options",
    [
        ("Dinov2Model", {**DINOV2, "use_swiglu_ffn": True}),
        ("DINOv3ViTModel", {**LAYERS, "intermediate_size": 48}),
        ("DINOv3ViTModel", {**LAYERS, "intermediate_size": 48, "use_gated_mlp": True, "drop_path_rate": 0.5}),
    ],
    ids=str,
)
def test_gated_mlps_and_rotary_embeddings(cls, options, ratio):
    check_definition(Scores(transformers_model(cls, **options)), SBPConfig(keep_ratio=ratio), pixels())


def test_other_families_are_refused_by_name():
    model = transformers_model("VitDetModel", num_hidden_layers=1, image_size=64, patch_size=16)
    message = r"nothing to patch in .*VitDetModel: .*VitDetLayer.*Supported.*transformers ViT"
    with pytest.raises(ValueError, match=message):
        torchsbp.apply(model)


def test_releases_that_are_too_old_are_refused(monkeypatch):
    monkeypatch.setattr(sys.modules["transformers"], "__version__", "5.16.4")
    with pytest.raises(ValueError, match=r"transformers 5.16.4 is not supported; install transformers >= 5.17"):
        torchsbp.apply(model_of("vit"))


def test_calls_that_are_not_plain_are_refused():
    model = torchsbp.apply(model_of("clip"), 0.5)
    with pytest.raises(ValueError, match=r"called with extra arguments in training"):
        model.vision_model.encoder(torch.randn(2, 17, 24).double(), attention_mask=torch.zeros(2, 1, 17, 17))


NO_MAPS = r"output_attentions=True is not possible in training \(\w+ is patched.*after model.eval\(\) or under torch.no"


@pytest.mark.parametrize("name", ["vit", "clip", "videomae", "vjepa2", "swin", "swin v2"])
def test_attention_maps_are_refused_in_training_and_given_otherwise(name):
    tiny = MODELS[f"transformers {name}"]
    model = torchsbp.apply(tiny.bare(attn_implementation="eager"), 0.5)
    with pytest.raises(UsageError, match=NO_MAPS):
        model(tiny.images(2), output_attentions=True)
    model(tiny.images(2)).logits.sum().backward()
    maps = model.eval()(tiny.images(2), output_attentions=True).attentions
    assert len(maps) > 1
    assert all(weights.shape[-1] == weights.shape[-2] for weights in maps)


def test_attention_maps_that_the_configuration_asks_for_are_refused_too():
    model = torchsbp.apply(model_of("vit", attn_implementation="eager"), 0.5)
    model.config.output_attentions = True
    with pytest.raises(UsageError, match=NO_MAPS):
        model(pixels())


def test_the_predictor_of_vjepa2_stays_as_it_is():
    """It has blocks of the same class, and calls them with the places of masked tokens: on all of them, exactly."""
    plain = transformers_model("VJEPA2Model", **VJEPA2)
    model = torchsbp.apply(copy.deepcopy(plain), keep_ratio=1.0)
    assert not any(isinstance(m, Site) for m in model.predictor.modules())
    places = torch.arange(32).expand(2, 32)
    masks = {"context_mask": [places[:, :20]], "target_mask": [places[:, 20:]]}
    for each in (plain, model):
        each(pixels("vjepa2"), **masks).predictor_output.last_hidden_state.square().sum().backward()
    assert_gradients(gradients_of(model), gradients_of(plain))


def test_the_pooler_of_vjepa2_is_sampled_like_a_last_block():
    model = torchsbp.apply(model_of("vjepa2"), keep_ratio=0.5)
    step(Scores(model), pixels("vjepa2"))
    encoder = [f"vjepa2.encoder.layer.{i}" for i in (1, 2)]
    assert list(torchsbp.kept(model)) == [*encoder, "pooler.self_attention_layers.0"]


def test_tokens_dropped_in_pretraining_are_refused():
    model = torchsbp.apply(transformers_model("VideoMAEModel", **VIDEOMAE), 0.5)
    with pytest.raises(ValueError, match=r"was given 2 samples of 16 positions, but .* 2 samples of 32"):
        model(pixels("videomae"), bool_masked_pos=torch.arange(32).expand(2, 32) < 16)


def test_a_forward_that_was_replaced_is_refused():
    """As accelerate does for models on several devices: it would hide the one for training."""
    model = model_of("vit")
    block = next(module for module in model.modules() if type(module).__name__ == "ViTLayer")
    block.forward = block.forward
    with pytest.raises(ValueError, match=r"its forward was replaced"):
        torchsbp.apply(model)
    del block.forward
    block.attention.forward = block.attention.forward
    with pytest.raises(ValueError, match=r"attention has a forward that is not its class's"):
        torchsbp.apply(model)
