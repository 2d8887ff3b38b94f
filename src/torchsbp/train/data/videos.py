"""Video files: the frames that are shown at given moments, by torchcodec where it decodes, else by PyAV.

torchcodec needs FFmpeg to be installed on the system; PyAV brings its own.
"""

from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from ...errors import DataError, UsageError

FAR = 8.0
"""seconds: to a later moment than this a reader jumps, instead of decoding all frames before it"""


class Video(Protocol):
    """An opened file."""

    seconds: float
    """its length"""
    fps: float

    def frames_at(self, times: Sequence[float]) -> Tensor:
        """``[n, 3, H, W]`` of 8 bits: what is shown at these moments, in seconds from the first frame, ascending. At
        the end and beyond, the last frame."""
        ...


def open_video(path: Path) -> Video:
    if not path.is_file():
        raise DataError(f"no video {path}")
    decoder = torchcodec_decoder()
    if decoder is not None:
        try:
            return OfTorchcodec(decoder(str(path), dimension_order="NCHW"))
        except Exception:  # it finds no FFmpeg, or one that does not know this format: PyAV's may
            pass
    try:
        import av
    except ImportError as error:
        raise UsageError("reading videos needs PyAV or torchcodec; pip install 'torchsbp[video]'") from error
    try:
        return OfPyAV(path)
    except av.FFmpegError as error:
        raise DataError(f"video {path} can't be read: {error}") from error


@cache
def torchcodec_decoder() -> Any:
    """Its class of decoders, None where it is not installed."""
    try:
        from torchcodec.decoders import VideoDecoder
    except (ImportError, RuntimeError, OSError):
        return None
    return VideoDecoder


class OfTorchcodec:
    def __init__(self, decoder: Any) -> None:
        self.decoder = decoder
        about = decoder.metadata
        self.begin, end = float(about.begin_stream_seconds), float(about.end_stream_seconds)
        self.seconds, self.fps = end - self.begin, float(about.average_fps)
        self.last = end - 0.5 / self.fps

    def frames_at(self, times: Sequence[float]) -> Tensor:
        moments = [min(self.begin + time, self.last) for time in times]
        return self.decoder.get_frames_played_at(seconds=moments).data


class OfPyAV:
    """Decodes forwards as long as moments are ascending, and jumps otherwise."""

    def __init__(self, path: Path) -> None:
        import av

        self.path, self.container = path, av.open(str(path))
        if not self.container.streams.video:
            raise DataError(f"{path} has no video")
        self.stream = self.container.streams.video[0]
        self.stream.thread_type = "AUTO"
        self.fps = float(self.stream.average_rate or self.stream.guessed_rate or 25)
        self.unit = float(self.stream.time_base or 1 / self.fps)
        self.begin = (self.stream.start_time or 0) * self.unit
        of_container = (self.container.duration or 0) / 1e6  # where the stream does not say
        self.seconds = of_container if self.stream.duration is None else self.stream.duration * self.unit
        self.jump(0.0)

    def jump(self, time: float) -> None:
        """To the last frame from which decoding can begin, before that moment."""
        self.container.seek(int((self.begin + time) / self.unit), stream=self.stream)
        self.coming = self.decoded()
        self.shown = next(self.coming, None)
        self.next = next(self.coming, None)
        if self.shown is None:
            raise DataError(f"video {self.path} has no frames at {time:.2f} s")

    def decoded(self) -> Iterator[tuple[float, Any]]:
        for frame in self.container.decode(self.stream):
            if frame.time is not None:
                yield frame.time - self.begin, frame

    def frames_at(self, times: Sequence[float]) -> Tensor:
        import av

        try:
            return torch.from_numpy(np.stack([self.frame_at(time) for time in times])).permute(0, 3, 1, 2)
        except av.FFmpegError as error:
            raise DataError(f"video {self.path} can't be read: {error}") from error

    def frame_at(self, time: float) -> np.ndarray:
        assert self.shown is not None
        if time < self.shown[0] - 1e-6 or time > self.shown[0] + FAR:
            self.jump(time)
        while self.next is not None and self.next[0] <= time + 1e-6:
            self.shown, self.next = self.next, next(self.coming, None)
        frame = self.shown[1]
        turns = round(getattr(frame, "rotation", 0) / 90)  # phones write how a picture is to be turned
        return np.ascontiguousarray(np.rot90(frame.to_ndarray(format="rgb24"), turns))
