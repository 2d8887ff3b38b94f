"""``torchsbp detect RUN VIDEO [options]``: which actions a trained model sees in a video, and when."""

import argparse
import json
from pathlib import Path

from ..errors import UsageError
from .trained import opened, parser

PURPOSE = "find actions in a video"
SHOWN = 10
"""how many segments are printed"""


def arguments() -> argparse.ArgumentParser:
    result = parser("detect", "Find actions in a video with trained weights of task online_action.")
    result.add_argument(
        "video", type=Path, metavar="VIDEO", help="a file; or frames, task.data.fps a second: a .npy file, a folder"
    )
    result.add_argument("--out", type=Path, default=Path("detections"), help="a folder (default: %(default)s)")
    return result


def run(argv: list[str]) -> None:
    own, overrides = arguments().parse_known_args(argv)
    from ..train.data.videos import open_video

    with opened(own, "detect", overrides) as its:
        from ..train.evaluation import autocast
        from ..train.online.picture import draw
        from ..train.online.segments import detect
        from ..train.tasks.online_action import OnlineAction

        if not isinstance(its.task, OnlineAction):
            raise UsageError(f"{own.run} is a run of task {its.config.task.name}; detect needs one of online_action")
        video = open_video(own.video, fps=its.task.options.data.fps)
        with autocast(its.config, its.processes.device):
            times, scores = its.task.follow(its.model, video)
        names = its.task.names[:-1]
        found = detect(scores, its.task.options.data.fps)
    own.out.mkdir(parents=True, exist_ok=True)
    segments = [{**its._asdict(), "action": names[its.label]} for its in found]
    record = {"video": str(own.video), "times": times, "names": names, "scores": scores.tolist(), "segments": segments}
    (own.out / f"{own.video.stem}.json").write_text(json.dumps(record))
    picture = own.out / f"{own.video.stem}.png"
    draw(picture, own.video.name, times, scores, names, found, video)
    for label, start, end, score in found[:SHOWN]:
        print(f"{start:8.2f} s {end:8.2f} s  {score:.2f}  {names[label]}")
    print(f"{len(times)} moments, {len(segments)} segments: {picture}, {picture.with_suffix('.json')}")
