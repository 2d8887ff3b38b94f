"""Sources of images, their order, and that a sample is a function of (seed, epoch, index)."""

import io
import pickle
import random
import shutil
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from torchsbp.errors import DataError
from torchsbp.train import tasks
from torchsbp.train.data.images import Shards, digits, open_images
from torchsbp.train.data.order import TrainOrder
from torchsbp.train.data.samples import OfInput, Samples
from torchsbp.train.tasks.classification import Augment, ClassificationOptions, Data, train_transform

from .test_recipes import picture_folder


def test_an_epoch_visits_every_sample_once_and_each_epoch_in_another_order():
    order = TrainOrder(12, 3, seed=0)
    order.epochs = 2
    first, second = list(order)[:4], list(order)[4:]
    assert sorted(i for batch in first for _, i in batch) == list(range(12))
    assert {epoch for batch in second for epoch, _ in batch} == {1}
    assert [i for batch in first for _, i in batch] != [i for batch in second for _, i in batch]


def test_the_order_continues_from_any_batch():
    order = TrainOrder(100, 7, seed=3)
    order.epochs = 3
    whole = list(order)
    assert len(whole) == len(order) == 42
    for start in (1, 13, 14, 30):
        order.start = start
        assert list(order) == whole[start:]


def test_an_update_sees_the_same_samples_with_any_number_of_processes():
    alone = list(TrainOrder(96, 12, seed=1, multiple=2))
    two = [list(TrainOrder(96, 6, seed=1, rank=rank, world=2, multiple=2)) for rank in range(2)]
    for first, second, whole in zip(*two, alone, strict=True):
        assert first + second == whole


def test_a_sample_depends_on_seed_epoch_and_index_only():
    data = Data(source="digits", size=32, channels=1, mean=[0.3], std=[0.3])
    transform = OfInput(train_transform(data, Augment(auto_augment="rand-m9-mstd0.5-inc1")))
    samples = Samples(digits(True, "L"), transform, seed=0)
    first = samples[0, 5][0]
    states = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()
    random.seed(1)
    np.random.seed(1)
    assert np.array_equal(first, samples[0, 5][0])
    assert not np.array_equal(first, samples[1, 5][0])
    random.setstate(states[0])
    torch.set_rng_state(states[2])
    samples[3, 8]
    assert random.getstate() == states[0]  # nothing is drawn from the run's own random numbers
    assert torch.equal(torch.get_rng_state(), states[2])


def test_digits_are_split_without_overlap():
    train, test = digits(True, "L"), digits(False, "L")
    assert (len(train), len(test), train.classes) == (1400, 397, 10)
    assert train[0][0].size == (32, 32)


@pytest.mark.filterwarnings("ignore")  # torchvision's pickles on a new numpy
def test_cifar_files(tmp_path, monkeypatch):
    from torchvision.datasets import cifar

    folder = tmp_path / "cifar-10-batches-py"
    folder.mkdir()
    rng = np.random.default_rng(0)
    for name, *_ in cifar.CIFAR10.train_list + cifar.CIFAR10.test_list:
        batch = {"data": rng.integers(0, 256, (4, 3072), dtype=np.uint8), "labels": [0, 1, 2, 9]}
        (folder / name).write_bytes(pickle.dumps(batch))
    (folder / "batches.meta").write_bytes(pickle.dumps({"label_names": [str(i) for i in range(10)]}))
    with pytest.raises(
        DataError, match=r"no complete cifar10 in .*corrupted"
    ) as refused:  # these are not the real files
        open_images("cifar10", tmp_path, "train", True, None, "RGB")
    assert f"files in {folder} are missing or corrupted; unpack " in str(refused.value)
    assert f" in {tmp_path}, or set task.data.root to where it is" in str(refused.value)
    assert "download=True" not in str(refused.value)
    monkeypatch.setattr(cifar, "check_integrity", lambda *_: True)
    train = open_images("cifar10", tmp_path, "train", True, 10, "RGB")
    assert (len(train), train.classes) == (20, 10)
    assert train[3][0].size == (32, 32)
    assert train[3][1] == 9


