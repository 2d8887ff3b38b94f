"""Heads: their losses against plain written-out ones, Mask R-CNN against torchvision's, the stages of a cascade."""

import math
from collections import OrderedDict
from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torchvision.models.detection.roi_heads import RoIHeads

from torchsbp.errors import UsageError
from torchsbp.train.detection.backbone import LEVELS
from torchsbp.train.detection.heads import CASCADE, MASK_RCNN, Heads, HeadSpec, Stage, box_loss, given
from torchsbp.train.detection.model import Detector
from torchsbp.train.tasks import start
from torchsbp.train.tasks.detection import Detection, DetectionOptions, Lean, Model

from .detectors import CLASSES, PADDED, SIZES, SPEC, detector, images, objects

LISTED = [tuple(size) for size in SIZES.tolist()]


def plain_decode(deltas: list[float], box: list[float], deviations: tuple[float, ...]) -> list[float]:
    x0, y0, x1, y1 = box
    w, h = x1 - x0, y1 - y0
    dx, dy, dw, dh = (d * s for d, s in zip(deltas, deviations, strict=True))
    x, y = x0 + w / 2 + dx * w, y0 + h / 2 + dy * h
    w, h = w * math.exp(dw), h * math.exp(dh)
    return [x - w / 2, y - h / 2, x + w / 2, y + h / 2]


def plain_encode(aim: list[float], box: list[float], deviations: tuple[float, ...]) -> list[float]:
    w, h = box[2] - box[0], box[3] - box[1]
    moved = [((aim[0] + aim[2]) - (box[0] + box[2])) / 2 / w, ((aim[1] + aim[3]) - (box[1] + box[3])) / 2 / h]
    sides = [math.log((aim[2] - aim[0]) / w), math.log((aim[3] - aim[1]) / h)]
    return [value / s for value, s in zip(moved + sides, deviations, strict=True)]


def area(box: list[float]) -> float:
    return max(0.0, box[2] - box[0]) * max(0.0, box[3] - box[1])


def shared(a: list[float], b: list[float]) -> float:
    return area([max(a[0], b[0]), max(a[1], b[1]), min(a[2], b[2]), min(a[3], b[3])])


def plain_iou(a: list[float], b: list[float]) -> float:
    return shared(a, b) / (area(a) + area(b) - shared(a, b))


def plain_giou(a: list[float], b: list[float]) -> float:
    hull = area([min(a[0], b[0]), min(a[1], b[1]), max(a[2], b[2]), max(a[3], b[3])])
    union = area(a) + area(b) - shared(a, b)
    return plain_iou(a, b) - (hull - union) / hull


@pytest.mark.parametrize("stage", [*MASK_RCNN, *CASCADE])
def test_losses_of_class_and_box_are_the_written_out_ones(stage):
    torch.manual_seed(0)
    head = Stage(stage, SPEC)
    proposals = [torch.tensor([[3.0, 5, 33, 41], [50, 20, 88, 66]]), torch.tensor([[9.0, 9, 40, 40], [1, 2, 30, 30]])]
    aims = [torch.tensor([[4.0, 6, 30, 40], [50, 20, 90, 60]]), torch.tensor([[10.0, 10, 44, 38], [0, 0, 0, 0]])]
    labels = [torch.tensor([1, 2]), torch.tensor([2, 0])]
    logits, deltas = torch.randn(4, CLASSES), torch.randn(4, CLASSES, 4)
    found = head.losses(logits, deltas, proposals, labels, aims)
    label, box, aim = (torch.cat(its).tolist() for its in (labels, proposals, aims))
    classes = boxes = 0.0
    for i in range(4):
        row = logits[i].tolist()
        classes -= row[label[i]] - math.log(sum(map(math.exp, row)))
        own = deltas[i, label[i]].tolist()
        if label[i] and stage.decoded:
            boxes += 10 * (1 - plain_giou(plain_decode(own, box[i], stage.deviations), aim[i]))
        elif label[i]:
            wanted = plain_encode(aim[i], box[i], stage.deviations)
            boxes += sum(abs(a - b) for a, b in zip(own, wanted, strict=True))
    assert float(found["class"]) == pytest.approx(stage.weight * classes / 4, rel=1e-5)
    assert float(found["box"]) == pytest.approx(stage.weight * boxes / 4, rel=1e-5)


