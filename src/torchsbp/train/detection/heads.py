"""Heads on proposals: Mask R-CNN's, or a cascade of them, each trained on the boxes that the one before has refined.

A stage is torchvision's ``RoIHeads`` with its own threshold, box coder and losses; Mask R-CNN is a cascade of one.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.checkpoint import checkpoint
from torchvision.models.detection.faster_rcnn import FastRCNNConvFCHead, FastRCNNPredictor, TwoMLPHead
from torchvision.models.detection.mask_rcnn import MaskRCNNHeads, MaskRCNNPredictor
from torchvision.models.detection.roi_heads import RoIHeads, maskrcnn_loss
from torchvision.ops import MultiScaleRoIAlign, clip_boxes_to_image, generalized_box_iou_loss

import torchsbp

from .backbone import LEVELS
from .rpn import Targets, at_least_float

Features = OrderedDict[str, Tensor]
GROUPS = 32


@dataclass(frozen=True)
class StageSpec:
    """What differs between stages: the overlap that makes a proposal an object, the standard deviations by which coded
    boxes are divided, the weight of the losses, whether these compare decoded boxes (GIoU ×10) or coded ones (L1), and
    whether the head has convolutions."""

    overlap: float = 0.5
    deviations: tuple[float, float, float, float] = (0.1, 0.1, 0.2, 0.2)
    weight: float = 1.0
    decoded: bool = False
    convolutions: bool = False


MASK_RCNN = (StageSpec(),)
CASCADE = tuple(
    StageSpec(overlap, deviations, weight, decoded=True, convolutions=True)
    for overlap, deviations, weight in (
        (0.5, (0.1, 0.1, 0.2, 0.2), 1.0),
        (0.6, (0.05, 0.05, 0.1, 0.1), 0.5),
        (0.7, (0.033, 0.033, 0.067, 0.067), 0.25),
    )
)


@dataclass(frozen=True)
class HeadSpec:
    """What all stages share: number of classes with the background, channels of maps, hidden width, sampled proposals
    per image, whether there are masks, the norm of convolutions, the share of proposals that backward visits, and
    whether it recomputes the heads."""

    classes: int
    width: int
    hidden: int
    sampled: int
    masks: bool = True
    norm: Literal["batch", "group"] = "batch"
    keep_ratio: float = 1.0
    recompute: bool = False


class Stage(RoIHeads):
    def __init__(self, stage: StageSpec, spec: HeadSpec) -> None:
        width, hidden = spec.width, spec.hidden
        if stage.convolutions:
            norm = nn.SyncBatchNorm if spec.norm == "batch" else partial(nn.GroupNorm, GROUPS)
            head: nn.Module = FastRCNNConvFCHead((width, 7, 7), [width] * 4, [hidden], norm_layer=norm)
        else:
            head = TwoMLPHead(width * 49, hidden)
        masks: dict[str, nn.Module] = {}
        if spec.masks:
            masks = {
                "mask_roi_pool": MultiScaleRoIAlign(LEVELS, 14, 0),
                "mask_head": MaskRCNNHeads(width, (width,) * 4, 1),
                "mask_predictor": MaskRCNNPredictor(width, width, spec.classes),
            }
        super().__init__(
            MultiScaleRoIAlign(LEVELS, 7, 0), head, FastRCNNPredictor(hidden, spec.classes),
            stage.overlap, stage.overlap, spec.sampled, 0.25, tuple(1 / each for each in stage.deviations),
            score_thresh=0.05, nms_thresh=0.5, detections_per_img=100, **masks,
        )  # fmt: skip
        self.stage, self.keep_ratio, self.recompute = stage, spec.keep_ratio, spec.recompute

    def select(self, proposals: list[Tensor], targets: Targets) -> list[list[Tensor]]:
        """Return the proposals to train with, among them objects' own boxes; the object that each is matched with; and
        its class. ``select_training_samples`` does the same, and codes boxes besides."""
        boxes = [its["boxes"].to(proposals[0].dtype) for its in targets]
        proposals = self.add_gt_proposals(proposals, boxes)
        found = proposals, *self.assign_targets_to_proposals(proposals, boxes, [its["labels"] for its in targets])
        chosen = self.subsample(found[2])
        return [[its[index] for its, index in zip(values, chosen, strict=True)] for values in found]

    def predict(self, features: Features, proposals: list[Tensor], padded: tuple[int, int]) -> tuple[Tensor, Tensor]:
        """Return class logits ``[n, classes]`` and coded boxes ``[n, classes, 4]`` of all images' proposals."""

        def both(pooled: Tensor) -> Tensor:
            return torch.cat(self.box_predictor(self.box_head(pooled)), 1)

        found = self.with_kept_gradients(both, self.box_roi_pool(features, proposals, [padded] * len(proposals)))
        found = at_least_float(found)
        classes = found.shape[1] // 5
        return found[:, :classes], found[:, classes:].unflatten(1, (classes, 4))

    def predict_masks(self, features: Features, boxes: list[Tensor], padded: tuple[int, int]) -> Tensor:
        """Return mask logits ``[n, classes, 28, 28]``."""

        def both(pooled: Tensor) -> Tensor:
            return self.mask_predictor(self.mask_head(pooled))

        return self.with_kept_gradients(both, self.mask_roi_pool(features, boxes, [padded] * len(boxes)))

    def with_kept_gradients(self, head: Callable[[Tensor], Tensor], pooled: Tensor) -> Tensor:
        """Run the head on every proposal, with gradients from a random share of them (``keep_ratio``)."""
        kept = round(self.keep_ratio * len(pooled))
        if not (self.training and torch.is_grad_enabled() and len(pooled)):
            return head(pooled)
        if kept < len(pooled):
            keep = torch.randperm(len(pooled), device=pooled.device)[: max(1, kept)]
            return torchsbp.sbp(head, pooled, keep, 0, recompute=self.recompute)
        if not self.recompute:
            return head(pooled)
        return checkpoint(head, pooled, use_reentrant=False, context_fn=self.contexts)

    def contexts(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        """Return contexts for a head's first run and its recomputation, so that batch norms count a batch once."""
        return nullcontext(), statistics_kept(self)

    def losses(
        self, logits: Tensor, deltas: Tensor, proposals: list[Tensor], labels: list[Tensor], aims: list[Tensor]
    ) -> dict[str, Tensor]:
        """Return the losses of class and box; ``aims`` are the boxes of the objects that proposals are matched with."""
        label = torch.cat(labels)
        positive = label.nonzero().flatten()
        own = deltas[positive, label[positive]]
        pairs = torch.cat(proposals)[positive], torch.cat(aims)[positive]
        box = box_loss(self.box_coder, own, *pairs, self.stage.decoded) / max(1, len(label))
        return {"class": self.stage.weight * F.cross_entropy(logits, label), "box": self.stage.weight * box}

    def refine(
        self,
        logits: Tensor,
        deltas: Tensor,
        proposals: list[Tensor],
        sizes: list[tuple[int, int]],
        labels: list[Tensor] | None = None,
    ) -> list[Tensor]:
        """Return proposals for the next stage: each is the box of its class or, where that is background or unknown, of
        the likeliest class of objects."""
        chosen = logits[:, 1:].argmax(1) + 1
        if labels is not None:
            label = torch.cat(labels)
            chosen = torch.where(label > 0, label, chosen)
        own = deltas[torch.arange(len(deltas), device=deltas.device), chosen].detach()
        boxes = self.box_coder.decode_single(own, torch.cat(proposals)).split([len(its) for its in proposals])
        return [clip_boxes_to_image(its, size) for its, size in zip(boxes, sizes, strict=True)]


@contextmanager
def statistics_kept(module: nn.Module) -> Iterator[None]:
    """Let batch norms update copies of their running statistics, and drop these. (Without any to update they would save
    other tensors than in the first run.)"""
    norms = [its for its in module.modules() if isinstance(its, _BatchNorm)]
    before = [(norm, name, value) for norm in norms for name, value in norm.named_buffers(recurse=False)]
    for norm, name, value in before:
        setattr(norm, name, value.clone())
    try:
        yield
    finally:
        for norm, name, value in before:
            setattr(norm, name, value)


def box_loss(coder: Any, deltas: Tensor, proposals: Tensor, aims: Tensor, decoded: bool) -> Tensor:
    """Sum over positive proposals: ten times 1 − GIoU of the decoded boxes, or the L1 distance of coded ones."""
    if decoded:
        return 10 * generalized_box_iou_loss(coder.decode_single(deltas, proposals), aims, reduction="sum")
    return F.l1_loss(deltas, coder.encode_single(aims, proposals), reduction="sum")


class Heads(nn.Module):
    """The stages, one after the other."""

    def __init__(self, stages: Sequence[StageSpec], spec: HeadSpec) -> None:
        super().__init__()
        self.stages: Any = nn.ModuleList(Stage(stage, spec) for stage in stages)
        self.masks = spec.masks

    def losses(
        self, features: Features, proposals: list[Tensor], sizes: list[tuple[int, int]], padded: tuple[int, int],
        targets: Targets,
    ) -> dict[str, Tensor]:  # fmt: skip
        """Return the losses by name; in a cascade, names end with the number of the stage."""
        found: dict[str, Tensor] = {}
        for number, stage in enumerate(self.stages):
            proposals, matched, labels = stage.select(proposals, targets)
            aims = [matched_boxes(its["boxes"], index) for its, index in zip(targets, matched, strict=True)]
            logits, deltas = stage.predict(features, proposals, padded)
            losses = stage.losses(logits, deltas, proposals, labels, aims)
            if self.masks:
                loss = mask_loss(stage, features, proposals, padded, labels, matched, targets)
                losses["mask"] = stage.stage.weight * loss
            suffix = str(number + 1) if len(self.stages) > 1 else ""
            found |= {name + suffix: loss for name, loss in losses.items()}
            if number + 1 < len(self.stages):
                refined = stage.refine(logits, deltas, proposals, sizes, labels)
                pairs = zip(refined, proposals, targets, strict=True)
                proposals = [boxes[~given(before, its["boxes"])] for boxes, before, its in pairs]
        return found

    def detect(
        self, features: Features, proposals: list[Tensor], sizes: list[tuple[int, int]], padded: tuple[int, int]
    ) -> list[dict[str, Tensor]]:
        """Return each image's boxes, classes, scores and masks: probabilities ``[n, 28, 28]`` within the boxes."""
        *others, last = self.stages
        scores = []
        for stage in others:
            logits, deltas = stage.predict(features, proposals, padded)
            scores.append(logits.softmax(1))
            proposals = stage.refine(logits, deltas, proposals, sizes)
        logits, deltas = last.predict(features, proposals, padded)
        scores.append(logits.softmax(1))
        mean = torch.stack(scores).mean(0).log()  # of which the next line takes the softmax
        found = last.postprocess_detections(mean, deltas.flatten(1), proposals, sizes)
        result = [{"boxes": b, "scores": s, "labels": c} for b, s, c in zip(*found, strict=True)]
        if self.masks:
            self.add_masks(result, features, padded)
        return result

    def add_masks(self, result: list[dict[str, Tensor]], features: Features, padded: tuple[int, int]) -> None:
        """Add to ``result`` the masks of the classes that were found, averaged over the stages."""
        boxes, labels = [its["boxes"] for its in result], torch.cat([its["labels"] for its in result])
        found = [at_least_float(stage.predict_masks(features, boxes, padded)) for stage in self.stages]
        mean = torch.stack([logits.sigmoid() for logits in found]).mean(0)
        masks = mean[torch.arange(len(labels), device=labels.device), labels]
        for its, mask in zip(result, masks.split([len(each) for each in boxes]), strict=True):
            its["masks"] = mask


def matched_boxes(boxes: Tensor, index: Tensor) -> Tensor:
    """Return the boxes that proposals are matched with; zeros in an image without objects."""
    return boxes[index] if len(boxes) else boxes.new_zeros(len(index), 4)


def given(proposals: Tensor, boxes: Tensor) -> Tensor:
    """Return which proposals are objects' own boxes, which ``select`` has put among them."""
    return (proposals[:, None] == boxes).all(2).any(1)


def mask_loss(
    stage: Stage, features: Features, proposals: list[Tensor], padded: tuple[int, int], labels: list[Tensor],
    matched: list[Tensor], targets: Targets,
) -> Tensor:  # fmt: skip
    """Return the cross entropy of positive proposals' masks, each of the proposal's class."""
    positive = [its.nonzero().flatten() for its in labels]
    boxes = [its[index] for its, index in zip(proposals, positive, strict=True)]
    matched = [its[index] for its, index in zip(matched, positive, strict=True)]
    logits = stage.predict_masks(features, boxes, padded)
    return maskrcnn_loss(logits, boxes, [t["masks"] for t in targets], [t["labels"] for t in targets], matched)
