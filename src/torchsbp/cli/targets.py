"""``torchsbp targets ANNOTATIONS ROOT --split NAME``: make per-frame targets, for THUMOS'14 and data in its layout."""

import argparse
from collections import Counter
from pathlib import Path

from ..errors import UsageError

PURPOSE = "make per-frame targets from annotations of actions"


def arguments() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(
        prog="torchsbp targets",
        description="Writes ROOT/target_perframe/VIDEO.npy, ROOT/segments.csv, ROOT/classes.txt, ROOT/fps.txt and the "
        "list ROOT/SPLIT.txt for the frames in ROOT/frames (VIDEO.npy, or pictures in VIDEO/).",
    )
    result.add_argument(
        "annotations", type=Path, help="a CSV file (video, type, start, end) or THUMOS's folder of texts"
    )
    result.add_argument("root", type=Path)
    result.add_argument("--split", required=True, help="name of the list: train, test")
    result.add_argument("--fps", type=float, help="frames a second in ROOT/frames; default: those of ROOT, or 4")
    result.add_argument(
        "--classes", type=Path, help="names of actions, one a line; default: those of ROOT, or THUMOS's"
    )
    result.add_argument("--skip-missing", action="store_true", help="leave out annotated videos that have no frames")
    return result


def run(argv: list[str]) -> None:
    own = arguments().parse_args(argv)
    from ..train.data.thumos import prepare

    if own.fps is not None and not 0 < own.fps < 1000:
        raise UsageError(f"--fps {own.fps} is not allowed; allowed: a number in (0, 1000)")
    counts: Counter[str] = prepare(own.annotations, own.root, own.split, own.fps, own.classes, own.skip_missing)
    for what, number in counts.items():
        if number:
            print(f"{number:7} {what}")