def test_the_cascade_is_the_published_one():
    assert [(s.overlap, s.weight, s.decoded, s.convolutions) for s in CASCADE] == [
        (0.5, 1.0, True, True), (0.6, 0.5, True, True), (0.7, 0.25, True, True)
    ]  # fmt: skip
    heads = Heads(CASCADE, replace(SPEC, norm="batch"))
    for stage, spec in zip(heads.stages, CASCADE, strict=True):
        assert stage.box_coder.weights == pytest.approx([1 / s for s in spec.deviations])
        assert stage.proposal_matcher.high_threshold == stage.proposal_matcher.low_threshold == spec.overlap
        kinds = [type(module).__name__ for module in stage.box_head.modules()]
        assert (kinds.count("Conv2d"), kinds.count("Linear"), kinds.count("SyncBatchNorm")) == (4, 1, 4)
        assert stage.box_predictor.bbox_pred.out_features == 4 * CLASSES  # class-specific


def test_mask_rcnn_has_the_losses_of_torchvision():
    """Of the same weights, proposals and random numbers; but for the box loss, which is L1 here and smooth there."""
    model = detector()
    features = model.backbone(images())
    proposals = [torch.rand(30, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(2)) * 30 for _ in SIZES]
    proposals = [torch.cat([its[:, :2], its[:, :2] + its[:, 2:] + 1], 1) for its in proposals]
    (stage,) = model.heads.stages
    torch.manual_seed(3)
    found = model.heads.losses(features, proposals, LISTED, PADDED, objects())
    stage.box_roi_pool(features, proposals, [PADDED] * 2)  # torchvision reads the scales from the first call
    torch.manual_seed(3)
    _, expected = RoIHeads.forward(stage, features, proposals, LISTED, objects())
    assert torch.equal(found["class"], expected["loss_classifier"])
    assert torch.equal(found["mask"], expected["loss_mask"])


def test_the_mask_loss_is_the_written_out_one():
    model = detector()
    features = model.backbone(images())
    targets = objects()
    proposals = [its["boxes"].clone() for its in targets]
    (stage,) = model.heads.stages
    torch.manual_seed(3)
    found = model.heads.losses(features, proposals, LISTED, PADDED, targets)["mask"]
    torch.manual_seed(3)
    chosen, matched, labels, _ = stage.select_training_samples(proposals, targets)
    logits = stage.predict_masks(features, [b[n > 0] for b, n in zip(chosen, labels, strict=True)], PADDED)
    total, row = 0.0, 0
    for boxes, index, its, target in zip(chosen, matched, labels, targets, strict=True):
        for box, number, label in zip(boxes, index, its, strict=True):
            if label > 0:
                wanted = sampled_mask(target["masks"][number].double(), box.tolist(), 28)
                own = logits[row, label].detach()
                total += float((own.exp().log1p() - wanted * own).mean())  # −t·log σ − (1 − t)·log(1 − σ)
                row += 1
    assert float(found.detach()) == pytest.approx(total / row, rel=1e-9)


def sampled_mask(mask: torch.Tensor, box: list[float], size: int) -> torch.Tensor:
    """Averages of bilinear samples on a grid in each of ``size`` × ``size`` cells of the box."""
    x0, y0, x1, y1 = box
    dx, dy = (x1 - x0) / size, (y1 - y0) / size
    nx, ny = max(1, math.ceil(dx)), max(1, math.ceil(dy))
    result, pixels = torch.zeros(size, size, dtype=mask.dtype), mask.tolist()
    for i in range(size):
        for j in range(size):
            points = [
                (y0 + (i + (a + 0.5) / ny) * dy, x0 + (j + (b + 0.5) / nx) * dx) for a in range(ny) for b in range(nx)
            ]
            result[i, j] = sum(bilinear(pixels, y, x) for y, x in points) / len(points)
    return result


def bilinear(pixels: list[list[float]], y: float, x: float) -> float:
    height, width = len(pixels), len(pixels[0])
    y, x = max(0.0, y), max(0.0, x)
    i, j = min(int(y), height - 1), min(int(x), width - 1)
    if i == height - 1:
        y = float(i)
    if j == width - 1:
        x = float(j)
    below, beside = min(i + 1, height - 1), min(j + 1, width - 1)
    v, u = y - i, x - j
    upper = (1 - u) * pixels[i][j] + u * pixels[i][beside]
    lower = (1 - u) * pixels[below][j] + u * pixels[below][beside]
    return (1 - v) * upper + v * lower


