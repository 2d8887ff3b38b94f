"""Backbones: hierarchical ones and plain ViTs under a pyramid, weights of classifiers."""

import pytest
import timm
import torch
from safetensors.torch import save_file

import torchsbp
from torchsbp.errors import CheckpointError, UsageError
from torchsbp.train.detection.backbone import Backbone, body

from ...steps import GRID
from ..runs import run
from .detectors import TINY

SWIN = {"window_size": 4, "embed_dim": 12, "depths": (1, 1, 2, 1), "num_heads": (1, 1, 2, 2), "img_size": 64}
SWIN |= {"strict_img_size": False, "always_partition": True}
VIT = {"embed_dim": 16, "depth": 3, "num_heads": 2, "dynamic_img_size": True}
BACKBONES = {
    "convnext_tiny": TINY,
    "swin_tiny_patch4_window7_224": SWIN,
    "vit_tiny_patch16_224": VIT,
    "resnet18": {},
}


@pytest.mark.parametrize("name", BACKBONES)
def test_maps_have_strides_4_to_64(name):
    backbone = Backbone(body(name, BACKBONES[name], False, None, 32), 8)
    for height, width in ((64, 96), (128, 64)):
        maps = backbone(torch.randn(1, 3, height, width))
        wanted = [(1, 8, -(-height // stride), -(-width // stride)) for stride in (4, 8, 16, 32, 64)]
        assert [tuple(its.shape) for its in maps.values()] == wanted


@pytest.mark.parametrize("name", [name for name in BACKBONES if name != "resnet18"])
def test_sbp_finds_them(name):
    backbone = torchsbp.apply(Backbone(body(name, BACKBONES[name], False, None, 32), 8).train(), config=GRID)
    torchsbp.set_sizes(backbone, [(64, 96), (40, 50)], (64, 96))
    found = torchsbp.check(backbone, torch.randn(2, 3, 64, 96))
    assert found.passed, found


@pytest.mark.parametrize(
    "name, options, message",
    [
        ("nothing", {}, "task.model.name nothing"),
        ("convnext_tiny", {"depth": 1}, "depth"),
        ("vit_tiny_patch16_224", {}, "dynamic_img_size=true"),
        ("vit_small_patch32_224", {**VIT, "num_heads": 1}, "stride 8 or 16, this backbone has 32"),
        ("convnext_tiny", {**TINY, "output_stride": 16}, r"needs maps of strides \(4, 8, 16, 32\)"),
    ],
)
def test_others_are_refused(name, options, message):
    with pytest.raises(UsageError, match=message):
        Backbone(body(name, options, False, None, 32), 8)


@pytest.mark.parametrize("name", [name for name in BACKBONES if name != "resnet18"])
def test_they_begin_from_weights_of_timm_classifiers(name, tmp_path):
    path = tmp_path / "weights.safetensors"
    classifier = timm.create_model(name, num_classes=7, **BACKBONES[name])
    save_file(classifier.state_dict(), path)
    found = body(name, BACKBONES[name], False, path, 32).eval()
    x = torch.randn(1, 3, 64, 96)
    expected = classifier.eval().forward_intermediates(x, intermediates_only=True)
    maps = found(x)
    last = maps[-1].permute(0, 3, 1, 2) if found.output_fmt == "NHWC" else maps[-1]
    torch.testing.assert_close(last, expected[-1])


def test_they_begin_from_checkpoints_of_our_training(tmp_path):
    options = {"depths": [1, 1, 1, 1], "dims": [8, 8, 8, 8]}
    model = {"name": "convnext_atto", "options": options}
    code, out = run(
        tmp_path, "--epochs=1", "--schedule.warmup_epochs=0", "--task.data.channels=3", "--task.data.size=32",
        "--task.data.mean=[0.3,0.3,0.3]", "--task.data.std=[0.3,0.3,0.3]", "--batch=160", "--micro_batch=160",
        "--task.model.name=convnext_atto", '--task.model.options={"depths": [1, 1, 1, 1], "dims": [8, 8, 8, 8]}',
    )  # fmt: skip
    assert code == 0
    path = out / "checkpoints" / "best.pt"
    found = body(model["name"], options, False, path, 32)
    own, averages = found.state_dict(), torch.load(path, weights_only=True)["ema"]
    for name, theirs in (("stem_0.weight", "stem.0.weight"), ("stages_2.blocks.0.gamma", "stages.2.blocks.0.gamma")):
        assert torch.equal(own[name], averages[theirs])


def test_weights_of_other_models_are_refused(tmp_path):
    path = tmp_path / "weights.safetensors"
    save_file(timm.create_model("convnext_tiny", **{**TINY, "dims": (8, 12, 16, 24)}).state_dict(), path)
    with pytest.raises(CheckpointError, match=r"of another size: stages_3.downsample.1.weight \(24, 16, 2, 2\), here"):
        body("convnext_tiny", TINY, False, path, 32)
    save_file(timm.create_model("vit_tiny_patch16_224", embed_dim=8, depth=1, num_heads=2).state_dict(), path)
    with pytest.raises(CheckpointError, match=r"of another model: it has no stem.0.weight"):
        body("convnext_tiny", TINY, False, path, 32)
