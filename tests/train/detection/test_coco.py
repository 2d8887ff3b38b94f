"""COCO's json: what is read, what is left out and counted, what is refused with file and id."""

import copy
import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from torchsbp.errors import DataError
from torchsbp.train.data import shapes as S
from torchsbp.train.data.coco import open_coco
from torchsbp.train.data.samples import Samples

SQUARE = [10, 10, 30, 10, 30, 25, 10, 25]
TEXT = "j<?i" + "0" * 38 + "VU1"
"""its run lengths in an image of 40 × 60 pixels"""


def annotation(number: int, image: int = 5, **changes) -> dict:
    its = {"id": number, "image_id": image, "category_id": 18, "bbox": [10, 10, 20, 15], "iscrowd": 0, "area": 300}
    return {**its, "segmentation": [SQUARE], **changes}


CONTENT = {
    "images": [
        {"id": 5, "file_name": "five.png", "height": 40, "width": 60},
        {"id": 9, "file_name": "nine.png", "height": 50, "width": 30},
        {"id": 12, "file_name": "empty.png", "height": 40, "width": 60},
    ],
    "categories": [{"id": 90, "name": "toothbrush"}, {"id": 18, "name": "dog"}, {"id": 44, "name": "bottle"}],
    "annotations": [
        annotation(1),
        annotation(2, category_id=90, segmentation={"size": [40, 60], "counts": [0, 40 * 60]}),
        annotation(3, image=9, bbox=[-5, 40, 100, 100], category_id=44),
    ],
}