def test_the_nine_losses_of_a_cascade_are_the_written_out_ones():
    """Stage after stage: all proposals and the objects' own boxes are matched, compared and, but for these, refined."""
    heads = detector("cascade", spec=replace(SPEC, sampled=512)).heads  # more than there are: none is left out
    features = OrderedDict(
        (level, torch.randn(2, SPEC.width, 64 >> 2 + i, 96 >> 2 + i, dtype=torch.float64))
        for i, level in enumerate(LEVELS)
    )
    targets = objects()
    proposals = [around(its["boxes"], size) for its, size in zip(targets, LISTED, strict=True)]
    with torch.no_grad():
        found = heads.losses(features, proposals, LISTED, PADDED, targets)
        expected, stages = plain_cascade(heads, features, [its.tolist() for its in proposals], targets)
    assert found.keys() == expected.keys()
    assert len(found) == 9
    for name, value in expected.items():
        assert float(found[name]) == pytest.approx(value, rel=1e-8), name  # torchvision's GIoU has ε = 1e-7 in areas
    first, second, third = ([(row.label > 0, row.likeliest == row.label) for row in rows] for rows in stages)
    assert len(first) == len(second) == len(third)
    for rows in (first, second, third):  # else some mistakes would not be seen
        assert {(True, True), (True, False), (False, False)} == set(rows)
    assert len({sum(known for known, _ in rows) for rows in (first, second, third)}) > 1


def around(boxes: torch.Tensor, size: tuple[int, int]) -> torch.Tensor:
    """Six boxes near each of these, two that reach the image's far edges, and two in its corner."""
    torch.manual_seed(0)
    near = boxes.repeat(6, 1)
    near = near + 8 * (torch.rand_like(near) - 0.5)
    height, width = size
    edges = [[width - 30, 5, width, 30], [5, height - 25, 40, height], [0, 0, 9, 7], [1, 0, 12, 9]]
    return torch.cat([near, torch.tensor(edges, dtype=near.dtype)])


class Row(NamedTuple):
    """A proposal of a stage: its image, its box, whether it is an object's own box, what it was matched with."""

    image: int
    box: list[float]
    own: bool
    object: int
    label: int
    likeliest: int = 0


def plain_cascade(
    heads: Heads, features: OrderedDict[str, torch.Tensor], boxes: list[list[list[float]]], targets: list[dict]
) -> tuple[dict[str, float], list[list[Row]]]:
    losses: dict[str, float] = {}
    stages = []
    settings = zip((0.5, 0.6, 0.7), (0.1, 0.05, 0.033), (0.2, 0.1, 0.067), (1, 0.5, 0.25), strict=True)
    for number, (stage, (overlap, place, side, weight)) in enumerate(zip(heads.stages, settings, strict=True), 1):
        rows = [row for image, its in enumerate(boxes) for row in matched(image, its, targets[image], overlap)]
        pooled = [torch.tensor([row.box for row in rows if row.image == i], dtype=torch.float64) for i in range(2)]
        hidden = stage.box_head(stage.box_roi_pool(features, pooled, [PADDED] * 2))
        scores, coded = (its.tolist() for its in stage.box_predictor(hidden))
        rows = [row._replace(likeliest=1 + argmax(own[1:])) for row, own in zip(rows, scores, strict=True)]

        def decoded(i: int, label: int, rows=rows, coded=coded, deviations=(place, place, side, side)) -> list[float]:
            return plain_decode(coded[i][4 * label : 4 * label + 4], rows[i].box, deviations)

        classes = [math.log(sum(map(math.exp, own))) - own[row.label] for row, own in zip(rows, scores, strict=True)]
        positive = [i for i, row in enumerate(rows) if row.label]
        aims = {i: targets[rows[i].image]["boxes"][rows[i].object].tolist() for i in positive}
        apart = [10 * (1 - plain_giou(decoded(i, rows[i].label), aims[i])) for i in positive]
        masks = plain_mask_losses(stage, features, [rows[i] for i in positive], targets)
        losses[f"class{number}"] = weight * sum(classes) / len(rows)
        losses[f"box{number}"] = weight * sum(apart) / len(rows)
        losses[f"mask{number}"] = weight * sum(masks) / len(masks)
        boxes = [
            [cut(decoded(i, row.label or row.likeliest), LISTED[image]) for i, row in enumerate(rows)
             if row.image == image and not row.own]
            for image in range(2)
        ]  # fmt: skip
        stages.append(rows)
    return losses, stages


