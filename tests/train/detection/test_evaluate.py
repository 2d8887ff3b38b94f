"""Evaluation: pycocotools' twelve numbers for boxes and for masks; pictures and tables for the report."""

import io

import numpy as np
import pytest
import torch
from PIL import Image
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval

from torchsbp.train.data.coco import Objects
from torchsbp.train.data.shapes import shapes
from torchsbp.train.detection import evaluate as E
from torchsbp.train.detection.batches import Batch
from torchsbp.train.detection.draw import board, drawn


class Oracle(torch.nn.Module):
    """Finds most objects, somewhat beside them and sometimes as another class, and some that are not there."""

    def __init__(self, source) -> None:
        super().__init__()
        self.source, self.generator = source, torch.Generator().manual_seed(0)

    def forward(self, images, sizes):
        return [self.found(int(index)) for index in images[:, 0, 0, 0]]

    def found(self, index: int) -> dict[str, torch.Tensor]:
        target = self.source[index][1]
        boxes = torch.from_numpy(target["boxes"])
        boxes = torch.cat([boxes, torch.tensor([[5.0, 5, 30, 30]])])
        boxes = boxes + torch.randn(boxes.shape, generator=self.generator) * 2
        labels = torch.cat([torch.from_numpy(target["labels"]), torch.tensor([1])])
        keep = torch.rand(len(boxes), generator=self.generator) < 0.9
        masks = torch.rand(len(boxes), 28, 28, generator=self.generator) * 0.5 + 0.4
        scores = torch.rand(len(boxes), generator=self.generator)
        return {"boxes": boxes[keep], "labels": labels[keep], "scores": scores[keep], "masks": masks[keep]}


@pytest.fixture(scope="module")
def evaluated():
    source = shapes(24, False, True)
    for its in source.content["annotations"][::7]:
        its["iscrowd"] = 1
    evaluator = E.Precision(source)
    model = Oracle(source)
    for start in range(0, 24, 4):
        evaluator.update(model, batch_of(source, range(start, start + 4)), valid=3)
    return source, evaluator, evaluator.result()


def batch_of(source, indices) -> Batch:
    """Pictures that say which ones they are."""
    originals = [source[i][1]["size"] for i in indices]
    images = torch.tensor(indices).view(-1, 1, 1, 1).expand(-1, 3, 2, 2)
    return Batch(images, torch.tensor(originals), [], list(indices), originals)


class Blind(torch.nn.Module):
    def forward(self, images, sizes):
        nothing = {"boxes": torch.zeros(0, 4), "labels": torch.zeros(0, dtype=torch.int64), "scores": torch.zeros(0)}
        return [nothing] * len(images)


@pytest.mark.parametrize("kind, name", [("box", "bbox"), ("mask", "segm")])
def test_the_numbers_are_those_of_pycocotools(evaluated, kind, name, capsys):
    source, evaluator, result = evaluated
    truth = COCO()
    truth.dataset = source.content
    truth.createIndex()
    found = [dict(its) for its in evaluator.found]
    for its in found:
        if kind == "mask":
            del its["bbox"]
    run = COCOeval(truth, truth.loadRes(found), name)
    run.params.imgIds = [source.images[i]["id"] for i in range(24) if i % 4 < 3]
    run.evaluate()
    run.accumulate()
    run.summarize()
    expected = [100 * x if x >= 0 else -1 for x in run.stats]
    assert [result[f"{kind}_{number}"] for number in E.NUMBERS] == pytest.approx(expected, abs=1e-9)
    assert 5 < result[f"{kind}_ap50"] < 95
    shown = capsys.readouterr().out
    assert "IoU" in shown  # pycocotools' alone


def test_samples_that_only_fill_a_batch_do_not_count(evaluated):
    source, evaluator, _ = evaluated
    seen = {its["image_id"] for its in evaluator.found}
    assert seen.isdisjoint({source.images[i]["id"] for i in range(3, 24, 4)})


def test_images_that_were_not_seen_are_left_out_with_their_objects(evaluated):
    """The numbers are those of data without them."""
    source, evaluator, result = evaluated
    unseen = {source.images[i]["id"] for i in range(3, 24, 4)}
    objects = [its for its in source.content["annotations"] if its["image_id"] in unseen and not its["iscrowd"]]
    assert result["images_left_out"] == 6
    assert result["objects_left_out"] == len(objects) > 6
    content = dict(source.content)
    for part, name in (("images", "id"), ("annotations", "image_id")):
        content[part] = [its for its in content[part] if its[name] not in unseen]
    fewer = E.Precision(Objects(content, "fewer", source.read, False, True))
    fewer.seen, fewer.found = set(range(18)), evaluator.found
    assert fewer.result() == {name: value for name, value in result.items() if "left_out" not in name}