def written(folder: Path, content=CONTENT) -> Path:
    for image in CONTENT["images"]:
        generator = np.random.default_rng(image["id"])
        pixels = generator.integers(0, 256, (image["height"], image["width"], 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / image["file_name"])
    path = folder / "objects.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def opened(folder: Path, content=CONTENT, training: bool = True, masks: bool = True):
    return open_coco(written(folder, content), folder, training, masks)


def changed(number: int = 0, **changes) -> dict:
    """CONTENT with one annotation changed."""
    content = copy.deepcopy(CONTENT)
    content["annotations"][number] |= changes
    return content


def test_objects_are_read(tmp_path):
    found = opened(tmp_path)
    assert len(found) == 2
    picture, target = found[0]
    assert picture.size == (60, 40)
    assert target["boxes"].tolist() == [[10, 10, 30, 25]] * 2
    assert target["size"] == (40, 60)
    assert target["masks"].shape == (2, 40, 60)
    assert target["masks"][0].sum() == 20 * 15
    assert target["masks"][1].all()


def test_categories_with_holes_are_numbered_by_their_ids(tmp_path):
    found = opened(tmp_path)
    assert found.names == ["dog", "bottle", "toothbrush"]
    assert found[0][1]["labels"].tolist() == [1, 3]
    assert found.category_ids == [18, 44, 90]


def test_boxes_are_cut_to_the_image(tmp_path):
    assert opened(tmp_path)[1][1]["boxes"].tolist() == [[0, 40, 30, 50]]


def test_images_without_objects_are_not_trained_with_but_evaluated(tmp_path):
    assert len(opened(tmp_path)) == 2
    found = opened(tmp_path, training=False)
    assert len(found) == 3
    target = found[2][1]
    assert target["boxes"].shape == (0, 4)
    assert target["masks"].shape == (0, 40, 60)


@pytest.mark.parametrize("box", [[10, 10, 0, 15], [10, 10, 20, 0], [70, 10, 5, 5], [10, 10, 0.4, 15]])
def test_boxes_of_no_area_are_left_out_and_counted(tmp_path, box):
    found = opened(tmp_path, changed(bbox=box))
    assert len(found[0][1]["boxes"]) == 1
    assert "1 boxes thinner than a pixel, 1 images without objects" in found.notes


def test_boxes_that_are_cut_are_counted(tmp_path):
    assert opened(tmp_path).notes.endswith("; cut to the image: 1 boxes")
    inside = changed(2, bbox=[5, 40, 25.004, 10])  # COCO rounds to two decimals
    assert opened(tmp_path, inside).notes.endswith("not trained with: 1 images without objects")


OUTSIDE = {
    "right": [[100, 10, 120, 10, 120, 30]],
    "above": [[10, -30, 20, -30, 20, 0]],
    "each elsewhere": [[-9, 1, -1, 1, -1, 9], [10, 40, 30, 40, 30, 50]],
    "numbers": {"size": [40, 60], "counts": [40 * 60]},
    "text": {"size": [40, 60], "counts": "P[2"},
}


@pytest.mark.parametrize("case", OUTSIDE)
def test_masks_outside_their_image_are_left_out_and_counted(tmp_path, case):
    content = changed(segmentation=OUTSIDE[case])
    found = opened(tmp_path, content)
    assert found[0][1]["labels"].tolist() == [3]
    assert "not trained with: 1 masks outside their image, 1 images without objects" in found.notes
    assert len(opened(tmp_path, content, masks=False)[0][1]["labels"]) == 2


def test_a_mask_partly_outside_its_image_is_trained_with(tmp_path):
    found = opened(tmp_path, changed(segmentation=[[-9, 1, -1, 1, -1, 9], [50, 30, 70, 30, 70, 50, 50, 50]]))
    assert found[0][1]["masks"][0].sum() == 10 * 10


def test_what_evaluation_finds_in_its_data_is_told(tmp_path):
    content = changed(iscrowd=1)
    content["annotations"] += [annotation(4, bbox=[3, 3, 0, 9]), annotation(5, segmentation=OUTSIDE["right"])]
    found = opened(tmp_path, content, training=False)
    assert found.notes.removeprefix(found.file) == (
        ": 3 images to evaluate with; of note: 1 crowd regions, 1 boxes thinner than a pixel, 1 masks outside their "
        "image, 1 images without objects, 1 boxes beyond their image"
    )
    assert len(found.ground_truth.anns) == 5


def test_crowds_are_left_out_and_counted(tmp_path):
    crowd = {"size": [40, 60], "counts": [100, 200, 2100]}
    found = opened(tmp_path, changed(iscrowd=1, segmentation=crowd))
    assert found[0][1]["labels"].tolist() == [3]
    assert "1 crowd regions" in found.notes
    assert found.ground_truth.anns[1]["iscrowd"] == 1


def test_what_others_leave_out_is_added(tmp_path):
    content = copy.deepcopy(CONTENT)
    for its in content["annotations"]:
        del its["iscrowd"], its["area"]
    assert opened(tmp_path, content).content["annotations"][0]["area"] == 300


def other(part: str, number: int = 0, **changes) -> dict:
    """CONTENT with one image or category changed."""
    content = copy.deepcopy(CONTENT)
    content[part][number] |= changes
    return content


REFUSED = {
    "no json": ("{", "objects.json is no json"),
    "a list": ([], r"objects.json is no COCO json: it needs the lists images, annotations, categories; found: a list"),
    "other json": ({"images": []}, "is no COCO json: .* found: images"),
    "no box": (
        {**CONTENT, "annotations": [{"id": 1, "image_id": 5, "category_id": 18}]},
        "number 0 of its annotations has no bbox",
    ),
    "ids twice": (changed(1, id=1), "the id 1 is there twice among its annotations"),
    "another image": (changed(image_id=77), "annotation 1 of .*objects.json: there is no image 77"),
    "another category": (changed(category_id=1), r"annotation 1 .*no category 1; known: \[18, 44, 90\]"),
    "three numbers": (changed(bbox=[1, 2, 3]), r"annotation 1 of .*its bbox is \[1, 2, 3\], not four numbers"),
    "a box of text": (changed(bbox=["a", 1, 2, 3]), "annotation 1 .*not four numbers"),
    "infinite": (json.dumps(changed(bbox=[float("inf"), 1, 2, 3])), "annotation 1 .*not four numbers"),
    "negative": (changed(bbox=[5, 5, -1, 5]), "annotation 1 .*has a negative side"),
    "no mask": (changed(segmentation=[]), "annotation 1 .*no mask .*task.model.masks=false"),
    "null mask": (changed(segmentation=None), "annotation 1 .*no mask"),
    "two points": (changed(segmentation=[[1, 2, 3, 4]]), r"annotation 1 .*three points or more: \[1, 2, 3, 4\]"),
    "odd": (changed(segmentation=[[*SQUARE, 1]]), "annotation 1 .*three points or more"),
    "NaN": (json.dumps(changed(segmentation=[[float("nan")] * 8])), "annotation 1 .*three points or more"),
    "text": (changed(segmentation="mask"), "annotation 1 .*neither polygons nor run lengths"),
    "another size": (changed(segmentation={"size": [4, 4], "counts": [16]}), r"annotation 1 .*\[4, 4\].*\[40, 60\]"),
    "too short": (changed(segmentation={"size": [40, 60], "counts": [1, 2]}), "annotation 1 .*do not fill its image"),
    "numbers": (changed(segmentation={"size": [40, 60], "counts": 3}), "annotation 1 .*neither numbers nor text"),
    "no size": (changed(segmentation={"size": None, "counts": [1]}), r"annotation 1 .*of None pixels.*\[40, 60\]"),
    "too far": (changed(segmentation=[[1e300] * 6]), "annotation 1 .*three points or more"),
    "text that ends": (changed(segmentation={"size": [40, 60], "counts": "ooo"}), "annotation 1 .*can't be decoded"),
    "short text": (changed(segmentation={"size": [40, 60], "counts": "12"}), "annotation 1 .*can't be decoded.*2400"),
    "no text": (changed(segmentation={"size": [40, 60], "counts": "no mask ü"}), "annotation 1 .*can't be decoded"),
    "image a list": (changed(image_id=[1]), r"annotation 1 of .*json.*: its image_id is \[1\], not a whole number"),
    "category a list": (changed(category_id=[1]), r"annotation 1 .*its category_id is \[1\], not a whole number"),
    "id of text": (changed(id="one"), "annotation one of .*number 0 of its annotations: its id is 'one', not a whole"),
    "crowd null": (changed(iscrowd=None), "annotation 1 .*its iscrowd is None, not 0 or 1"),
    "crowd 2": (changed(iscrowd=2), "annotation 1 .*its iscrowd is 2, not 0 or 1"),
    "area text": (changed(area="big"), "annotation 1 .*its area is 'big', not a number that is not negative"),
    "area null": (changed(area=None), "annotation 1 .*its area is None, not a number"),
    "area negative": (changed(area=-1), "annotation 1 .*its area is -1, not a number that is not negative"),
    "yes": (changed(bbox=[True, 1, 5, 5]), "annotation 1 .*not four numbers"),
    "vast": (json.dumps(changed(bbox=[10**400, 1, 5, 5])), "annotation 1 .*its bbox is .* …, not four numbers"),
    "width text": (other("images", width="60"), "image 5 of .*: its width is '60', not a whole number above 0"),
    "width 0": (other("images", width=0), "image 5 of .*: its width is 0, not a whole number above 0"),
    "height 4.5": (other("images", 1, height=4.5), "image 9 of .*: its height is 4.5, not a whole number above 0"),
    "file 5": (other("images", file_name=5), "image 5 of .*: its file_name is 5, not text"),
    "image id null": (other("images", id=None), "image None of .*json, number 0 of its images: its id is None, not a"),
    "category text": (other("categories", 2, id="x"), "category x of .*: its id is 'x', not a whole number"),
    "name null": (other("categories", name=None), "category 90 of .*: its name is None, not text or a number"),
    "no record": ({**CONTENT, "images": [3]}, "number 0 of its images has no id, file_name, width, height"),
    "deep": ("[" * 100_000, "objects.json is no json"),
    "long name": (other("images", file_name="a" * 5000), "image 5 of .* is missing: no file"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_can_not_be_meant_is_refused_with_file_and_id(tmp_path, case):
    content, message = REFUSED[case]
    for training in (True, False):
        with pytest.raises(DataError, match=message) as error:
            opened(tmp_path, content, training=training)
        assert "objects.json" in str(error.value)


def test_boxes_alone_need_no_masks(tmp_path):
    found = opened(tmp_path, changed(segmentation=[]), masks=False)
    assert "masks" not in found[0][1]


def test_files_that_are_missing_are_named(tmp_path):
    path = written(tmp_path)
    (tmp_path / "nine.png").unlink()
    with pytest.raises(DataError, match=r"image 9 of .*objects.json is missing: no file .*nine.png"):
        open_coco(path, tmp_path, True, True)
    with pytest.raises(DataError, match="no folder of images at"):
        open_coco(path, tmp_path / "nothing", True, True)
    with pytest.raises(DataError, match="no annotations at"):
        open_coco(tmp_path / "nothing.json", tmp_path, True, True)


def test_nothing_to_train_with_is_told(tmp_path):
    with pytest.raises(DataError, match="has no image with an object"):
        opened(tmp_path, {**CONTENT, "annotations": []})


def read(source, index: int):
    return Samples(source, lambda picture, target: target, 0)[0, index]


def test_a_truncated_image_is_named(tmp_path):
    found = opened(tmp_path)
    path = tmp_path / "five.png"
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(DataError, match=r"image 5, five.png, of .*objects.json can't be read: .*truncated"):
        read(found, 0)


def test_an_image_of_another_size_is_named(tmp_path):
    found = opened(tmp_path)
    Image.new("RGB", (61, 40)).save(tmp_path / "five.png")
    with pytest.raises(DataError, match=r"image 5, five.png, .*it has 61 × 40 pixels, .* says 60 × 40"):
        read(found, 0)


def test_masks_of_text_are_read(tmp_path):
    found = opened(tmp_path, changed(segmentation={"size": [40, 60], "counts": TEXT}))
    assert found[0][1]["masks"][0].sum() == 20 * 15


def test_shapes_are_the_same_each_time_and_have_tight_boxes():
    first, second, test = S.shapes(6, True, True), S.shapes(6, True, True), S.shapes(6, False, True)
    for index in range(6):
        picture, target = first[index]
        assert np.array_equal(np.asarray(picture), np.asarray(second[index][0]))
        assert 1 <= len(target["labels"]) <= S.MOST
        for mask, (x0, y0, x1, y1) in zip(target["masks"], target["boxes"], strict=True):
            rows, columns = np.nonzero(mask)
            assert abs(rows.min() - y0) <= 1.5
            assert abs(columns.max() + 1 - x1) <= 1.5
            assert mask[int(y0 + 1) : int(y1 - 1), int(x0 + 1) : int(x1 - 1)].mean() > 0.4
    assert first.content["images"][0]["polygons"] != test.content["images"][0]["polygons"]