def matched(image: int, boxes: list[list[float]], target: dict, overlap: float) -> list[Row]:
    """With the object that they overlap most, if that is enough; background is 0."""
    aims, labels = target["boxes"].tolist(), target["labels"].tolist()
    rows = []
    for box, own in [*((its, False) for its in boxes), *((its, True) for its in aims)]:
        overlaps = [plain_iou(box, aim) for aim in aims]
        best = argmax(overlaps)
        rows.append(Row(image, box, own, best, labels[best] if overlaps[best] >= overlap else 0))
    return rows


def plain_mask_losses(
    stage: Stage, features: OrderedDict[str, torch.Tensor], rows: list[Row], targets: list[dict]
) -> list[float]:
    pooled = [torch.tensor([row.box for row in rows if row.image == i], dtype=torch.float64) for i in range(2)]
    logits = stage.mask_predictor(stage.mask_head(stage.mask_roi_pool(features, pooled, [PADDED] * 2)))
    found = []
    for row, its in zip(rows, logits, strict=True):
        wanted = sampled_mask(targets[row.image]["masks"][row.object].double(), row.box, 28)
        own = its[row.label]
        found.append(float((own.exp().log1p() - wanted * own).mean()))  # −t·log σ − (1 − t)·log(1 − σ)
    return found


def cut(box: list[float], size: tuple[int, int]) -> list[float]:
    height, width = size
    return [min(max(side, 0.0), limit) for side, limit in zip(box, (width, height, width, height), strict=True)]


def argmax(values: list[float]) -> int:
    return max(range(len(values)), key=values.__getitem__)


def test_a_stage_refines_what_the_next_is_trained_with():
    """By its class where that is known, else by the likeliest; cut to the image; the objects' own boxes are not."""
    stage = Stage(CASCADE[0], SPEC)
    proposals = [torch.tensor([[0.0, 0, 20, 20], [60, 40, 90, 62]])]
    logits = torch.tensor([[5.0, 1.0, 0.0], [5.0, 0.0, 1.0]])
    deltas = torch.zeros(2, CLASSES, 4)
    deltas[0, 2] = torch.tensor([10.0, 0, 0, 0])  # a whole width
    deltas[1, 2] = torch.tensor([10.0, 0, 0, 0])
    refined = stage.refine(logits, deltas, proposals, [(64, 96)], [torch.tensor([2, 0])])
    assert refined[0].tolist() == [[20, 0, 40, 20], [90, 40, 96, 62]]
    assert stage.refine(logits, deltas, proposals, [(64, 96)])[0].tolist() == [[0, 0, 20, 20], [90, 40, 96, 62]]
    assert given(proposals[0], torch.tensor([[60.0, 40, 90, 62]])).tolist() == [False, True]
    assert given(proposals[0], torch.zeros(0, 4)).tolist() == [False, False]


def test_scores_and_masks_are_averaged_over_the_stages():
    model = detector("cascade").eval()
    features = model.backbone(images())
    proposals = [torch.tensor([[4.0, 6, 30, 40], [50, 20, 90, 60]], dtype=torch.float64) for _ in SIZES]
    seen: list[tuple] = []
    for stage in model.heads.stages:
        stage.score_thresh = 0.0
        predict = stage.predict

        def told(features, proposals, padded, stage=stage, predict=predict):
            found = predict(features, proposals, padded)
            seen.append((stage, proposals, *found))
            return found

        stage.predict = told
    with torch.no_grad():
        result = model.heads.detect(features, proposals, LISTED, PADDED)
    assert len(seen) == 3
    mean = sum(logits.softmax(1) for *_, logits, _ in seen) / 3
    last, boxes, _, deltas = seen[-1]
    first = result[0]
    best = int(first["scores"].argmax())
    assert float(first["scores"][best]) == pytest.approx(float(mean[:2, 1:].max()), rel=1e-9)
    row, label = divmod(int(mean[:2, 1:].flatten().argmax()), CLASSES - 1)
    assert int(first["labels"][best]) == label + 1
    wanted = last.box_coder.decode_single(deltas[row : row + 1, label + 1], boxes[0][row : row + 1])[0]
    limit = torch.tensor([96.0, 64, 96, 64], dtype=torch.float64)
    torch.testing.assert_close(first["boxes"][best], wanted.clamp(min=0).minimum(limit))
    with torch.no_grad():
        masks = [s.predict_masks(features, [r["boxes"] for r in result], PADDED).sigmoid() for s in model.heads.stages]
    expected = (sum(masks) / 3)[torch.arange(len(masks[0])), torch.cat([r["labels"] for r in result])]
    torch.testing.assert_close(torch.cat([r["masks"] for r in result]), expected)


