"""Models by name: of three libraries, or of the user's own."""

import pytest
from torch import nn

import torchsbp
from torchsbp.cli.named import find_model
from torchsbp.errors import UsageError

from .commands import run


@pytest.mark.parametrize(
    "name, options, cls, shape",
    [
        ("test_vit", {}, "VisionTransformer", (3, 160, 160)),
        ("timm/test_vit", {"size": 96}, "VisionTransformer", (3, 96, 96)),
        ("torchvision/swin3d_t", {}, "SwinTransformer3d", (3, 16, 224, 224)),
        ("torchvision/swin3d_t", {"shape": (3, 8, 64, 64)}, "SwinTransformer3d", (3, 8, 64, 64)),
        ("torchvision/vit_b_16", {}, "VisionTransformer", (3, 224, 224)),
        ("transformers/ViTModel", {}, "ViTModel", (3, 224, 224)),
        ("transformers/ViTModel", {"size": 96}, "ViTModel", (3, 96, 96)),
        ("transformers/VideoMAEModel", {}, "VideoMAEModel", (16, 3, 224, 224)),
        ("tests.models:tiny_vit", {"shape": (3, 64, 96)}, "VisionTransformer", (3, 64, 96)),
    ],
)
def test_a_model_and_the_shape_of_its_samples(name, options, cls, shape):
    named = find_model(name, **options)
    model = named.build()
    assert (type(model).__name__, named.shape) == (cls, shape)
    assert all(parameter.is_meta for parameter in model.parameters())


@pytest.mark.parametrize("name", ["torchvision/swin3d_t", "transformers/ViTModel"])
def test_what_is_named_is_estimated_with_sbp(name):
    named = find_model(name)
    full, sampled = (torchsbp.estimate(named.build, (1, *named.shape), c) for c in ("full", torchsbp.SBPConfig(0.25)))
    assert sampled.saved_bytes < full.saved_bytes


def test_the_commands_take_a_function_of_the_users_own(capsys, tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(
        "import timm\ndef build():\n    return timm.create_model('test_vit')\ndef number():\n    return 3\n"
    )
    monkeypatch.chdir(tmp_path)
    status, out, _ = run(capsys, "plan", "mine:build", "--shape", "3,160,160", "--batch", "2", "--memory", "1GiB")
    assert status == 0
    assert out.startswith("mine:build, batch 2, 160×160, bf16, adamw: predicted for a CUDA device\n")
    status, _, err = run(capsys, "profile", "mine:number", "--predict")
    assert (status, err) == (2, "torchsbp profile: 'mine:number' made int; it must return a torch.nn.Module\n")


@pytest.mark.parametrize(
    "name, message",
    [
        ("nothing_here:build", "'nothing_here:build': can't import 'nothing_here': ModuleNotFoundError"),
        ("tests.models:nothing", "tests.models has no function 'nothing'; write module:function"),
        ("tests.models:lean_transformers", "can't be built without arguments: TypeError"),
        ("transformers/ViTModle", "unknown model 'ViTModle' in transformers; did you mean ViTModel"),
        ("transformers/AutoConfig", "unknown model 'AutoConfig' in transformers"),
    ],
)
def test_what_is_no_model_is_told(name, message):
    with pytest.raises(UsageError, match=message):
        find_model(name).build()


def test_a_shape_is_read(capsys):
    with pytest.raises(SystemExit):
        run(capsys, "plan", "test_vit", "--memory", "1GiB", "--shape", "3,x")
    assert "'x' is not a whole number above 0" in capsys.readouterr().err
    assert isinstance(find_model("test_vit").build(), nn.Module)