def test_metrics_have_the_names_of_the_numbers(evaluated):
    assert [metric.name for metric in E.metrics(True)] == [name for name in evaluated[2] if "left_out" not in name]
    assert len(E.metrics(False)) == 12


def test_nothing_found_is_zero_and_nothing_to_be_found_is_below():
    source = shapes(8, False, True)
    source.content["annotations"] = [its for its in source.content["annotations"] if its["category_id"] != 3]
    assert max(its["area"] for its in source.content["annotations"]) < 96**2
    evaluator = E.Precision(source)
    evaluator.update(Blind(), batch_of(source, range(8)), valid=8)
    result = evaluator.result()
    assert {name for name, value in result.items() if value == -1} == {
        "box_ap_large", "box_ar_large", "mask_ap_large", "mask_ar_large"
    }  # fmt: skip
    assert set(result.values()) == {-1.0, 0.0}
    assert evaluator.by_class["box"][2] == -1
    assert evaluator.sections()["Predictions"][:4] == b"\x89PNG"


def test_an_object_of_id_0_is_found():
    """pycocotools takes the 0 for "not found"."""
    source = shapes(4, False, False)
    for number, its in enumerate(source.content["annotations"]):
        its["id"] = number
    evaluator = E.Precision(source)
    evaluator.seen = set(range(4))
    evaluator.found = [{**its, "score": 0.9} for its in source.content["annotations"]]
    assert evaluator.result()["box_ap"] == pytest.approx(100)


def test_boxes_are_in_pixels_of_the_original():
    detections = {
        "boxes": torch.tensor([[10.0, 20, 30, 60]]), "labels": torch.tensor([2]), "scores": torch.tensor([0.75]),
        "masks": torch.ones(1, 28, 28),
    }  # fmt: skip
    (found,) = E.objects_of(detections, (100, 50), (200, 150))
    assert found["bbox"] == [30, 40, 60, 80]
    assert (found["label"], found["score"]) == (2, 0.75)
    mask = E.tools().mask.decode(found["segmentation"])
    assert mask.shape == (200, 150)
    rows, columns = np.nonzero(mask)
    assert abs(rows.min() - 40) <= 2
    assert abs(columns.max() - 90) <= 2


def test_the_report_shows_pictures_and_classes(evaluated):
    sections = evaluated[1].sections()
    assert Image.open(io.BytesIO(sections["Predictions"])).width == 1200
    for name in ("disc", "rectangle", "triangle"):
        assert f"<td>{name}</td>" in sections["Average precision by class"]


def test_objects_are_drawn():
    picture = Image.new("RGB", (60, 40), (255, 255, 255))
    found = {"bbox": [20, 20, 20, 10], "category_id": 1, "score": 0.9}
    pixels = np.asarray(drawn(picture, [found, {**found, "score": 0.1, "bbox": [0, 0, 3, 3]}], {1: "disc"}))
    assert tuple(pixels[25, 20]) == tuple(pixels[30, 30]) == (213, 94, 0)  # the frame
    assert tuple(pixels[25, 30]) == (255, 255, 255)
    assert tuple(pixels[2, 2]) == (255, 255, 255)  # too unsure
    mask = np.zeros((40, 60), np.uint8, order="F")
    mask[22:28, 22:38] = 1
    tinted = np.asarray(drawn(picture, [{**found, "segmentation": E.tools().mask.encode(mask)}], {1: "disc"}))
    assert tuple(tinted[25, 30]) == (234, 174, 127)
    assert Image.open(io.BytesIO(board([picture] * 4))).size == (1200, 2 * 267)


@pytest.mark.parametrize("box", [[110, 2, 8, 8], [2, 2, 8, 8], [90, 78, 9, 1]])
def test_labels_stay_in_the_picture(box):
    """All of the text is seen: as much of its blue, which its ground has not, as elsewhere."""
    picture = Image.new("RGB", (120, 80))
    blue = []
    for place in (box, [40, 40, 8, 8]):
        found = drawn(picture, [{"bbox": place, "category_id": 1, "score": 0.9}], {1: "disc"})
        blue.append(int(np.asarray(found)[:, :, 2].sum()))
    assert blue[0] == blue[1] > 10_000


def test_a_label_longer_than_the_picture_begins_at_its_left_edge():
    picture = Image.new("RGB", (40, 40))
    found = np.asarray(drawn(picture, [{"bbox": [30, 20, 5, 5], "category_id": 1, "score": 0.9}], {1: "disc" * 9}))
    assert (found[9:22, 0] == (213, 94, 0)).all(1).any()
