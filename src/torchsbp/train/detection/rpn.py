"""Proposals: torchvision's RPN with another loss, and a backward pass that visits the sampled anchors alone.

Of some hundred thousand anchors the loss sees 256 per image, and proposals carry no gradient. So the head can run on
whole maps without recording anything, and once more on the 3 × 3 surroundings of the sampled anchors. Gradients are the
same, and there is no dense backward pass.
"""

from collections import OrderedDict
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.models.detection.image_list import ImageList
from torchvision.models.detection.rpn import RegionProposalNetwork, RPNHead, concat_box_prediction_layers

from torchsbp.ops.constants import constant

Targets = list[dict[str, Tensor]]
RATIOS = (0.5, 1.0, 2.0)
SAMPLED, POSITIVE = 256, 0.5
BEFORE_NMS, TESTED = 2000, 1000
"""the most proposals: of a map before NMS in training; of a map before it, and of an image after it, in evaluation"""


class RPN(RegionProposalNetwork):
    """``beta`` is that of the smooth L1 loss of boxes (0: L1). ``sparse``: backward visits only sampled anchors."""

    def __init__(self, width: int, anchor_scale: int, proposals: int, beta: float, sparse: bool) -> None:
        sizes = tuple((anchor_scale * stride,) for stride in (4, 8, 16, 32, 64))
        count = {"training": proposals, "testing": min(proposals, TESTED)}
        before = {"training": BEFORE_NMS, "testing": TESTED}
        anchors = AnchorGenerator(sizes, (RATIOS,) * len(sizes))
        super().__init__(anchors, RPNHead(width, len(RATIOS)), 0.7, 0.3, SAMPLED, POSITIVE, before, count, 0.7)
        self.beta, self.sparse = beta, sparse

    def forward(
        self, images: ImageList, features: "OrderedDict[str, Tensor]", targets: Targets | None = None
    ) -> tuple[list[Tensor], dict[str, Tensor]]:
        maps = list(features.values())
        with torch.set_grad_enabled(torch.is_grad_enabled() and not self.sparse):
            by_level = [[at_least_float(each) for each in found] for found in self.head(maps)]
        anchors = self.anchor_generator(images, maps)
        per_level = [each[0].numel() for each in by_level[0]]
        logits, deltas = concat_box_prediction_layers(*by_level)
        boxes = self.box_coder.decode(deltas.detach(), anchors).view(len(anchors), -1, 4)
        boxes, _ = self.filter_proposals(boxes, logits, images.image_sizes, per_level)
        if not self.training:
            return boxes, {}
        assert targets is not None
        labels, matched = self.assign_targets_to_anchors(anchors, targets)
        for label, anchor, size in zip(labels, anchors, images.image_sizes, strict=True):
            label[in_padding(anchor, size)] = -1  # neither object nor background
        positive, negative = (torch.cat(found).nonzero().flatten() for found in self.fg_bg_sampler(labels))
        chosen = torch.cat([positive, negative])
        if self.sparse:
            logits, deltas = at(self.head, maps, chosen)
        else:
            logits, deltas = logits.flatten()[chosen], deltas[chosen]
        aims = self.box_coder.encode_single(torch.cat(matched)[positive], torch.cat(anchors)[positive])
        return boxes, rpn_losses(logits, deltas[: len(positive)], torch.cat(labels)[chosen], aims, self.beta)


def rpn_losses(logits: Tensor, deltas: Tensor, labels: Tensor, aims: Tensor, beta: float) -> dict[str, Tensor]:
    """Return losses of the sampled anchors: is there an object, and where (``deltas``, ``aims``: of objects alone)."""
    if not len(logits):
        return {"objectness": logits.sum(), "proposals": deltas.sum()}
    return {
        "objectness": F.binary_cross_entropy_with_logits(logits, labels),
        "proposals": F.smooth_l1_loss(deltas, aims, beta=beta, reduction="sum") / len(logits),
    }


def at_least_float(x: Tensor) -> Tensor:
    """Convert what autocast made to float32: bfloat16 can't count the pixels of large images."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def in_padding(anchors: Tensor, size: tuple[int, int]) -> Tensor:
    """Whether an anchor's centre is outside its image, to the right or below."""
    return (anchors[:, 0] + anchors[:, 2] > 2 * size[1]) | (anchors[:, 1] + anchors[:, 3] > 2 * size[0])


def at(head: Any, maps: list[Tensor], chosen: Tensor) -> tuple[Tensor, Tensor]:
    """Return logits and deltas of the chosen anchors, which are numbered by image, level, position and shape."""
    each, shapes = len(RATIOS), tuple((its.shape[2], its.shape[3]) for its in maps)
    rows = torch.cat([its.permute(0, 2, 3, 1).flatten(1, 2) for its in maps], 1)  # [B, n, C]: the anchors' own order
    shape = (chosen % each)[:, None]
    patches = surroundings(rows, shapes, chosen // each)
    conv, (score, box) = head.conv[0][0], (head.cls_logits, head.bbox_pred)
    hidden = F.relu(F.linear(patches.flatten(1), conv.weight.permute(0, 2, 3, 1).flatten(1), conv.bias))
    logits = F.linear(hidden, score.weight.flatten(1), score.bias).gather(1, shape).squeeze(1)
    deltas = F.linear(hidden, box.weight.flatten(1), box.bias).view(-1, each, 4)
    deltas = deltas.gather(1, shape[:, :, None].expand(-1, 1, 4)).squeeze(1)
    return at_least_float(logits), at_least_float(deltas)


def surroundings(x: Tensor, shapes: tuple[tuple[int, int], ...], positions: Tensor) -> Tensor:
    """Return the 3 × 3 neighbours ``[m, 9, C]`` of ``positions [m]``, zero beyond the edges. ``x [B, n, C]`` holds maps
    of these shapes one after the other; positions are numbered through all samples."""
    distance, within = neighbours(shapes, x.device)
    kind = kinds(shapes, x.device)[positions % x.shape[1]].long()
    place = positions[:, None] + distance[kind]
    return x.flatten(0, 1).index_select(0, place.flatten()).view(*place.shape, -1) * within[kind].unsqueeze(2)


@constant
def kinds(shapes: tuple[tuple[int, int], ...], device: torch.device) -> Tensor:
    """Return a code for every position ``[n]``: 16 for each map before its own, plus 8, 4, 2, 1 at the upper, lower,
    left, right edge."""
    found = []
    for number, (height, width) in enumerate(shapes):
        i, j = torch.arange(height, device=device)[:, None], torch.arange(width, device=device)
        kind = 16 * number + 8 * (i == 0) + 4 * (i == height - 1) + 2 * (j == 0) + (j == width - 1)
        found.append(kind.flatten().byte())
    return torch.cat(found)


@constant
def neighbours(shapes: tuple[tuple[int, int], ...], device: torch.device) -> tuple[Tensor, Tensor]:
    """Return how far the nine neighbours of every kind of position are from it, in positions, and whether they are on
    the map; both ``[kinds, 9]``. The distance is 0 for those that are not."""
    down, right = torch.tensor([(i, j) for i in (-1, 0, 1) for j in (-1, 0, 1)], device=device).T
    edges = 8 * (down < 0) + 4 * (down > 0) + 2 * (right < 0) + (right > 0)
    within = (torch.arange(16, device=device)[:, None] & edges) == 0
    return torch.cat([(down * width + right) * within for _, width in shapes]), within.repeat(len(shapes), 1)
