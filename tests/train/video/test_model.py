"""Classifiers of clips: layers over time, and the weights that they begin from."""

from pathlib import Path

import pytest
import timm
import torch
import transformers
from torchvision.models.swin_transformer import SwinTransformer
from torchvision.models.video.swin_transformer import SwinTransformer3d

import torchsbp
from torchsbp.errors import CheckpointError
from torchsbp.train.video.model import Model, groups, make_model

from ..runs import same
from .runs import SWIN, VIDEOMAE, VIT, VJEPA


@pytest.mark.parametrize("layers", [0, 2])
def test_layers_over_time_see_the_order_of_frames(tmp_path, layers):
    config = Model(name="vit_tiny_patch16_224", options=VIT, time_layers=layers)
    model, clips = make_model(config, 8, 32, 5, start=True).double().eval(), torch.rand(2, 3, 8, 32, 32).double()
    assert torch.allclose(model(clips), model(clips.flip(2)), atol=1e-9) == (layers == 0)


def test_what_reads_frames_has_exact_gradients_where_they_are_sampled(tmp_path):
    """And the rate of the classifier; weights of an image model leave it as it is."""
    image = timm.create_model("vit_tiny_patch16_224", **VIT, num_classes=5)
    torch.save(image.state_dict(), tmp_path / "image.pt")
    config = Model("vit_tiny_patch16_224", VIT, lr=0.1, weights=tmp_path / "image.pt", time_layers=2)
    with pytest.raises(CheckpointError, match=r"another classifier: head.weight \(5, 24\), here \(5, 256\)"):
        make_model(config, 8, 32, 5, start=True)
    config.new_head = True
    model, clips = make_model(config, 8, 32, 5, start=True).double(), torch.rand(2, 3, 8, 32, 32).double()
    assert torch.equal(model.body.encoder.norm.weight, image.norm.weight.double())
    gradients = []
    for sampled in (False, True):
        if sampled:
            model.body.sample(torchsbp.SBPConfig.preset("default", keep_ratio=0.25, sampler="frames"))
        model.zero_grad()
        model(clips).square().sum().backward()
        gradients.append({name: its.grad for name, its in model.named_parameters()})
    exact = {name for name, its in gradients[0].items() if torch.allclose(its, gradients[1][name], rtol=1e-9)}
    assert exact == {name for name in gradients[0] if not name.startswith("body.")}
    rates = {id(its): group["lr"] for group in groups(model, 1e-3, config.lr) for its in group["params"]}
    found = {name: rates[id(its)] for name, its in model.named_parameters()}
    assert found == {name: pytest.approx(1e-4 if name.startswith("body.") else 1e-3) for name in found}


def swin_of_timm() -> torch.nn.Module:
    sizes = {**SWIN, "num_heads": tuple(SWIN["num_heads"]), "window_size": 4}
    return timm.models.SwinTransformer(img_size=128, patch_size=4, num_classes=8, drop_path_rate=0.0, **sizes)


@pytest.mark.parametrize("library", ["torchvision, videos", "torchvision", "timm"])
def test_weights_of_a_swin_begin_a_model(tmp_path, library):
    """Torchvision's Video Swin as it is; a Swin of images sees a still clip as it saw the image."""
    sizes = {**SWIN, "stochastic_depth_prob": 0.0, "num_classes": 8}
    theirs = {
        "torchvision, videos": lambda: SwinTransformer3d(**{**sizes, "patch_size": [2, 4, 4]}),
        "torchvision": lambda: SwinTransformer(**{**sizes, "patch_size": [4, 4], "window_size": [4, 4]}),
        "timm": swin_of_timm,
    }[library]()
    torch.save(theirs.state_dict(), tmp_path / "theirs.pth")
    config = Model(options=SWIN, weights=tmp_path / "theirs.pth")
    ours = make_model(config, frames=4, size=128, classes=8, start=True).eval()
    image = torch.rand(2, 3, 128, 128)  # large enough for whole windows in the last stage
    clip = image[:, :, None].expand(-1, -1, 4, -1, -1)
    with torch.no_grad():
        torch.testing.assert_close(ours(clip), theirs.eval()(clip if "videos" in library else image))


PREDICTS = {"decoder_hidden_size": 12, "decoder_num_attention_heads": 3, "decoder_intermediate_size": 24}
PUBLISHED = {
    "VideoMAE": ("VideoMAEForVideoClassification", VIDEOMAE, "VideoMAEForVideoClassification"),
    "VideoMAE, pre-trained": ("VideoMAEForPreTraining", {**VIDEOMAE, **PREDICTS}, "VideoMAEForVideoClassification"),
    "V-JEPA 2": ("VJEPA2ForVideoClassification", VJEPA, "VJEPA2ForVideoClassification"),
}
CLIP = {"image_size": 32, "num_frames": 8, "crop_size": 32, "frames_per_clip": 8}


def published(name: str, folder: Path) -> tuple[transformers.PreTrainedModel, Model]:
    """A model of transformers whose weights are in that folder, and what begins from them."""
    kind, options, ours = PUBLISHED[name]
    theirs = getattr(transformers, kind)
    torch.manual_seed(1)
    model = theirs(theirs.config_class(**CLIP, **options, num_labels=8)).eval()
    model.save_pretrained(folder)
    own = {key: value for key, value in options.items() if key not in PREDICTS}
    return model, Model(name=f"transformers/{ours}", options=own, weights=folder)


@pytest.mark.parametrize("name", ["VideoMAE", "V-JEPA 2"])
def test_weights_of_transformers_begin_a_model(tmp_path, name):
    """Whose files call some of them otherwise (q_bias)."""
    theirs, config = published(name, tmp_path)
    ours = make_model(config, frames=8, size=32, classes=8, start=True).eval()
    clips = torch.rand(2, 3, 8, 32, 32)
    with torch.no_grad():
        torch.testing.assert_close(ours(clips), theirs(clips.transpose(1, 2)).logits)


def test_weights_of_pre_training_begin_a_model_with_a_new_head(tmp_path):
    """The backbone's are theirs; of the norm behind it there are none."""
    theirs, config = published("VideoMAE, pre-trained", tmp_path)
    with pytest.raises(CheckpointError, match=r"it lacks body\.model\.fc_norm\.bias.* and has body\.model\.decoder\."):
        make_model(config, frames=8, size=32, classes=5, start=True)
    config.new_head = True
    ours = make_model(config, frames=8, size=32, classes=5, start=True).eval()
    backbone = theirs.videomae.state_dict()
    assert same(ours.body.model.videomae.state_dict(), backbone)
    assert ours.body.model.fc_norm.weight.tolist() == [1.0] * 24
    config.options = {**VIDEOMAE, "hidden_size": 48}
    with pytest.raises(CheckpointError, match=r"of a model of another size: .* \(24,.* here \(48,"):
        make_model(config, frames=8, size=32, classes=5, start=True)
