"""Vision towers of models of images and text: inside of these, by themselves, and what is refused of them."""

import copy

import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers.models.idefics2.modeling_idefics2 import Idefics2VisionTransformer
from transformers.models.kosmos2.modeling_kosmos2 import Kosmos2VisionModel

import torchsbp
from torchsbp import SBPConfig
from torchsbp.adapters import find_backbones
from torchsbp.errors import UsageError

from ..models import IMAGES, SQUARES, VIT, Scores, images, randomized, transformers_model
from ..oracle import check_definition
from ..steps import assert_gradients, gradients_of

IMAGE = 63  # the token in whose places features of images are put
TEXT = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
TEXT |= {"num_key_value_heads": 2, "vocab_size": 64, "head_dim": 16, "pad_token_id": 0}


def of_parts(name: str, tower: dict, text: str, **options) -> nn.Module:
    kind = getattr(transformers, f"{name}ForConditionalGeneration")
    parts = {"vision_config": {**IMAGES, **tower}, "text_config": {"model_type": text, **TEXT}}
    return randomized(lambda: kind._from_config(kind.config_class(**parts, image_token_id=IMAGE, **options)))


def llava() -> nn.Module:
    return of_parts("Llava", {"model_type": "clip_vision_model"}, "llama")


def paligemma() -> nn.Module:
    return of_parts("PaliGemma", {"model_type": "siglip_vision_model"}, "gemma", projection_dim=32)


def idefics3() -> nn.Module:
    return of_parts("Idefics3", {}, "llama", scale_factor=2)


def internvl(**tower) -> nn.Module:
    return of_parts("InternVL", SQUARES | tower, "qwen2", downsample_ratio=0.5)


MODELS = {  # how it is built, its tower, tokens of an image
    "LLaVA": (llava, "model.vision_tower", 16),
    "PaliGemma": (paligemma, "model.vision_tower", 16),
    "Idefics 3": (idefics3, "model.vision_model", 4),
    "InternVL": (internvl, "model.vision_tower", 4),
}


def batch_for(name: str) -> dict[str, Tensor]:
    pixels = images(2, (64, 64))
    text = torch.tensor([[IMAGE] * MODELS[name][2] + [3, 4, 5]] * 2)
    batch = {"input_ids": text, "pixel_values": pixels[:, None] if name == "Idefics 3" else pixels}
    if name == "PaliGemma":
        batch["token_type_ids"] = torch.zeros_like(text)
    return batch


def trained(model: nn.Module, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    torch.manual_seed(0)
    model(**batch).logits.square().sum().backward()
    return gradients_of(model)


@pytest.mark.parametrize("name", MODELS)
def test_a_tower_is_found_inside_of_its_model_and_by_itself(name):
    build, tower, _ = MODELS[name]
    plain, batch = build(), batch_for(name)
    whole, part = copy.deepcopy(plain), copy.deepcopy(plain)
    assert [found for found, *_ in find_backbones(whole)] == [tower]
    torchsbp.apply(whole, keep_ratio=1.0)
    torchsbp.apply(part.get_submodule(tower), keep_ratio=1.0)
    expected = trained(plain, batch)
    assert any(gradient.norm() > 0 for its, gradient in expected.items() if its.startswith(tower))
    for model in (whole, part):
        assert_gradients(trained(model, batch), expected)


@pytest.mark.parametrize("cls", [Idefics2VisionTransformer, Kosmos2VisionModel])
@pytest.mark.parametrize("ratio", [1.0, 0.5])
def test_towers_that_are_not_exported(cls, ratio):
    model = randomized(lambda: cls._from_config(cls.config_class(**IMAGES)))
    check_definition(Scores(model), SBPConfig(keep_ratio=ratio), images(2, (64, 64)))


def test_padded_images_are_refused():
    """They come with a mask of attention; images that fill the batch come without, and train."""
    model, batch = torchsbp.apply(idefics3(), keep_ratio=0.5), batch_for("Idefics 3")
    trained(model, {**batch, "pixel_attention_mask": torch.ones(2, 1, 64, 64, dtype=torch.bool)})
    narrow = (torch.arange(64) < 48).expand(2, 1, 64, 64)
    with pytest.raises(UsageError, match="Idefics3EncoderLayer was called with extra arguments in training"):
        trained(model, {**batch, "pixel_attention_mask": narrow})


@pytest.mark.parametrize(
    "options, message",
    [
        ({"norm_type": "rms_norm"}, r"layernorm_before is .*InternVLVisionRMSNorm; supported norms"),
        ({"use_qk_norm": True}, r"attention.q_norm is InternVLVisionRMSNorm.* which is not supported"),
    ],
    ids=str,
)
def test_norms_of_the_large_internvl_are_refused(options, message):
    """They round to float32 whatever they are given, and one of them is over all heads."""
    with pytest.raises(UsageError, match=message):
        torchsbp.apply(internvl(**options))


def test_a_dpt_behind_a_convolutional_network():
    network = {"model_type": "bit", "depths": [1, 1, 1], "hidden_sizes": [8, 16, 32], "embedding_size": 8}
    network |= {"out_features": ["stage1", "stage2", "stage3"], "global_padding": "same", "num_groups": 4}
    hybrid = {"is_hybrid": True, "backbone_config": network, "backbone_featmap_shape": [1, 32, 4, 4]}
    model = transformers_model("DPTModel", **VIT, **hybrid, readout_type="project", neck_hidden_sizes=[8] * 4)
    check_definition(Scores(model), SBPConfig(keep_ratio=0.5), images(2, (64, 64)))
