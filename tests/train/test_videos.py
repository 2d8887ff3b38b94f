"""Video files: the frame that is shown at a moment, whatever order moments come in, and files that are none."""

import wave
from pathlib import Path

import numpy as np
import pytest

from torchsbp.errors import DataError
from torchsbp.train.data import videos
from torchsbp.train.data.videos import WithPyAV, open_video

av = pytest.importorskip("av")


def write_video(path: Path, frames: int = 60, fps: int = 30, size: tuple[int, int] = (32, 48)) -> Path:
    """Grey, brighter by 4 from frame to frame, again after 60; a key frame every 12."""
    with av.open(str(path), "w") as container:
        stream = container.add_stream("mpeg4", rate=fps, options={"g": "12"})
        stream.height, stream.width = size
        stream.pix_fmt = "yuv420p"
        for number in range(frames):
            pixels = np.full((*size, 3), 4 * (number % 60), np.uint8)
            container.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        container.mux(stream.encode())
    return path


@pytest.mark.parametrize(
    "times",
    [
        [0.0, 0.04, 0.5, 1.0, 1.99],
        [1.0, 0.2, 0.2, 1.5, 0.0],  # back and forth
        [0.0333, 0.0334],  # on either side of the second frame's beginning
        [2.0, 5.0],  # the end and beyond: the last frame
    ],
)
def test_the_frame_that_is_shown(tmp_path, times):
    video = WithPyAV(write_video(tmp_path / "grey.mp4"))
    assert (video.seconds, video.fps) == (pytest.approx(2.0), 30.0)
    found = video.frames_at(times)
    assert found.shape == (len(times), 3, 32, 48)
    expected = [min(int(time * 30 + 1e-4), 59) for time in times]
    assert np.round(found.float().mean((1, 2, 3)).numpy() / 4).tolist() == expected


def test_a_jump_decodes_from_a_key_frame(tmp_path):
    video = WithPyAV(write_video(tmp_path / "long.mp4", frames=400, fps=10))
    first = video.frames_at([0.0])
    later = video.frames_at([39.0])
    assert np.round(later.float().mean().item() / 4) == 390 % 60  # it begins again
    assert np.array_equal(video.frames_at([0.0]), first)


def test_files_that_are_none_are_refused(tmp_path):
    with pytest.raises(DataError, match=r"no video .*gone.mp4"):
        open_video(tmp_path / "gone.mp4")
    (tmp_path / "text.mp4").write_text("not a video" * 100)
    with pytest.raises(DataError, match=r"video .*text.mp4 can't be read"):
        open_video(tmp_path / "text.mp4")
    whole = write_video(tmp_path / "whole.mp4").read_bytes()
    (tmp_path / "half.mp4").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DataError, match=r"video .*half.mp4 can't be read"):
        open_video(tmp_path / "half.mp4")


def test_sound_alone_is_refused(tmp_path):
    with wave.open(str(tmp_path / "sound.wav"), "wb") as file:
        file.setparams((1, 2, 8000, 8000, "NONE", ""))
        file.writeframes(bytes(16000))
    with pytest.raises(DataError, match=r"sound.wav has no pictures, only \['audio'\]"):
        open_video(tmp_path / "sound.wav")


def test_what_torchcodec_refuses_is_left_to_pyav(tmp_path, monkeypatch):
    def refuses(path):
        raise RuntimeError("unknown codec")

    monkeypatch.setattr(videos, "decoders", lambda: {"torchcodec": refuses, "pyav": WithPyAV})
    assert isinstance(open_video(write_video(tmp_path / "grey.mp4")), WithPyAV)
