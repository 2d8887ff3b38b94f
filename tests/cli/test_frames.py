"""``torchsbp frames``: frames of video files as the task reads them."""

from pathlib import Path

import numpy as np
import pytest

from torchsbp.cli.main import main
from torchsbp.train.data.thumos import Frames

from ..train.test_videos import write_video


def test_frames_are_taken_and_resized(tmp_path, capsys):
    (tmp_path / "in").mkdir()
    write_video(tmp_path / "in" / "a.mp4", frames=60, size=(32, 64))
    assert main(["frames", str(tmp_path / "in"), f"--out={tmp_path / 'frames'}", "--short=16", "--fps=5"]) == 0
    assert "a.npy: 10 frames" in capsys.readouterr().out
    frames = Frames(tmp_path / "frames", "a", "list:1")
    assert frames.read(range(10)).shape == (10, 16, 32, 3)
    shown = frames.read(range(10)).mean((1, 2, 3)) / 4
    assert np.abs(shown - np.arange(0, 60, 6)).max() < 1.5  # of six frames between two; the codec is lossy
    assert main(["frames", str(tmp_path / "in"), f"--out={tmp_path / 'frames'}"]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'frames' / 'a.npy'} is there already\n"


def test_what_can_not_be_read_is_named_and_the_others_are_taken(tmp_path, capsys):
    (tmp_path / "bad.mp4").write_text("no video")
    write_video(tmp_path / "good.mp4", frames=30)
    assert main(["frames", str(tmp_path), str(tmp_path / "gone.mp4"), f"--out={tmp_path / 'frames'}"]) == 1
    told = capsys.readouterr()
    assert "good.npy: 4 frames" in told.out
    assert "2 of 3 videos can't be read" in told.err
    assert "bad.mp4 can't be read" in told.err
    assert "no video" in told.err
    assert main(["frames", str(tmp_path), f"--out={tmp_path / 'frames'}", "--fps=0"]) == 2


def test_every_kind_of_file_that_is_read_is_found_in_folders(tmp_path, capsys):
    (tmp_path / "in" / "more").mkdir(parents=True)
    write_video(tmp_path / "in" / "more" / "a.mpg", frames=30)
    assert main(["frames", str(tmp_path / "in"), f"--out={tmp_path / 'frames'}"]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'frames' / 'a.npy'}: 4 frames\n"


def test_nothing_to_take_is_an_error(tmp_path, capsys):
    folder, array = tmp_path / "in", tmp_path / "a.npy"
    folder.mkdir()
    np.save(array, np.zeros((3, 4, 4, 3), np.uint8))
    for given, message in [
        (
            folder,
            f"no video files in {folder}; allowed: .avi, .m4v, .mkv, .mov, .mp4, .mpeg, .mpg, .webm. "
            "A folder of pictures holds frames already: put it into ROOT/frames as it is\n",
        ),
        (array, f"{array} holds frames already, not a video; put it into ROOT/frames as it is\n"),
    ]:
        assert main(["frames", str(given), f"--out={tmp_path / 'frames'}"]) == 2
        assert capsys.readouterr().err.endswith(message)
        assert not (tmp_path / "frames").exists()


def test_two_videos_of_one_name_are_refused_and_one_given_twice_is_taken_once(tmp_path, capsys):
    (tmp_path / "b").mkdir()
    one, other = (write_video(folder / "x.mp4", frames=30) for folder in (tmp_path, tmp_path / "b"))
    out = f"--out={tmp_path / 'frames'}"
    assert main(["frames", str(one), str(other), out]) == 2
    message = f"{one} and {other} would both be x.npy; rename one, or take it with another --out\n"
    assert capsys.readouterr().err.endswith(message)
    assert main(["frames", str(other), str(tmp_path / "b"), out]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'frames' / 'x.npy'}: 4 frames\n"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="Linux")
def test_a_full_disk_is_told(tmp_path, capsys):
    write_video(tmp_path / "a.mp4", frames=30)
    (tmp_path / "frames").mkdir()
    (tmp_path / "frames" / "a.partial").symlink_to("/dev/full")
    assert main(["frames", str(tmp_path / "a.mp4"), f"--out={tmp_path / 'frames'}"]) == 1
    target = tmp_path / "frames" / "a.npy"
    assert f"error: {target} can't be written: [Errno 28] No space left on device" in capsys.readouterr().err
    assert not target.exists()
