"""Images that can't be read: counted, listed, and skipped up to a limit; the same when resumed, with any workers."""

import json
from pathlib import Path

import pytest

from torchsbp.errors import DataError
from torchsbp.report import html, read
from torchsbp.train.data.broken import TITLE, Broken
from torchsbp.train.data.loader import Readable
from torchsbp.train.data.samples import Samples, Unread

from .regression import Points
from .runs import evaluate, final, lines, recipe, run, same, spawn, stopped_at
from .test_recipes import picture_folder

BROKEN = ("train/class0/1.jpg", "train/class2/3.jpg", "val/class1/2.jpg")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """24 images to train with, 24 to validate with; of three only a half is there."""
    root = picture_folder(tmp_path_factory.mktemp("data"), each=8)
    for name in BROKEN:
        content = (root / name).read_bytes()
        (root / name).write_bytes(content[: len(content) // 2])
    return root


def changes(data: Path, **more) -> dict:
    images = {"source": "folder", "root": str(data), "size": 8, "channels": 1, **more}
    return {"task": {"data": images}, "batch": 12, "micro_batch": 6, "log": {"every_steps": 1}}


@pytest.fixture(scope="module")
def whole(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    code, out = run(tmp_path_factory.mktemp("whole"), **changes(data, broken=3))
    assert code == 0
    return out


def test_they_are_listed_in_the_record_the_checkpoint_and_the_report(whole, data):
    valid = [line for line in lines(whole) if line["kind"] == "valid"]
    listed = valid[-1]["broken"]
    assert len(listed) == 3
    for name, message in zip(BROKEN, listed, strict=True):
        assert message.startswith(f"image {data / name} can't be read: ")
    assert final(whole)["progress"]["broken"] == listed
    page = html([read(whole)], "Runs")
    assert TITLE.replace("'", "&#x27;") in page
    assert all(str(data / name) in page for name in BROKEN)


def test_validation_goes_without_them(whole, capsys):
    table = (whole / "report" / "Accuracy by class.html").read_text()
    assert (table.count("<td>8</td>"), table.count("<td>7</td>")) == (2, 1)
    assert evaluate([str(whole)]) == 0
    told = capsys.readouterr()
    (line,) = [
        line for line in lines(whole) if line["kind"] == "valid" and line["step"] == json.loads(told.out)["step"]
    ]
    assert json.loads(told.out)["top1"] == line["ema_top1"]
    assert json.loads(told.out)["broken"] == [message for message in line["broken"] if "/val/" in message]
    assert "val/class1/2.jpg can't be read" in told.err
    assert "; skipped, 1 of at most 3 (task.data.broken)" in told.err


def test_with_several_workers_the_run_is_the_same(whole, data, tmp_path):
    code, out = run(tmp_path, **changes(data, broken=3, workers=2))
    assert code == 0
    assert same(final(whole), final(out))
    assert lines(whole) == lines(out)


@pytest.mark.parametrize("step", [1, 2, 3])
def test_killed_and_resumed_the_run_is_the_same(whole, data, tmp_path, step):
    often = {**changes(data, broken=3), "checkpoint": {"every_steps": 1}}
    with stopped_at(step):
        run(tmp_path, **often)
    code, out = run(tmp_path, "--resume=auto", **often)
    assert code == 0
    assert same(final(whole), final(out))
    assert lines(whole) == lines(out)


@pytest.mark.slow
def test_two_processes_count_together(whole, data, tmp_path):
    result = spawn(recipe(tmp_path, **changes(data, broken=3)), processes=2)
    assert result.returncode == 0, result.stderr
    assert final(tmp_path / "run")["progress"]["broken"] == final(whole)["progress"]["broken"]
    result = spawn(recipe(tmp_path / "few", **changes(data, broken=2)), processes=2)
    assert "3 samples can't be read, more than the 2 that task.data.broken allows" in result.stderr


def test_too_many_end_the_run(data, tmp_path, capsys):
    assert run(tmp_path, **changes(data, broken=2))[0] == 1
    told = capsys.readouterr().err
    assert "error: 3 samples can't be read, more than the 2 that task.data.broken allows: image " in told
    assert all(str(data / name) in told for name in BROKEN)


def test_none_are_allowed_unless_it_is_said(data, tmp_path, capsys):
    assert run(tmp_path, **changes(data))[0] == 1
    assert " can't be read: " in capsys.readouterr().err


class Holes(Points):
    def __getitem__(self, index):
        if index % 3 == 0:
            raise OSError("a hole")
        return super().__getitem__(index)


def test_the_same_sample_takes_the_place_every_time():
    samples = Samples(Holes((i, -i) for i in range(30)), lambda x, y: (x, y), seed=1, replace=True)
    assert samples[0, 4] == (4, -4)
    first = samples[0, 3]
    assert first.message == "point 3 can't be read: a hole"
    assert first.instead[0] % 3
    assert samples[0, 3] == first
    assert len({samples[epoch, 3].instead for epoch in range(20)}) > 5
    nothing = Samples(Holes([(0, 0)]), lambda x, y: (x, y), seed=1, replace=True)
    with pytest.raises(DataError, match="point 0 can't be read, nor can 20 others"):
        nothing[0, 0]


def test_those_that_can_be_read_come_first():
    batch, unread = Readable(list)([1, Unread("first", 10), 3, Unread("second", 30), 5])
    assert batch == [1, 3, 5, 10, 30]
    assert unread == [(1, "first"), (3, "second")]


def test_each_is_counted_once():
    said: list[str] = []
    broken = Broken(2, said.append)
    for _ in range(3):
        broken.add(["b", "a"])
    assert broken.listed() == ["a", "b"]
    assert said == [
        "b; skipped, 1 of at most 2 (task.data.broken)",
        "a; skipped, 2 of at most 2 (task.data.broken)",
    ]
    with pytest.raises(DataError, match=r"7 samples can't be read, more than the 2 .*: a; b; c; d; e; …"):
        broken.add("cdefg")
