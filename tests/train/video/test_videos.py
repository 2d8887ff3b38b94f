"""Video files, folders of pictures and arrays as frames by number."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from shutil import rmtree

import av
import numpy as np
import pytest
import torch
from PIL import Image

from torchsbp.errors import DataError, UsageError
from torchsbp.train.data import videos
from torchsbp.train.data.lists import Epic
from torchsbp.train.data.videos import decoders, open_video

from .files import picture, write_video
from .test_video import epic

NUMBERS = [0, 5, 3, 30, 31, 39, 12, 12]
FORMATS = [("a.mp4", "libx264"), ("a.mkv", "libx264"), ("a.webm", "libvpx-vp9"), ("a.avi", "mpeg4")]


@pytest.mark.parametrize("name, codec", FORMATS)
def test_frames_of_a_file_are_found_by_number(tmp_path, name, codec):
    with open_video(write_video(tmp_path / name, codec=codec), "pyav") as video:
        assert len(video) == 40
        assert video.fps == 25
        frames = video.read(NUMBERS)
        assert frames.dtype == torch.uint8
        assert frames.shape == (8, 48, 64, 3)
        for number, frame in zip(NUMBERS, frames, strict=True):
            assert float(frame[20:, 20:].float().mean()) == pytest.approx(20 + 4 * number, abs=2)
        assert torch.equal(video.read(range(40))[torch.tensor(NUMBERS)], frames)


@pytest.mark.parametrize("codec", ["mpeg1video", "mpeg2video"])
def test_frames_of_a_program_stream_are_those_of_decoding_it_whole(tmp_path, codec):
    """It has no index, and after seeking in it frames are wrong."""
    path = write_video(tmp_path / "a.mpg", codec=codec)
    with av.open(str(path)) as file:
        whole = [frame.to_ndarray(format="rgb24") for frame in file.decode(video=0)]
    for number in range(len(whole)):
        with open_video(path, "pyav") as video:
            assert np.array_equal(video.read([number])[0], whole[number]), number


@pytest.mark.parametrize("turned", [90, 180, -90])
def test_frames_are_upright(tmp_path, turned):
    with open_video(write_video(tmp_path / "a.mp4", frames=3, turned=turned), "pyav") as video:
        frame = video.read([1])[0].numpy()
    expected = np.rot90(picture(1), turned // 90)
    assert frame.shape == expected.shape
    assert np.abs(frame.astype(int) - expected).mean() < 2


@pytest.mark.parametrize("key_first", [False, True])
def test_of_frames_at_one_time_one_is_read(tmp_path, monkeypatch, key_first):
    """A key frame and another one: their places to seek to, a number and None, are not compared."""
    before = videos.WithPyAV.scan

    def twice(video):
        first, *others = before(video)
        other = first[0], None
        return [*((first, other) if key_first else (other, first)), *others]

    monkeypatch.setattr(videos.WithPyAV, "scan", twice)
    with open_video(write_video(tmp_path / "a.mp4", frames=3), "pyav") as video:
        assert len(video) == len(video.times) == 3


def test_torchcodec_gives_the_same_frames(tmp_path):
    """In a process of its own, to which PyAV lends its FFmpeg: torchcodec needs one, and most machines have none."""
    script = "; ".join(
        [
            "from pathlib import Path",
            "import torch",
            "from torchsbp.train.data.videos import decoders, open_video",
            "assert list(decoders()) == ['torchcodec', 'pyav'], decoders()",
            f"numbers = {NUMBERS}",
            f"paths = [Path(its) for its in {[str(path) for path in written(tmp_path)]}]",
            "times = [0.0, 0.5, 1.01, 0.2, 9.0]",
            "read = lambda path, how: open_video(path, how).read(numbers)",
            "at = lambda path, how: open_video(path, how).frames_at(times)",
            "print([torch.equal(way(path, 'torchcodec'), way(path, 'pyav')) for path in paths for way in (read, at)])",
            f"print(type(open_video(Path({str(write_video(tmp_path / 'a.mpg', codec='mpeg2video'))!r}))).__name__)",
        ]
    )
    environment = {**os.environ, "LD_LIBRARY_PATH": lent_ffmpeg(tmp_path / "lib")}
    result = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True)
    if "assert list(decoders())" in result.stderr:
        pytest.skip("this torchcodec is made for another FFmpeg or another torch")
    assert result.stdout.splitlines() == [str([True] * 10), "WithPyAV"], result.stderr


def written(folder: Path) -> list[Path]:
    turned = write_video(folder / "turned.mp4", turned=90)
    return [turned, *(write_video(folder / name, codec=codec) for name, codec in FORMATS)]


def lent_ffmpeg(folder: Path) -> str:
    """PyAV's libraries by the names that others look for."""
    spec = find_spec("av")
    assert spec is not None
    assert spec.origin is not None
    own = Path(spec.origin).parents[1] / "av.libs"
    folder.mkdir()
    for path in own.glob("lib[as][vw]*.so.*"):
        name, _, rest = path.name.partition("-")
        version = rest.partition(".so.")[2].partition(".")[0]
        (folder / f"{name}.so.{version}").symlink_to(path)
    return f"{folder}:{own}"


