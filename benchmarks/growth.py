"""Memory and time of training over batch, resolution and depth of a ViT, and over the frames of a video model.

    python benchmarks/growth.py --jobs 4 --out benchmarks/results/growth.json
    python benchmarks/growth.py --models video_swin_tiny --axes frames --methods full checkpoint "sbp frames r=0.25"
    python benchmarks/plot.py benchmarks/results/growth.json --out growth.png

A point that does not fit is a row with an error, and a gap in the plot.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

import torch

import children
import commandline
from case import MODES, Case, Row, Setting, measure, release

METHODS = ["full", "checkpoint", "sbp query r=0.25", "sbp query r=0.25, saved"]
AXES = {
    "resolution": (224, 384, 512, 1024),
    "batch": (32, 128, 512),
    "depth": (6, 12, 24, 48),
    "frames": (8, 16, 32, 64, 128),
}
OF_IMAGES = [axis for axis in AXES if axis != "frames"]


def grown(setting: Setting, axis: str, value: int) -> Setting:
    if axis == "batch":
        return replace(setting, batch=value)
    if axis == "resolution":
        return replace(setting, batch=8, size=value)
    if axis == "frames":
        return replace(setting, build={"frames": value})
    return replace(setting, batch=64, build={"depth": value})


def point(setting: Setting) -> Row:
    torch.compiler.reset()
    try:
        case = Case(setting)
        return {"batch": case.batch, "size": case.size} | measure(case)
    except torch.OutOfMemoryError:
        return {"error": children.OUT_OF_MEMORY}


def sweep(setting: Setting, axis: str, values: Sequence[int]) -> Iterator[Row]:
    """Work for a child process: yield an empty row when the first point has run, then a row per point."""
    Case(grown(setting, axis, values[0])).steps(1)
    yield {}
    for value in values:
        release()
        yield {"axis": axis, "value": value} | point(grown(setting, axis, value))


def main(argv: Sequence[str] | None = None) -> None:
    parser = commandline.parser(__doc__, ["vit_base"], METHODS)
    parser.add_argument("--axes", nargs="+", default=OF_IMAGES, choices=list(AXES), metavar="AXIS")
    parser.add_argument("--batch", type=int, help="over frames: instead of the model's own")
    parser.add_argument("--modes", nargs="+", default=["eager"], choices=list(MODES))
    parser.set_defaults(steps=4, warmup=2)
    args = parser.parse_args(argv)

    rows: list[Row] = []
    for axis in args.axes:
        work = partial(sweep, axis=axis, values=AXES[axis])
        for row in children.run(work, commandline.settings(args), args.jobs, args.limit):
            rows.append(row)
            commandline.write(args, rows)
            print(row, flush=True)


if __name__ == "__main__":
    main()
