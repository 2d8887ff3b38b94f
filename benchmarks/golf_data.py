"""Unpack golf swings from a packed file for ``torchsbp train``: whole for online detection, cut for recognition.

    python benchmarks/golf_data.py golfdb96_avif.npz data        # data/swings, data/phases, data/stills

The file is not part of the project. It has 588 swings of GolfDB, each an animated AVIF (Pillow 11.3 reads it) of 72
frames of 96² at 30 a second, and the frame numbers of 8 events. For both parts of the official split, 440 and 148
swings, this writes

    OUT/swings    THUMOS's layout: from the first event on, a frame belongs to the action that the latest event begins
    OUT/phases    .npy clips and lists: 7 clips of every swing, each 16 frames evenly from one event to the next
    OUT/stills    every third frame as a picture, in the folder of its action, or "before" the first event

The swing back and the swing down show the same poses in reverse order.
"""

import argparse
import csv
import io
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from itertools import pairwise
from pathlib import Path

import numpy as np
from PIL import Image

from torchsbp.train.data.thumos import prepare

EVENTS = ("address", "toe-up", "mid-backswing", "top", "mid-downswing", "impact", "mid-follow-through", "finish")
NONE = "before"
"""The class of stills before the first event."""
FPS = 30.0
FRAMES = 16
"""The frames of a phase's clip."""
STILL = 3
"""Every so many frames one still is written."""


def decoded(packed: bytes) -> np.ndarray:
    """``[frames, height, width, 3]``."""
    image = Image.open(io.BytesIO(packed))
    frames = []
    for number in range(image.n_frames):
        image.seek(number)
        frames.append(np.asarray(image.convert("RGB")))
    return np.stack(frames)


def unpack(out: Path, part: str, name: str, packed: bytes, events: Sequence[int]) -> None:
    """Write a swing, its phases and its stills."""
    frames = decoded(packed)
    np.save(out / "swings" / "frames" / f"{name}.npy", frames)
    for phase, (begin, end) in enumerate(pairwise(events)):
        evenly = np.linspace(begin, end, FRAMES).round().astype(int)
        np.save(out / "phases" / f"{name}_{phase}.npy", frames[evenly])
    for number in range(0, len(frames), STILL):
        action = (NONE, *EVENTS)[sum(event <= number for event in events)]
        folder = out / "stills" / part / action
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(frames[number]).save(folder / f"{name}_{number:02}.ppm")


def write_swings(root: Path, part: str, names: Sequence[str], events: np.ndarray, frames: int) -> None:
    """Write the segments, targets and list of one part."""
    with (root / f"{part}.csv").open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(("video", "type", "start", "end"))
        for name, its in zip(names, events, strict=True):
            for action, (begin, end) in zip(EVENTS, pairwise((*its.tolist(), frames)), strict=True):
                rows.writerow((name, action, begin / FPS, end / FPS))
    (root / "classes.txt").write_text("\n".join(EVENTS))
    print(f"{part}: {dict(prepare(root / f'{part}.csv', root, part, FPS, None, skip_missing=False))}", flush=True)


def write_phases(root: Path, part: str, names: Sequence[str]) -> None:
    numbers = range(len(EVENTS) - 1)
    (root / f"{part}.txt").write_text("".join(f"{name}_{phase}.npy {phase}\n" for name in names for phase in numbers))
    (root / "classes.txt").write_text("\n".join(f"{begin} to {end}" for begin, end in pairwise(EVENTS)))


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--swings", type=int, help="the first ones of each part only")
    parser.add_argument("--jobs", type=int, default=1, help="processes that decode")
    args = parser.parse_args(argv)
    packed = np.load(args.file)
    blob, edges, events = packed["blob"], packed["off"], packed["events"].astype(int)
    parts = {
        "train": np.flatnonzero(packed["split"] != 1)[: args.swings],
        "test": np.flatnonzero(packed["split"] == 1)[: args.swings],
    }
    for folder in ("swings/frames", "phases"):
        (args.out / folder).mkdir(parents=True, exist_ok=True)
    for part, numbers in parts.items():
        named = [f"swing{number:03}" for number in numbers]
        clips = (blob[edges[number] : edges[number + 1]].tobytes() for number in numbers)
        with ProcessPoolExecutor(args.jobs) as pool:
            list(pool.map(partial(unpack, args.out, part), named, clips, events[numbers].tolist(), chunksize=4))
        write_swings(args.out / "swings", part, named, events[numbers], packed["phase"].shape[1])
        write_phases(args.out / "phases", part, named)


if __name__ == "__main__":
    main()
