"""``torchsbp models``: what is listed, what is said of a model, exit status."""

import json

import pytest
import timm
import torch

import torchsbp
from torchsbp import adapters
from torchsbp.cli.main import main
from torchsbp.cli.models import describe, examine
from torchsbp.sampling.recommended import UNTRIED, VIT, Recommended

from ..models import tiny_vit


def run(capsys, *argv: str) -> tuple[int, str, str]:
    status = main(["models", *argv])
    return status, *capsys.readouterr()


def test_every_adapter_is_listed_with_its_classes(capsys):
    status, out, _ = run(capsys)
    assert status == 0
    for adapter in adapters.ADAPTERS:
        assert all(layout.model in out for layout in adapter.every_layout)
        assert all(f"    {block.rpartition('.')[2]} " in out for block in adapter.blocks)
    lines = out.splitlines()
    assert lines[0] == "timm"
    assert "torchvision" in lines
    assert "    Block                      lean, else run again" in lines
    assert "lean: the backward pass is written out for its parts; attention rules of all: query, exact" in lines
    assert "run again: its own forward runs again on kept rows; attention rules of all: query" in lines


def test_an_adapter_of_your_own_is_listed(capsys):
    known = list(adapters.ADAPTERS)
    descriptions = adapters.Residual(), adapters.Residual(mixers=())
    layouts = adapters.Layout("mine.models.MyViT"), adapters.Layout("mine.models.MyBackbone")
    torchsbp.register(adapters.Adapter("my ViT", {"mine.models.Layer": descriptions}, layouts))
    try:
        _, out, _ = run(capsys, "--json")
    finally:
        adapters.ADAPTERS[:] = known
    assert json.loads(out)[-1] == {
        "library": "mine",
        "family": "my ViT",
        "model": "mine.models.MyViT",
        "also in": ["mine.models.MyBackbone"],
        "blocks": {"mine.models.Layer": ["run again"]},
        "between stages": [],
        "recommended": UNTRIED._asdict(),
    }


def told(recommended: Recommended) -> list[str]:
    parts = [(name, ", ".join(f"{k}={v}" for k, v in its.items())) for name, its in recommended._asdict().items()]
    return [f"  {name}: {options}" for name, options in parts]


@pytest.mark.parametrize(
    "name, lines",
    [
        (
            "vit_base_patch16_224",
            [
                "vit_base_patch16_224: timm ViT, timm.models.vision_transformer.VisionTransformer",
                "  blocks.0 … blocks.3 (4)   Block  lean, exact",
                "  blocks.4 … blocks.11 (8)  Block  lean, sampled",
                *told(VIT),
            ],
        ),
        (
            "timm/convnext_tiny",
            [
                "timm/convnext_tiny: timm ConvNeXt, timm.models.convnext.ConvNeXt",
                "  stages.0.blocks.0 … stages.0.blocks.2 (3)  ConvNeXtBlock  lean, sampled",
                "  stages.1.downsample                        Sequential     lean, exact",
            ],
        ),
        (
            "eva02_tiny_patch14_224",
            [
                "eva02_tiny_patch14_224: timm EVA, timm.models.eva.Eva",
                "  blocks.0 … blocks.3 (4)   EvaBlock  lean, exact",
            ],
        ),
        (
            "mixer_b32_224",
            [
                "mixer_b32_224: timm MLP-Mixer, timm.models.mlp_mixer.MlpMixer",
                "  blocks.0 … blocks.3 (4)   MixerBlock  run again, exact",
            ],
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_blocks_of_a_model_are_grouped(capsys, name, lines):
    status, out, _ = run(capsys, name)
    assert status == 0
    assert out.splitlines()[: len(lines)] == lines


def test_families_whose_presets_sample_nothing_say_so(capsys):
    _, out, _ = run(capsys, "convnext_tiny")
    exact = "keep_ratio=1.0 (exact: nothing is sampled; the lines above say what a ratio below 1 samples)"
    assert out.splitlines()[-2:] == [f"  default: {exact}", f"  fast: {exact}"]


def test_what_is_said_is_what_apply_does(capsys):
    _, out, _ = run(capsys, "test_vit", "--json")
    (backbone,) = json.loads(out)["backbones"]
    sampled = [block["name"] for block in backbone["blocks"] if block["sampled"]]
    model = torchsbp.apply(timm.create_model("test_vit"))
    model(torch.zeros(1, 3, 160, 160))
    assert sampled == list(torchsbp.kept(model))


def test_a_model_without_an_adapter_has_its_blocks_named(capsys):
    status, out, err = run(capsys, "timm/resnet18")
    assert (status, err) == (1, "")
    assert out.splitlines()[:2] == [
        "timm/resnet18 is not supported: no adapter for timm.models.resnet.ResNet. Its block classes:",
        "  timm.models.resnet.BasicBlock",
    ]
    status, out, _ = run(capsys, "torchvision/alexnet", "--json")
    found = json.loads(out)
    assert status == 1
    assert not found["supported"]
    assert found["block classes"] == found["backbones"] == []


def test_refused_blocks_are_told_once_with_their_reasons():
    about = examine(tiny_vit(attn_drop_rate=0.1))
    assert not about["supported"]
    lines = describe("mine", about).splitlines()
    assert lines[1:3] == ["  blocks.0 … blocks.2 (3)  Block  refused", "mine is not supported:"]
    assert len(lines) == 4
    assert lines[3].startswith("  Block: attn.attn_drop is Dropout(p=0.1")


@pytest.mark.parametrize(
    "name, message",
    [
        ("vit_bas_patch16_224", "unknown model 'vit_bas_patch16_224' in timm and torchvision; did you mean vit_base"),
        ("jax/vit", "unknown library 'jax' in 'jax/vit'; known: timm, torchvision"),
    ],
)
def test_misuse_is_told_in_one_message(capsys, name, message):
    status, out, err = run(capsys, name)
    assert (status, out) == (2, "")
    assert message in err
