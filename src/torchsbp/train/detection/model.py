"""The detector: backbone and pyramid, proposals, heads. Images come normalised and padded, with their sizes."""

import re
from typing import Any

import torch
from torch import Tensor, nn
from torchvision.models.detection.image_list import ImageList

from ...errors import UsageError
from .backbone import Backbone
from .heads import Heads
from .rpn import RPN, Targets


class Detector(nn.Module):
    def __init__(self, backbone: Backbone, rpn: RPN, heads: Heads) -> None:
        super().__init__()
        self.backbone, self.rpn, self.heads = backbone, rpn, heads

    def forward(self, images: Tensor, sizes: Tensor, targets: Targets | None = None) -> Any:
        """Return losses by name in training; else every image's boxes, classes, scores and masks, in its own pixels."""
        height, width = images.shape[-2:]
        features = self.backbone(images)
        listed = [(h, w) for h, w in sizes.tolist()]
        proposals, losses = self.rpn(ImageList(images, listed), features, targets)
        if not self.training:
            return self.heads.detect(features, proposals, listed, (height, width))
        assert targets is not None
        return losses | self.heads.losses(features, proposals, listed, (height, width), targets)


def parameter_groups(model: Detector, weight_decay: float, layer_decay: float | None) -> list[dict[str, Any]]:
    """Return groups for the optimizer: no weight decay on vectors; with layer decay the rate falls towards the stem.

    A parameter of group i of n learns at layer_decay^(n + 1 − i) times the rate. The stem is group 0, stages 1 and 2
    are groups 1 and 2, block i of stage 3 is in group 3 + i // 3, and stage 4 is group n. In a ViT every block is a
    group. What follows the backbone, including the norms of its outputs, learns at the full rate.
    """
    number = group_numbers(model.backbone.body) if layer_decay is not None else {}
    last = max(number.values(), default=0) + 1
    groups: dict[tuple[int, bool], dict[str, Any]] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            group, decays = number.get(name.removeprefix("backbone.body."), last), parameter.dim() > 1
            rate = 1.0 if layer_decay is None else layer_decay ** (last - group)
            new = {"params": [], "weight_decay": weight_decay if decays else 0.0, "lr_scale": rate}
            groups.setdefault((group, decays), new)["params"].append(parameter)
    return [groups[key] for key in sorted(groups)]


STAGE = re.compile(r"(?:stages|layers)_(\d)\.(?:blocks\.(\d+))?")
BLOCK = re.compile(r"model\.blocks\.(\d+)\.")


def group_numbers(body: nn.Module) -> dict[str, int]:
    names = [name for name, _ in body.named_parameters()]
    places = {name: STAGE.match(name) for name in names}
    third = {int(place[2]) for place in places.values() if place and place[1] == "2" and place[2]}
    blocks = {name: BLOCK.match(name) for name in names}
    if third:
        last = 3 + -(-len(third) // 3)
        return {name: stage_group(place, last) for name, place in places.items()}
    if any(blocks.values()):
        return {name: 0 if block is None else 1 + int(block[1]) for name, block in blocks.items()}
    raise UsageError("optimizer.layer_decay needs a ConvNeXt, a Swin or a ViT; leave it out for this backbone")


def stage_group(place: "re.Match[str] | None", last: int) -> int:
    if place is None:
        return 0
    stage, block = int(place[1]), int(place[2] or 0)
    return (1, 2, 3 + block // 3, last)[stage]


def compile_backbone(model: Detector, shapes: int, mode: str | None = None) -> None:
    """Compile the backbone: a graph for each of ``shapes`` sizes of batches, in training and evaluation. Heads are not
    compiled, since their sizes depend on the data."""
    config: Any = torch._dynamo.config
    config.recompile_limit = max(config.recompile_limit, 2 * shapes)
    model.backbone.compile(dynamic=False, mode=mode)