@pytest.mark.parametrize("kind", ["mask_rcnn", "cascade"])
def test_an_image_without_objects_has_background_alone(kind):
    model = detector(kind)
    empty = {"boxes": torch.zeros(0, 4).double(), "labels": torch.zeros(0, dtype=torch.int64)}
    targets = [{**empty, "masks": torch.zeros(0, *size, dtype=torch.uint8)} for size in LISTED]
    losses = model(images(), SIZES, targets)
    assert all(
        float(loss.detach()) == 0 for name, loss in losses.items() if name.startswith(("box", "mask", "proposals"))
    )
    sum(losses.values()).backward()
    assert all(parameter.grad is not None for parameter in model.parameters())  # as DDP needs


@pytest.mark.parametrize("kind, norm", [("mask_rcnn", "group"), ("cascade", "group"), ("cascade", "batch")])
def test_recomputed_heads_have_the_same_gradients_and_statistics(kind, norm):
    plain, recomputed = (
        after_a_step(kind, replace(SPEC, norm=norm, recompute=recompute)) for recompute in (False, True)
    )
    found = dict(recomputed.named_parameters())
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(found[name].grad, parameter.grad, rtol=1e-10, atol=1e-12, msg=name)
    statistics = dict(plain.named_buffers())
    assert any(name.endswith("running_var") for name in statistics) == (norm == "batch")
    for name, value in recomputed.named_buffers():
        assert torch.equal(value, statistics[name]), name


def after_a_step(kind: str, spec: HeadSpec) -> Detector:
    model = detector(kind, spec=spec)
    torch.manual_seed(5)
    sum(model(images(), SIZES, objects()).values()).backward()
    return model


def test_sampled_proposals_are_those_that_heads_learn_from():
    """A head on all of them, its gradient from the kept ones."""
    stage = Stage(MASK_RCNN[0], replace(SPEC, keep_ratio=0.25)).train()
    pooled = torch.randn(16, SPEC.width, 7, 7, requires_grad=True)
    found = stage.with_kept_gradients(stage.box_head, pooled)
    torch.testing.assert_close(found, stage.box_head(pooled))
    found.sum().backward()
    assert int((pooled.grad.flatten(1).abs().sum(1) > 0).sum()) == 4
    stage.eval()
    assert stage.with_kept_gradients(stage.box_head, pooled).grad_fn is not None


@pytest.mark.parametrize(
    "model, lean, message",
    [
        ({"norm": "batch"}, {"proposals": 0.5}, r"statistics would differ; set task\.model\.norm=group"),
        (
            {"norm": "group", "width": 48},
            {},
            r"width=48 is not allowed; allowed: multiples of 32, .* set task\.model\.norm=b",
        ),
    ],
)
def test_what_a_norm_cannot_be_used_with_is_refused(model, lean, message):
    options = DetectionOptions("detection", Model(kind="cascade_mask_rcnn", **model), Lean(**lean))
    with pytest.raises(UsageError, match=message):
        start(options, seed=0)
    Detection(replace(options, model=replace(options.model, kind="mask_rcnn")), 0, ["disc"])  # has no norm


def test_the_loss_of_decoded_boxes_has_a_slope_where_they_are_apart():
    coder = Stage(CASCADE[0], SPEC).box_coder
    deltas = torch.zeros(1, 4, requires_grad=True)
    loss = box_loss(coder, deltas, torch.tensor([[0.0, 0, 10, 10]]), torch.tensor([[50.0, 0, 60, 10]]), decoded=True)
    loss.backward()
    assert float(loss.detach()) > 10
    assert deltas.grad[0, 0] < 0
    assert F.l1_loss(deltas.grad[:, 1], torch.zeros(1)) < 1e-6
