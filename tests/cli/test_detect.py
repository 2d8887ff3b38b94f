"""``torchsbp detect``: a video file frame by frame, as numbers and as a picture."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from torchsbp.cli.detect import arguments
from torchsbp.cli.main import main
from torchsbp.cli.trained import opened
from torchsbp.train.online.evaluation import score_video
from torchsbp.train.online.picture import LEAST, peaks
from torchsbp.train.tasks.online_action import eval_transform

from ..train.runs import run, train
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


@pytest.mark.parametrize("name", ["grey.npy", "grey"])
def test_frames_as_they_are_trained_with(trained, tmp_path, name):
    """An array or a folder of pictures, one moment each, in the order of their numbers."""
    draw = np.random.default_rng(0)
    frames = draw.integers(0, 256, (11, 32, 32, 3), dtype=np.uint8)
    if name == "grey":
        (tmp_path / name).mkdir()
        for number, frame in enumerate(frames):
            Image.fromarray(frame).save(tmp_path / name / f"{number}.png")
    else:
        np.save(tmp_path / name, frames)
    out = tmp_path / "found"
    assert main(["detect", str(trained), str(tmp_path / name), f"--out={out}", "--task.data.fps=3"]) == 0
    record = json.loads((out / "grey.json").read_text())
    assert record["times"] == [i / 3 for i in range(11)]
    with opened(arguments().parse_args([str(trained), name]), "detect", []) as its:
        clip = eval_transform(its.task.options.data)(torch.from_numpy(frames).permute(0, 3, 1, 2))
        expected = score_video(its.model, clip)
    np.testing.assert_allclose(record["scores"], expected, rtol=1e-4, atol=1e-6)
    assert (out / "grey.png").exists()


def test_it_needs_a_run_of_online_detection_and_a_video(trained, tmp_path, capsys):
    assert main(["detect", str(trained), str(tmp_path / "gone.mp4")]) == 1
    assert "no video" in capsys.readouterr().err
    code, digits = run(tmp_path, "--epochs=1", "--schedule.warmup_epochs=0")
    assert code == 0
    assert main(["detect", str(digits), str(write_video(tmp_path / "a.mp4", frames=6))]) == 2
    assert "is a run of task classification; detect needs one of online_action" in capsys.readouterr().err


def test_peaks_are_the_best_apart_from_each_other():
    scores = np.zeros((20, 3))
    scores[3, 1], scores[4, 1], scores[12, 2], scores[18, 1] = 0.9, 0.8, 0.7, LEAST / 2
    assert peaks(scores, [1, 2], apart=3) == [(3, 1), (12, 2)]
