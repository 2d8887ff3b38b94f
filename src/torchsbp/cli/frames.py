"""``torchsbp frames VIDEO|FOLDER… --out ROOT/frames``: write frames of video files as arrays to train with."""

import argparse
from collections.abc import Iterable
from pathlib import Path

from ..errors import DataError, RunError, UsageError

PURPOSE = "take frames from video files"
PIECE = 64
"""frames that are read together"""


def arguments() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(
        prog="torchsbp frames",
        description="Writes OUT/VIDEO.npy, [frames, height, width, 3] of 8 bits, for every video that has none yet.",
    )
    result.add_argument("videos", nargs="+", type=Path, metavar="VIDEO|FOLDER", help="files, folders of them")
    result.add_argument("--out", type=Path, required=True, help="a folder")
    result.add_argument("--fps", type=float, default=4.0, help="frames a second (default: 4)")
    result.add_argument("--short", type=int, default=256, help="the short side, in pixels (default: 256)")
    return result


def run(argv: list[str]) -> None:
    own = arguments().parse_args(argv)
    if not 0 < own.fps < 1000 or own.short < 1:
        raise UsageError(f"--fps {own.fps} --short {own.short}; allowed: numbers above 0, fps below 1000")
    videos = named(path for given in own.videos for path in found(given))
    own.out.mkdir(parents=True, exist_ok=True)
    unread = []
    for name, path in videos.items():
        target = own.out / f"{name}.npy"
        if target.exists():
            print(f"{target} is there already")
            continue
        try:
            print(f"{target}: {extract(path, target, own.fps, own.short)} frames", flush=True)
        except DataError as error:
            unread.append(str(error))
    if unread:
        raise RunError("\n".join([f"{len(unread)} of {len(videos)} videos can't be read:", *unread]))


def found(given: Path) -> list[Path]:
    """The video files of a path: the file itself, or those in the folder."""
    from ..train.data.videos import FILES

    if given.suffix == ".npy":
        raise UsageError(f"{given} holds frames already, not a video; put it into ROOT/frames as it is")
    if not given.is_dir():
        return [given]
    paths = sorted(path for path in given.rglob("*") if path.suffix.lower() in FILES)
    if not paths:
        raise UsageError(
            f"no video files in {given}; allowed: {', '.join(FILES)}. A folder of pictures holds frames already: put "
            "it into ROOT/frames as it is"
        )
    return paths


def named(paths: Iterable[Path]) -> dict[str, Path]:
    """Videos by the names of their arrays; raise ``UsageError`` if two would have the same."""
    result: dict[str, Path] = {}
    for path in paths:
        other = result.setdefault(path.stem, path)
        if other.resolve() != path.resolve():
            raise UsageError(
                f"{other} and {path} would both be {path.stem}.npy; rename one, or take it with another --out"
            )
    return result


def extract(path: Path, target: Path, fps: float, short: int) -> int:
    """Write the frames of a video and return how many. The file gets its name when it is complete: the next call of the
    command repeats a video that was interrupted. Frames are written, not mapped: on a full disk a write is an error,
    where a map ends the process."""
    from numpy.lib.format import write_array_header_1_0
    from torchvision.transforms.v2.functional import resize

    from ..train.data.videos import open_video

    partial = target.with_suffix(".partial")
    try:
        with open_video(path) as video, partial.open("wb") as file:
            times = video.moments(fps)
            for begin in range(0, len(times), PIECE):
                frames = resize(video.frames_at(times[begin : begin + PIECE]), [short], antialias=True)
                frames = frames.permute(0, 2, 3, 1).contiguous()
                if begin == 0:
                    shape = (len(times), *frames.shape[1:])
                    write_array_header_1_0(file, {"descr": "|u1", "fortran_order": False, "shape": shape})
                file.write(frames.numpy().data)
    except OSError as error:
        raise RunError(f"{target} can't be written: {error}. Make room, then repeat the command") from error
    partial.replace(target)
    return len(times)