def write_shard(path: Path, labels: list[str], folder: str = "") -> None:
    with tarfile.open(path, "w") as tar:
        for i, label in enumerate(labels):
            picture = io.BytesIO()
            Image.new("RGB", (8, 8), (10 * i, 0, 0)).save(picture, "png")
            for kind, content in (("png", picture.getvalue()), ("cls", label.encode())):
                info = tarfile.TarInfo(f"{folder}sample{i:03d}.{kind}")
                info.size = len(content)
                tar.addfile(info, io.BytesIO(content))


def test_shards_are_read_in_any_order(tmp_path):
    write_shard(tmp_path / "train-0.tar", ["0", "1"])
    write_shard(tmp_path / "train-1.tar", ["2"])
    for _ in range(2):  # the second time from the index beside the shard
        shards = Shards(str(tmp_path / "train-*.tar"), 3, "RGB")
        assert [shards[i][1] for i in (2, 0, 1)] == [2, 0, 1]
        assert shards[1][0].getpixel((0, 0)) == (10, 0, 0)
    assert (tmp_path / "train-0.tar.index.json").exists()
    write_shard(tmp_path / "train-1.tar", ["1", "1"])  # another shard of that name is indexed anew
    assert len(Shards(str(tmp_path / "train-*.tar"), 3, "RGB")) == 4


@pytest.mark.parametrize("folder", ["./", "v1.0/train/"])
def test_shards_may_have_folders_with_dots_in_their_names(tmp_path, folder):
    write_shard(tmp_path / "train.tar", ["1", "0"], folder)
    shards = Shards(str(tmp_path / "train.tar"), 2, "RGB")
    assert [label for _, label in (shards[0], shards[1])] == [1, 0]


@pytest.mark.parametrize(
    "labels, classes, message",
    [(["0", "7"], 3, "has class 7, but data.classes is 3"), (["x"], 3, "can't be read: invalid literal")],
)
def test_wrong_shards_are_refused(tmp_path, labels, classes, message):
    write_shard(tmp_path / "a.tar", labels)
    with pytest.raises(DataError, match=message):
        Shards(str(tmp_path / "*.tar"), classes, "RGB")


def test_wrong_folders_are_refused(tmp_path):
    with pytest.raises(DataError, match=r"no image folder at .*none/train \(expected .*/train/CLASS/IMAGE\)"):
        open_images("folder", tmp_path / "none", "train", True, None, "RGB")
    root = picture_folder(tmp_path / "data")
    found = "found: class0, class1, class2"
    with pytest.raises(DataError, match=rf"has 3 classes, but task\.data\.classes is 4; {found}"):
        open_images("folder", root, "train", True, 4, "RGB")
    (root / "val" / "class2").rename(root / "val" / "other")
    other = (
        "3 classes and validation data 3; only in training: class2; only in validation: other: both need the same class"
    )
    with pytest.raises(DataError, match=other):
        tasks.start(ClassificationOptions(data=Data(root=root)), seed=0)
    for i in range(8):
        shutil.copytree(root / "train" / "class0", root / "train" / f"more{i}")
    with pytest.raises(DataError, match="only in training: class2, more0, more1, more2, more3 and 4 more; only in val"):
        tasks.start(ClassificationOptions(data=Data(root=root)), seed=0)


def test_posterize_leaves_at_least_one_bit():
    """timm's strongest level leaves none: an error of Pillow 13, a black image before."""
    transform = train_transform(Data(size=8), Augment(auto_augment="rand-m10-inc1"))
    ops = [op for step in transform.transforms for op in getattr(step, "ops", ()) if op.name == "PosterizeIncreasing"]
    assert [op.level_fn(level, {}) for op in ops for level in (0, 3, 5, 10)] == [(4,), (3,), (2,), (1,)]
    ops[0].prob = 1
    assert ops[0](Image.new("RGB", (8, 8), (255, 127, 0))).getpixel((0, 0)) == (128, 0, 0)