def test_pictures_and_arrays(tmp_path):
    folder = tmp_path / "frames"
    folder.mkdir()
    for number in range(12):
        Image.fromarray(picture(number)).save(folder / f"{number:05d}.png")
    (folder / "note.txt").write_text("no picture")
    np.save(tmp_path / "clip.npy", np.stack([picture(number) for number in range(12)]))
    for path in (folder, tmp_path / "clip.npy"):
        with open_video(path) as video:
            assert len(video) == 12
            assert video.fps is None
            assert np.array_equal(video.read([11, 0, 0]).numpy(), [picture(11), picture(0), picture(0)])


def test_pictures_are_in_the_order_of_their_numbers(tmp_path):
    names = ["1.png", "2.png", "10.png", "11.png", "100.png", "b2_9.png", "b2_10.png", "b10_1.png"]
    for number, name in enumerate(names):
        Image.fromarray(picture(number)).save(tmp_path / name)
    with open_video(tmp_path) as video:
        assert np.array_equal(video.read(range(8)).numpy(), [picture(number) for number in range(8)])


@pytest.mark.parametrize("fps", [3, 10, 29.97])
def test_moments_of_frames_are_as_many_as_frames(tmp_path, fps):
    np.save(tmp_path / "clip.npy", np.stack([picture(number) for number in range(55)]))
    with open_video(tmp_path / "clip.npy", fps=fps) as video:
        assert video.seconds == 55 / fps
        times = video.moments(fps)
        assert times == [number / fps for number in range(55)]
        assert torch.equal(video.frames_at(times), video.read(range(55)).permute(0, 3, 1, 2))
        assert torch.equal(video.frames_at([0.9 / fps, 99.0]), video.read([0, 54]).permute(0, 3, 1, 2))


def test_what_cannot_be_read_is_said_with_its_file(tmp_path):
    broken = tmp_path / "broken.mp4"
    broken.write_bytes(b"not a video at all")
    (tmp_path / "empty").mkdir()
    np.save(tmp_path / "wrong.npy", np.zeros((4, 5, 5), np.uint8))
    np.save(tmp_path / "flat.npy", np.zeros((4, 0, 5, 3), np.uint8))
    for path, reason in [
        (broken, "can't be read"),
        (tmp_path / "missing.mp4", ""),
        (tmp_path / "empty", "has no frames"),
        (tmp_path / "flat.npy", r"holds uint8 \[4, 0, 5, 3\]; allowed: "),
        (tmp_path / "wrong.npy", r"holds uint8 \[4, 5, 5\]; allowed: uint8 \[frames, height, width, 3\]"),
    ]:
        with pytest.raises(DataError, match=f"video .*{path.name}.*{reason}"):
            open_video(path)


def test_a_file_that_ends_too_soon(tmp_path):
    path = write_video(tmp_path / "a.mkv")
    path.write_bytes(path.read_bytes()[: path.stat().st_size * 2 // 3])
    with open_video(path, "pyav") as video:
        assert 0 < len(video) < 40
        assert len(video.read(range(len(video) - 1))) == len(video) - 1


def test_a_file_without_key_frames(tmp_path):
    whole, path = write_video(tmp_path / "a.mkv", gop=100), tmp_path / "b.mkv"
    with av.open(str(whole)) as file, av.open(str(path), "w") as other:
        stream = other.add_stream_from_template(file.streams.video[0])
        for packet in file.demux(video=0):
            if packet.dts is not None and not packet.is_keyframe:
                packet.stream = stream
                other.mux(packet)
    with pytest.raises(DataError, match=r"b\.mkv has no key frame"):
        open_video(path, "pyav")


def test_pictures_of_several_sizes_are_refused(tmp_path):
    for number, size in enumerate([(8, 8), (8, 9)]):
        Image.new("RGB", size).save(tmp_path / f"{number}.png")
    with pytest.raises(DataError, match=r"of several sizes: \(8, 8, 3\), \(9, 8, 3\)"):
        open_video(tmp_path).read([0, 1])


def test_a_decoder_that_is_not_there(tmp_path, monkeypatch):
    path = write_video(tmp_path / "a.mp4", frames=2)
    with pytest.raises(UsageError, match=f"decoder='other' does not decode here; allowed: {', '.join(decoders())}"):
        open_video(path, "other")
    monkeypatch.setattr(videos, "decoders", dict)
    with pytest.raises(UsageError, match=r"install PyAV: pip install 'torchsbp\[video\]'"):
        open_video(path)


@pytest.mark.parametrize("fps, expected", [(60, [2, 21, 21]), (30, [1, 10, 10]), (24, [0, 8, 8])])
def test_frames_of_epic_kitchens_are_sixty_a_second(tmp_path, fps, expected):
    """Frames 3 to 22, counted from 1, are what a video file shows from 2/60 s on, whatever its own rate."""
    root = epic(tmp_path / "data")
    rmtree(root / "P01" / "P01_01")
    write_video(root / "P01" / "P01_01.MP4", fps=fps)
    with Epic(root, "labels.csv", ["P26"], training=True).open(0) as video:
        assert len(video) == 20
        shown = (video.read([0, 19, 19])[:, 20:, 20:].float().mean((1, 2, 3)) - 20) / 4
        assert shown.tolist() == pytest.approx(expected, abs=0.4)
