"""The whole detector: SBP's gradients against the oracle, layer decay, compiled backbones."""

import pytest
import torch

import torchsbp
from torchsbp.errors import UsageError
from torchsbp.train.detection.model import compile_backbone, parameter_groups

from ...steps import GRID
from .detectors import PADDED, SIZES, detector, images, objects


@pytest.mark.parametrize("kind, sparse", [("mask_rcnn", False), ("mask_rcnn", True), ("cascade", True)])
def test_gradients_through_the_whole_detector_are_the_oracles(kind, sparse):
    model = torchsbp.apply(detector(kind, sparse), config=GRID)
    torchsbp.set_sizes(model, SIZES, PADDED)
    found = torchsbp.check(model, images(), SIZES, objects())
    assert found.passed, found


def test_at_ratio_1_they_are_those_of_plain_training():
    plain, patched = detector(), torchsbp.apply(detector(), keep_ratio=1.0)
    for model in (plain, patched):
        torch.manual_seed(3)
        sum(model(images(), SIZES, objects()).values()).backward()
    found = dict(patched.named_parameters())
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(found[name].grad, parameter.grad, rtol=1e-8, atol=1e-12, msg=name)


def test_layer_decay_has_the_published_groups():
    """ConvNeXt-T: 6 groups; stem, stage 1, stage 2, thirds of stage 3, stage 4."""
    import timm

    model = detector()
    with torch.device("meta"):
        model.backbone.body = timm.create_model("convnext_tiny", features_only=True)
    rates = {}
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for group in parameter_groups(model, 0.05, 0.95):
        for parameter in group["params"]:
            rates[names[id(parameter)]] = group["lr_scale"]
            assert group["weight_decay"] == (0.05 if parameter.dim() > 1 else 0)
    assert rates.keys() == dict(model.named_parameters()).keys()
    inner = "backbone.body."
    expected = {
        "stem_0.weight": 7, "stem_1.bias": 7, "stages_0.blocks.2.conv_dw.weight": 6, "stages_1.downsample.1.weight": 5,
        "stages_1.blocks.0.gamma": 5, "stages_2.downsample.1.weight": 4, "stages_2.blocks.2.mlp.fc1.weight": 4,
        "stages_2.blocks.3.mlp.fc1.weight": 3, "stages_2.blocks.8.mlp.fc1.weight": 2, "stages_3.downsample.0.weight": 1,
        "stages_3.blocks.2.conv_dw.weight": 1,
    }  # fmt: skip
    for name, power in expected.items():
        assert rates[inner + name] == pytest.approx(0.95**power), name
    assert {rate for name, rate in rates.items() if not name.startswith(inner)} == {1.0}


def test_layer_decay_of_a_base_model_has_twelve():
    import timm

    model = detector()
    with torch.device("meta"):
        model.backbone.body = timm.create_model("convnext_base", features_only=True)
    rates = {group["lr_scale"] for group in parameter_groups(model, 0.05, 0.8)}
    assert sorted(rates) == pytest.approx([0.8**power for power in range(13, -1, -1)])


def test_layer_decay_needs_to_know_the_backbone():
    model = detector()
    model.backbone.body = torch.nn.Conv2d(3, 4, 1)
    with pytest.raises(UsageError, match=r"optimizer\.layer_decay needs a ConvNeXt"):
        parameter_groups(model, 0.05, 0.8)


def test_a_compiled_backbone_is_compiled_once_for_each_size():
    model = torchsbp.apply(detector().float(), config=GRID)
    before = torch._dynamo.config.recompile_limit
    try:
        compile_backbone(model, shapes=8)
        assert torch._dynamo.config.recompile_limit >= 16
    finally:
        torch._dynamo.config.recompile_limit = before
    counted: list[object] = []

    def count(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> object:
        counted.append(graph)
        return graph.forward

    model.backbone.compile(backend=count, dynamic=False)
    for height, width in ((64, 96), (96, 64), (64, 96)):
        for sizes in ([[64, 60], [50, 64]], [[60, 50], [64, 64]]):
            torchsbp.set_sizes(model, sizes, (height, width))
            model.backbone(torch.randn(2, 3, height, width))
    assert len(counted) == 2
