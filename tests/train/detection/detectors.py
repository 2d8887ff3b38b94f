"""Tiny detectors and objects for the tests."""

from typing import Any

import torch
from torch import Tensor

from torchsbp.train.detection.backbone import Backbone, body
from torchsbp.train.detection.heads import CASCADE, MASK_RCNN, Heads, HeadSpec, StageSpec
from torchsbp.train.detection.model import Detector
from torchsbp.train.detection.rpn import RPN

TINY = {"depths": (1, 1, 2, 1), "dims": (8, 12, 16, 20), "ls_init_value": 0.5}
CLASSES = 3
SPEC = HeadSpec(CLASSES, width=32, hidden=16, sampled=16, norm="group")
STAGES = {"mask_rcnn": MASK_RCNN, "cascade": CASCADE}


def detector(
    kind: str = "mask_rcnn", sparse: bool = False, spec: HeadSpec = SPEC, stages: tuple[StageSpec, ...] | None = None
) -> Detector:
    """In float64, with weights at which all losses have slopes."""
    torch.manual_seed(0)
    backbone = Backbone(body("convnext_tiny", TINY, False, None, 32), spec.width)
    rpn = RPN(spec.width, 4, 50, 1 / 9, sparse)
    model = Detector(backbone, rpn, Heads(stages or STAGES[kind], spec)).double().train()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "body" not in name:
                parameter.add_(torch.randn_like(parameter) * 0.05)
    return model


PADDED = (64, 96)
SIZES = torch.tensor([[64, 96], [50, 70]])


def objects(masks: bool = True) -> list[dict[str, Tensor]]:
    """Two in the first image, one in the second."""
    boxes = [torch.tensor([[4.0, 6, 30, 40], [50, 20, 90, 60]]), torch.tensor([[10.0, 10, 44, 38]])]
    found = []
    for its, (height, width), labels in zip(boxes, SIZES.tolist(), ([1, 2], [2]), strict=True):
        target: dict[str, Any] = {"boxes": its.double(), "labels": torch.tensor(labels)}
        if masks:
            target["masks"] = torch.zeros(len(its), height, width, dtype=torch.uint8)
            for mask, (x0, y0, x1, y1) in zip(target["masks"], its.int().tolist(), strict=True):
                mask[y0:y1, x0 : (x0 + x1) // 2] = 1
        found.append(target)
    return found


def images(batch: int = 2) -> Tensor:
    return torch.randn(batch, 3, *PADDED, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
