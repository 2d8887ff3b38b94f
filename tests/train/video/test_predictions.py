"""Predicting with a trained classifier of clips, and exporting it, where its data are gone."""

import csv
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from torchsbp.cli.trained import opened, parser
from torchsbp.train.data.moving import MOTIONS
from torchsbp.train.data.videos import open_video

from ...cli.commands import run
from ..runs import train
from .files import write_video
from .runs import listed, recipe
from .test_video import FRAMES, VIT, epic, recipe_of

DATA = {"source": "list", "frames": 4, "stride": 2, "views": [2, 3], "side": 40}
SHORT = {"epochs": 1, "schedule": {"warmup_epochs": 0}}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    root = listed(folder / "data")
    assert train([recipe(folder, task={"data": {**DATA, "root": str(root)}}, **SHORT)]) == 0
    for path in root.glob("*.txt"):
        path.unlink()
    return folder / "run"


def test_predictions_are_the_means_over_views(trained, capsys, tmp_path):
    videos = trained.parent / "data"
    named = write_video(tmp_path / "named.mp4")
    status, out, err = run(capsys, "predict", str(trained), str(named), str(videos), f"--out={tmp_path}", "--batch=5")
    assert (status, err) == (0, "")
    assert out.startswith("17 predictions: ")
    with (tmp_path / "predictions.csv").open() as file:
        rows = list(csv.DictReader(file))
    records = json.loads((tmp_path / "predictions.json").read_text())
    assert [row["file"] for row in rows] == [str(named), *map(str, sorted(videos.glob("*.npy")))]
    assert (tmp_path / "predictions.html").read_text().count("<img") == 17
    expected = by_hand(trained, [Path(row["file"]) for row in rows])
    for row, record, shares in zip(rows, records, expected, strict=True):
        assert row["class"] == record["class"] == MOTIONS[int(shares.argmax())]
        assert float(row["probability"]) == pytest.approx(float(shares.max()), abs=2e-6)
        assert [top["probability"] for top in record["top"]] == pytest.approx(
            shares.sort(descending=True).values[:5].tolist(), abs=2e-6
        )


@torch.no_grad()
def by_hand(out: Path, paths: list[Path]) -> list[torch.Tensor]:
    """Probabilities by the model alone, over 2 clips and 3 crops of each."""
    found = []
    with opened(parser("predict", "").parse_args([str(out)]), "predict", []) as its:
        for path in paths:
            with open_video(path) as video:
                begins = [int(share * (len(video) - 6)) for share in (0.25, 0.75)]
                clips = [video.read([begin, begin + 2, begin + 4, begin + 6]) for begin in begins]
            views = torch.cat([its.task.eval_views.of(clip) for clip in clips])
            assert views.shape == (6, 3, 4, 32, 32)
            found.append(its.model(its.task.normalised(views)).softmax(1).mean(0))
    return found


def test_what_cant_be_read_is_told_and_the_others_are_predicted(trained, capsys, tmp_path):
    np.save(tmp_path / "flat.npy", np.zeros((4, 4), np.uint8))
    np.save(tmp_path / "short.npy", np.zeros((3, 40, 40, 3), np.uint8))
    status, out, err = run(capsys, "predict", str(trained), str(tmp_path), f"--out={tmp_path / 'out'}")
    assert status == 1
    assert out.startswith("1 predictions: ")
    assert "1 of 2 files can't be read" in err
    assert "allowed: uint8 [frames, height, width, 3]" in err


def test_two_heads_have_columns_of_their_own(capsys, tmp_path):
    root = epic(tmp_path / "data")
    data = {"source": "epic", "root": str(root), "train": "labels.csv", "valid": "labels.csv", "frames": 4}
    assert train([recipe(tmp_path, task={"data": data}, batch=2, micro_batch=2, **SHORT)]) == 0
    video = write_video(tmp_path / "some.mp4")
    shutil.rmtree(root)
    assert run(capsys, "predict", str(tmp_path / "run"), str(video), f"--out={tmp_path / 'out'}")[0] == 0
    (record,) = json.loads((tmp_path / "out" / "predictions.json").read_text())
    with (tmp_path / "out" / "predictions.csv").open() as file:
        (row,) = csv.DictReader(file)
    assert list(row) == ["file", "verb", "verb probability", "noun", "noun probability"]
    assert (row["verb"], row["noun"]) == (record["verb"]["class"], record["noun"]["class"])


@pytest.mark.filterwarnings("ignore:The given buffer is not writable")  # torch 2.11, of its own reader
def test_a_video_model_is_exported_for_any_batch(trained, capsys, tmp_path):
    path = tmp_path / "model.pt2"
    status, _, err = run(capsys, "export", str(trained), "--format=torch_export", f"--out={path}")
    assert (status, err) == (0, "")
    assert torch.export.load(path).module()(torch.zeros(5, 3, 4, 32, 32)).shape == (5, len(MOTIONS))


@pytest.mark.filterwarnings("ignore:The given buffer is not writable")  # torch 2.11, of its own reader
def test_an_image_model_over_frames_is_exported_for_any_batch(capsys, tmp_path):
    """Though evaluation sees a few frames at a time."""
    begun = recipe_of(tmp_path, "vit_tiny_patch16_224", VIT, FRAMES)
    assert train([begun, "--task.model.chunk=5", "--task.data.frames=4"]) == 0
    path = tmp_path / "model.pt2"
    assert run(capsys, "export", str(tmp_path / "run"), "--format=torch_export", f"--out={path}")[0] == 0
    clips = torch.rand(5, 3, 4, 32, 32)
    with opened(parser("predict", "").parse_args([str(tmp_path / "run")]), "predict", []) as its, torch.no_grad():
        torch.testing.assert_close(torch.export.load(path).module()(clips), its.model(clips))
