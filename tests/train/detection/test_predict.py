"""Predictions as COCO's json: ids of the data's categories, areas of masks, pixels of the file."""

import pytest
import torch
from PIL import Image
from torchvision.transforms import v2

from torchsbp.train.data.coco_check import check
from torchsbp.train.data.masks import tools
from torchsbp.train.detection.batches import Prepared, collate
from torchsbp.train.detection.predict import DetectionPredictor


class One(torch.nn.Module):
    """An object of the second class, and its mask: a box's left half."""

    def __init__(self, masks: bool) -> None:
        super().__init__()
        self.masks = masks

    def forward(self, images, sizes):
        found = {"boxes": torch.tensor([[4.0, 6, 24, 16]]), "labels": torch.tensor([2]), "scores": torch.tensor([0.9])}
        if self.masks:
            found["masks"] = (torch.arange(28) < 14).float().expand(1, 28, 28)
        return [found] * len(images)


def document(path, masks: bool) -> dict:
    """Of a picture of 60 × 40 pixels that the model sees at half of its size."""
    Image.new("RGB", (60, 40)).save(path)
    size = Prepared(v2.Resize((20, 30)))
    predictor = DetectionPredictor(
        {18: "dog", 90: "brush"}, size, lambda its: collate(its, [], 32), lambda batch, training: batch
    )
    found = predictor.predict(One(masks), [predictor.read(path)])
    assert found[0].rows == [("brush", 0.9, 8, 12, 40, 20)]
    assert found[0].caption == "brush 0.90"
    assert predictor.picture(path, found[0]).getpixel((8, 20)) != (0, 0, 0)
    return predictor.document(["one.png"], [its.record for its in found])


@pytest.mark.parametrize("masks", [True, False])
def test_the_json_is_cocos(tmp_path, masks):
    content = document(tmp_path / "one.png", masks)
    check(content, "predictions", masks)
    assert content["categories"] == [{"id": 18, "name": "dog"}, {"id": 90, "name": "brush"}]
    assert content["images"] == [{"id": 1, "file_name": "one.png", "height": 40, "width": 60}]
    (found,) = content["annotations"]
    assert (found["category_id"], found["image_id"], found["bbox"]) == (90, 1, [8, 12, 40, 20])
    if masks:
        assert found["area"] == tools().mask.decode(found["segmentation"]).sum() == 21 * 20  # a pixel of both halves
    else:
        assert found["area"] == 40 * 20
