"""``torchsbp detect``: a video file frame by frame, as numbers and as a picture."""

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from torchsbp.cli.main import main
from torchsbp.train.online.picture import LEAST, peaks

from ..train.runs import train
from ..train.test_online_action import SMALL
from ..train.test_videos import write_video


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("detect") / "run"
    short = ["--epochs=1", "--schedule.warmup_epochs=0", "--task.data.videos=[2, 1]"]
    assert train(["online", *SMALL, *short, f"--out={out}"]) == 0
    return out


def test_scores_over_time_and_a_picture(trained, tmp_path, capsys):
    video = write_video(tmp_path / "grey.mp4", frames=90)
    assert main(["detect", str(trained), str(video), f"--out={tmp_path / 'found'}"]) == 0
    assert "12 moments" in capsys.readouterr().out
    record = json.loads((tmp_path / "found" / "grey.json").read_text())
    assert record["times"] == [0.25 * i for i in range(12)]  # 3 seconds, 4 frames each
    assert record["names"] == ["Background", "Disc", "Square", "Diamond", "Cross"]
    assert np.array(record["scores"]).sum(1) == pytest.approx(np.ones(12))
    with Image.open(tmp_path / "found" / "grey.png") as picture:
        assert picture.size[0] > 1000


def test_it_needs_a_run_of_online_detection_and_a_video(trained, tmp_path, capsys):
    assert main(["detect", str(trained), str(tmp_path / "gone.mp4")]) == 1
    assert "no video" in capsys.readouterr().err
    digits = ["digits", "--epochs=1", "--schedule.warmup_epochs=0", "--batch=700", "--log.progress=false"]
    assert train([*digits, f"--out={tmp_path / 'digits'}"]) == 0
    assert main(["detect", str(tmp_path / "digits"), str(write_video(tmp_path / "a.mp4", frames=6))]) == 2
    assert "is a run of task classification; detect needs one of online_action" in capsys.readouterr().err


def test_peaks_are_the_best_apart_from_each_other():
    scores = np.zeros((20, 3))
    scores[3, 1], scores[4, 1], scores[12, 2], scores[18, 1] = 0.9, 0.8, 0.7, LEAST / 2
    assert peaks(scores, [1, 2], apart=3) == [(3, 1), (12, 2)]
