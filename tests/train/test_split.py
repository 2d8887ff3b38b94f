"""Validation data from one folder: of every class the same share, the same pictures wherever and whenever."""

import shutil
from pathlib import Path

import pytest

from torchsbp.errors import DataError
from torchsbp.train import tasks
from torchsbp.train.data.images import Arrays, Folder, digits
from torchsbp.train.data.split import Part, split
from torchsbp.train.tasks.classification import ClassificationOptions, Data

from .runs import lines, run
from .test_recipes import picture_folder


def keys(part: Part) -> set[str]:
    return {part.key(index) for index in range(len(part))}


def test_every_picture_is_in_one_part_and_every_class_has_its_share():
    whole = digits(True, "L")
    train, valid = split(whole, 0.2, seed=0)
    assert sorted([*train.indices, *valid.indices]) == list(range(len(whole)))
    for label in range(10):
        assert valid.labels.count(label) == round(0.2 * list(whole.labels).count(label))
    image, label = valid[3]
    assert (image.tobytes(), label) == (whole[valid.indices[3]][0].tobytes(), valid.labels[3])
    assert valid.where(3) == f"digits image {valid.indices[3]}"


def test_seeds_choose_different_pictures():
    whole = digits(True, "L")
    assert keys(split(whole, 0.2, 0)[1]) == keys(split(whole, 0.2, 0)[1])
    assert keys(split(whole, 0.2, 0)[1]) != keys(split(whole, 0.2, 1)[1])


def test_small_classes_keep_something_to_train_with():
    labels = [0] * 8 + [1] * 2 + [2]
    train, valid = split(Arrays("few", list(range(11)), labels, 3, "L"), 0.3, seed=0)
    assert [valid.labels.count(label) for label in range(3)] == [2, 1, 0]
    assert [train.labels.count(label) for label in range(3)] == [6, 1, 1]


def test_the_same_pictures_elsewhere_and_with_others_added(tmp_path):
    root = picture_folder(tmp_path / "here", ("train",), each=20) / "train"
    first = keys(split(Folder(root, "RGB"), 0.2, 0)[1])
    assert len(first) == 12
    moved = Path(shutil.copytree(root, tmp_path / "there"))
    assert keys(split(Folder(moved, "RGB"), 0.2, 0)[1]) == first
    (moved / "class1" / "a_first_one.jpg").write_bytes((moved / "class1" / "0.jpg").read_bytes())
    after = keys(split(Folder(moved, "RGB"), 0.2, 0)[1])
    assert len(first - after) <= 1
    assert len(after - first) <= 1


def test_a_run_needs_one_folder_only(tmp_path):
    root = picture_folder(tmp_path / "data", ("train",), each=8)
    data = {"source": "folder", "root": str(root), "size": 8, "channels": 1, "split": 0.25}
    code, out = run(tmp_path, task={"data": data}, epochs=1, schedule={"warmup_epochs": 0}, batch=6, micro_batch=6)
    assert code == 0
    assert lines(out)[0]["steps"] == 3  # of 18 images
    assert (out / "report" / "Accuracy by class.html").read_text().count("<td>2</td>") == 3


def test_nothing_to_validate_with_is_refused(tmp_path):
    root = picture_folder(tmp_path, ("train",), each=1)
    with pytest.raises(DataError, match="there are no validation data"):
        tasks.start(ClassificationOptions(data=Data(root=root, split=0.1)), seed=0)
