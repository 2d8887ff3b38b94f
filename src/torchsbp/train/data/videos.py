"""Videos as numbered frames: files, decoded by torchcodec if it can, else by PyAV; folders of pictures; arrays.

Frame i of a file is the i-th that is shown, upright, whichever decodes it: both look through the whole file for the
times of frames before they decode any.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import cache
from math import ceil
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...errors import DataError, UsageError
from .pictures import frames_in, read_picture

FILES = (".avi", ".m4v", ".mkv", ".mov", ".mp4", ".mpeg", ".mpg", ".webm")
SKIP = 8
"""within so many frames before a key frame, decoding on is faster than seeking to it"""
PROGRAM_STREAM, PACK = "mpeg", b"\0\0\1\xba"
"""MPEG program streams, many .mpg and .mpeg files: FFmpeg's name, and how they begin. They have no index: seeking in
them is inexact, and the frames after it are wrong or have wrong times"""
ROUNDING = 1e-6
"""tolerance for a time that rounding puts just before its frame"""


class Video:
    """A video as 8-bit frames. It may hold a file open: use it in ``with``."""

    fps: float | None = None
    """frames a second, if that is known"""

    def __len__(self) -> int:
        raise NotImplementedError

    def read(self, numbers: Sequence[int]) -> Tensor:
        """Return ``[n, height, width, 3]``, in the order of ``numbers``, which may repeat one."""
        raise NotImplementedError

    @property
    def seconds(self) -> float:
        """The length of the video."""
        raise NotImplementedError

    def moments(self, fps: float) -> list[float]:
        """Return the times, in seconds from the first frame, of ``fps`` frames a second until the end."""
        count = max(1, ceil(self.seconds * fps - ROUNDING))
        return [number / fps for number in range(count)]

    def frames_at(self, times: Sequence[float]) -> Tensor:
        """Return the frames ``[n, 3, height, width]`` shown at these times, in seconds from the first frame. At the end
        and beyond, this is the last frame."""
        raise NotImplementedError

    def close(self) -> None: ...

    def __enter__(self) -> "Video":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def open_video(path: Path, decoder: str | None = None, fps: float | None = None) -> Video:
    """Open a video: a file, a folder of numbered pictures, or an array ``[frames, height, width, 3]``.

    ``decoder`` is one of ``decoders()``; by default these are tried one after the other. ``fps`` is the rate of folders
    and arrays, which don't tell theirs.
    """
    try:
        if path.is_dir():
            video: Video = Pictures(path, fps)
        elif path.suffix == ".npy":
            video = Array(path, fps)
        else:
            if not path.exists():
                raise DataError(f"no video {path}")
            video = decoded(path, chosen(decoder))
        if not len(video):
            raise DataError(f"video {path} has no frames")
        return video
    except (DataError, UsageError):
        raise
    except Exception as error:  # whatever a decoder raises
        raise DataError(f"video {path} can't be read: {error}") from error


def decoded(path: Path, decoders: Sequence[Callable[[Path], Video]]) -> Video:
    """Open a file with the first decoder that can; if none can, raise the error of the last."""
    *others, last = decoders
    for decoder in others:
        with suppress(Exception):
            return decoder(path)
    return last(path)


@cache
def decoders() -> dict[str, Callable[[Path], Video]]:
    """Return the decoders of video files that work here, the preferred one first."""
    found: dict[str, Callable[[Path], Video]] = {}
    with suppress(ImportError, OSError, RuntimeError):  # installed, but not the FFmpeg or the torch that it needs
        import torchcodec

        if torchcodec.ffmpeg_major_version is not None:
            found["torchcodec"] = WithTorchCodec
    with suppress(ImportError):
        import av  # noqa: F401

        found["pyav"] = WithPyAV
    return found


def chosen(decoder: str | None) -> list[Callable[[Path], Video]]:
    known = decoders()
    if not known:
        raise UsageError("nothing here decodes video files; install PyAV: pip install 'torchsbp[video]'")
    if decoder is not None and decoder not in known:
        raise UsageError(f"decoder={decoder!r} does not decode here; allowed: {', '.join(known)}")
    return list(known.values()) if decoder is None else [known[decoder]]


class WithTorchCodec(Video):
    """torchcodec's ``VideoDecoder``."""

    def __init__(self, path: Path) -> None:
        from torchcodec.decoders import VideoDecoder

        with path.open("rb") as file:
            if file.read(len(PACK)) == PACK:
                raise DataError(
                    f"torchcodec finds wrong frames of {path}, an MPEG program stream: install PyAV (pip install "
                    "'torchsbp[video]'), or convert it to mp4"
                )
        self.path = path
        self.decoder = VideoDecoder(str(path), dimension_order="NHWC", num_ffmpeg_threads=1)
        about = self.decoder.metadata
        self.fps = about.average_fps
        self.begin, self.end = float(about.begin_stream_seconds or 0), float(about.end_stream_seconds or 0)

    @property
    def seconds(self) -> float:
        return self.end - self.begin

    def __len__(self) -> int:
        return len(self.decoder)

    def read(self, numbers: Sequence[int]) -> Tensor:
        return self.found(lambda: self.decoder.get_frames_at(list(numbers)))

    def frames_at(self, times: Sequence[float]) -> Tensor:
        last = self.end - 0.5 / (self.fps or 25)
        moments = [min(self.begin + time, last) for time in times]
        return self.found(lambda: self.decoder.get_frames_played_at(moments)).permute(0, 3, 1, 2)

    def found(self, frames: Callable[[], Any]) -> Tensor:
        try:
            return frames().data
        except (RuntimeError, IndexError) as error:
            raise DataError(f"video {self.path} can't be decoded: {error}") from error


