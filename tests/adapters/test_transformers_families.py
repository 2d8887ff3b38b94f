"""More families of transformers: vision towers inside of models of images and text, and what is refused of them."""

import copy

import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers.models.donut.modeling_donut_swin import DonutSwinModel
from transformers.models.idefics2.modeling_idefics2 import Idefics2VisionTransformer
from transformers.models.kosmos2.modeling_kosmos2 import Kosmos2VisionModel

import torchsbp
from torchsbp import SBPConfig
from torchsbp.adapters import find_backbones
from torchsbp.errors import UsageError

from ..models import IMAGES, LAYERS, MODELS, SQUARES, VIT, Scores, images, randomized, transformers_model
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


PAIRED = {  # how it is built, its tower, tokens of an image
    "LLaVA": (llava, "model.vision_tower", 16),
    "PaliGemma": (paligemma, "model.vision_tower", 16),
    "Idefics 3": (idefics3, "model.vision_model", 4),
    "InternVL": (internvl, "model.vision_tower", 4),
}


def batch_for(name: str) -> dict[str, Tensor]:
    pixels = images(2, (64, 64))
    text = torch.tensor([[IMAGE] * PAIRED[name][2] + [3, 4, 5]] * 2)
    batch = {"input_ids": text, "pixel_values": pixels[:, None] if name == "Idefics 3" else pixels}
    if name == "PaliGemma":
        batch["token_type_ids"] = torch.zeros_like(text)
    return batch


def trained(model: nn.Module, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    torch.manual_seed(0)
    model(**batch).logits.square().sum().backward()
    return gradients_of(model)


@pytest.mark.parametrize("name", PAIRED)
def test_a_tower_is_found_inside_of_its_model_and_by_itself(name):
    build, tower, _ = PAIRED[name]
    plain, batch = build(), batch_for(name)
    whole, part = copy.deepcopy(plain), copy.deepcopy(plain)
    assert [found for found, *_ in find_backbones(whole)] == [tower]
    torchsbp.apply(whole, keep_ratio=1.0)
    torchsbp.apply(part.get_submodule(tower), keep_ratio=1.0)
    expected = trained(plain, batch)
    assert any(gradient.norm() > 0 for its, gradient in expected.items() if its.startswith(tower))
    for model in (whole, part):
        assert_gradients(trained(model, batch), expected)


SWIN = {"image_size": 64, "patch_size": 4, "window_size": 3, "depths": [2, 2], "num_heads": [2, 3], "embed_dim": 12}
NOT_EXPORTED = {DonutSwinModel: SWIN, Idefics2VisionTransformer: IMAGES, Kosmos2VisionModel: IMAGES}


@pytest.mark.parametrize("cls", NOT_EXPORTED)
@pytest.mark.parametrize("ratio", [1.0, 0.5])
def test_models_that_are_not_exported(cls, ratio):
    model = randomized(lambda: cls._from_config(cls.config_class(**NOT_EXPORTED[cls])))
    check_definition(Scores(model), SBPConfig(keep_ratio=ratio), images(2, (64, 64)))


DINO = {**LAYERS, "mlp_ratio": 2.0, "layerscale_value": 0.5, "drop_path_rate": 0.5}
LATER = {
    "Tipsv2VisionModel": {**DINO, "num_register_tokens": 2},
    "RadioModel": {**DINO, "max_img_size": 64, "num_cls_tokens": 2, "num_registers": 1},
}


@pytest.mark.parametrize("cls", LATER)
def test_models_of_later_releases(cls):
    if not hasattr(transformers, cls):
        pytest.skip(f"transformers {transformers.__version__} has no {cls}")
    model = Scores(transformers_model(cls, **LATER[cls]))
    check_definition(model, SBPConfig(keep_ratio=0.5, blocks=1.0), images(2, (64, 64)))
    kept = next(iter(torchsbp.kept(model).values()))
    assert kept[:, :3].tolist() == [[0, 1, 2]] * 2  # class and register tokens


def test_sam_with_its_decoder():
    """Prompts are points; the image encoder alone is sampled."""
    vision = MODELS["transformers sam"].bare().config
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "mlp_dim": 8, "iou_head_hidden_dim": 8}
    prompts = {"hidden_size": 8, "image_size": 64, "patch_size": 8}
    plain = transformers_model(
        "SamModel", vision_config=vision, prompt_encoder_config=prompts, mask_decoder_config=sizes
    )
    model = torchsbp.apply(copy.deepcopy(plain), keep_ratio=1.0)
    assert [found for found, *_ in find_backbones(model)] == ["vision_encoder"]
    points = torch.tensor([[[[10.0, 20.0]]]] * 2, dtype=torch.float64)
    for each in (plain, model):
        each(pixel_values=images(2, (64, 64)), input_points=points).pred_masks.square().sum().backward()
    assert_gradients(gradients_of(model), gradients_of(plain))


def test_sam_with_attention_that_is_written_out_is_refused():
    """Its softmax rounds to float32."""
    with pytest.raises(UsageError, match=r"attn is .*SamVisionAttention; supported: .*SamVisionSdpaAttention"):
        torchsbp.apply(MODELS["transformers sam"].bare(attn_implementation="eager"))


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
