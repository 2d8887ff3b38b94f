"""Small video files whose frames can be told apart: frame i is of grey 20 + 4·i."""

from pathlib import Path

import av
import numpy as np


def write_video(
    path: Path, frames: int = 40, codec: str = "libx264", turned: int = 0, gop: int = 12, fps: int = 25
) -> Path:
    """``turned``: degrees by which it says that it is to be turned."""
    with av.open(str(path), "w") as file:
        stream = file.add_stream(codec, rate=fps)
        stream.width, stream.height, stream.pix_fmt, stream.bit_rate = 64, 48, "yuv420p", 8_000_000
        stream.codec_context.gop_size = gop
        if turned:
            stream.set_display_rotation(turned)
        for number in range(frames):
            frame = av.VideoFrame.from_ndarray(picture(number), format="rgb24")
            file.mux(stream.encode(frame))
        file.mux(stream.encode())
    return path


def picture(number: int) -> np.ndarray:
    """``[48, 64, 3]``, white in a corner."""
    result = np.full((48, 64, 3), 20 + 4 * number, np.uint8)
    result[:12, :16] = 255
    return result