class WithPyAV(Video):
    """PyAV, which decodes from the last key frame before the wanted frame, or goes on where it was."""

    def __init__(self, path: Path) -> None:
        import av

        self.path, self.container = path, av.open(str(path))
        if not self.container.streams.video:
            raise DataError(f"video {path} has no pictures, only {[its.type for its in self.container.streams]}")
        self.stream = self.container.streams.video[0]
        self.stream.codec_context.thread_count = 1
        self.fps = float(self.stream.average_rate) if self.stream.average_rate else None
        keys_last = sorted(self.scan(), key=lambda its: its[1] is not None)
        shown = sorted(dict(keys_last).items())  # one frame at a time: if there are two, the key frame's place counts
        self.numbers = {shown_at: number for number, (shown_at, _) in enumerate(shown)}
        self.times = [float((shown_at - shown[0][0]) * (self.stream.time_base or 1)) for shown_at, _ in shown]
        self.keys = [(number, seek_to) for number, (_, seek_to) in enumerate(shown) if seek_to is not None]
        if not self.keys:
            raise DataError(f"video {path} has no key frame")
        if self.container.format.name == PROGRAM_STREAM:
            self.keys = self.keys[:1]  # always decode from the beginning
        self.frames: Iterator[Any] = iter(())
        self.next = len(shown)

    def scan(self) -> Iterator[tuple[int, int | None]]:
        """Yield when each frame is shown and, for key frames, where to seek to."""
        for packet in self.container.demux(self.stream):
            shown_at = packet.dts if packet.pts is None else packet.pts
            if shown_at is not None and not packet.is_discard:
                seek_to = shown_at if packet.dts is None else packet.dts
                yield shown_at, seek_to if packet.is_keyframe else None

    def __len__(self) -> int:
        return len(self.numbers)

    @property
    def seconds(self) -> float:
        return self.times[-1] + 1 / (self.fps or 25)

    def frames_at(self, times: Sequence[float]) -> Tensor:
        numbers = [max(0, bisect_right(self.times, time + ROUNDING) - 1) for time in times]
        return self.read(numbers).permute(0, 3, 1, 2)

    def read(self, numbers: Sequence[int]) -> Tensor:
        import av

        try:
            once = {number: self.frame(number) for number in sorted(set(numbers))}
        except av.FFmpegError as error:
            raise DataError(f"video {self.path} can't be decoded: {error}") from error
        return torch.from_numpy(np.stack([once[number] for number in numbers]))

    def frame(self, number: int) -> np.ndarray:
        key, seek_to = self.keys[max(0, bisect_right(self.keys, number, key=lambda its: its[0]) - 1)]
        if not key - SKIP <= self.next <= number:
            self.container.seek(seek_to, stream=self.stream)
            self.frames, self.next = self.container.decode(self.stream), key
        for frame in self.frames:
            self.next = self.numbers.get(frame.pts, self.next) + 1
            if self.next > number:
                return pixels(frame)
        raise DataError(f"video {self.path} says that it has {len(self)} frames, but ends after {self.next}")

    def close(self) -> None:
        self.container.close()


def pixels(frame: Any) -> np.ndarray:
    """Return the pixels of PyAV's frame, upright."""
    return np.rot90(frame.to_ndarray(format="rgb24", threads=1), round(frame.rotation / 90))


class Stills(Video):
    """Frames without times: they follow each other at ``fps`` a second, if that is known."""

    def __init__(self, fps: float | None) -> None:
        self.fps = fps

    @property
    def seconds(self) -> float:
        assert self.fps is not None
        return len(self) / self.fps

    def frames_at(self, times: Sequence[float]) -> Tensor:
        assert self.fps is not None
        numbers = [min(int(time * self.fps + ROUNDING), len(self) - 1) for time in times]
        return self.read(numbers).permute(0, 3, 1, 2)


class Pictures(Stills):
    """A folder with a picture for each frame."""

    def __init__(self, path: Path, fps: float | None) -> None:
        super().__init__(fps)
        self.path, self.files = path, frames_in(path)

    def __len__(self) -> int:
        return len(self.files)

    def read(self, numbers: Sequence[int]) -> Tensor:
        once = {number: self.picture(self.files[number]) for number in dict.fromkeys(numbers)}
        shapes = {its.shape for its in once.values()}
        if len(shapes) > 1:
            raise DataError(f"pictures in {self.path} are of several sizes: {', '.join(map(str, sorted(shapes)))}")
        return torch.from_numpy(np.stack([once[number] for number in numbers]))

    def picture(self, file: Path) -> np.ndarray:
        try:
            with file.open("rb") as opened:
                return np.asarray(read_picture(opened, "RGB"))
        except (OSError, ValueError, SyntaxError) as error:
            raise DataError(f"picture {file} can't be read: {error}") from error


class Array(Stills):
    """The array in a ``.npy`` file, read only where it is needed."""

    def __init__(self, path: Path, fps: float | None) -> None:
        super().__init__(fps)
        self.array = np.load(path, mmap_mode="r")
        if self.array.ndim != 4 or self.array.shape[-1] != 3 or 0 in self.array.shape or self.array.dtype != np.uint8:
            found = f"{self.array.dtype} {list(self.array.shape)}"
            raise DataError(f"video {path} holds {found}; allowed: uint8 [frames, height, width, 3]")

    def __len__(self) -> int:
        return len(self.array)

    def read(self, numbers: Sequence[int]) -> Tensor:
        return torch.from_numpy(self.array[np.asarray(numbers)])
