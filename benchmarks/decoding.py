"""Reading clips from video files: clips per second on one core, whether decoders agree, whether memory grows.

    python benchmarks/decoding.py --out benchmarks/results/decoding.json
    python benchmarks/decoding.py --files 2 --clips 20 --views 1

Files are written first: H.264 in MP4, 340 × 256, 25 frames a second, as long as those of Kinetics. A clip has 32
frames, every second one from a random place; "ready" includes the crop to 224² of training. Times are CPU times of this
process, so other processes do not count. torchcodec needs an FFmpeg: where it does not decode, PyAV is measured alone.
``torchsbp train RECIPE --throughput 20`` says how the reading of a training run compares with its steps.
"""

import argparse
import json
import platform
import resource
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import av
import numpy as np
import torch

from torchsbp.train.data.clips import Sampling, Target
from torchsbp.train.data.videos import decoders, open_video
from torchsbp.train.video.views import Augment, TrainView

SAMPLING = Sampling(frames=32, stride=2)
FRAMES, WIDTH, HEIGHT, RATE = 250, 340, 256, 25
VIEW = TrainView(Augment(), 224)


def write(path: Path, seed: int) -> None:
    """Write a video of moving smooth noise with some grain, about as hard to encode as a real one."""
    draw = np.random.default_rng(seed)
    coarse = torch.from_numpy(draw.uniform(0, 255, (1, 3, 24, 32)))
    scene = torch.nn.functional.interpolate(coarse, (2 * HEIGHT, 2 * WIDTH), mode="bicubic")[0].permute(1, 2, 0).numpy()
    with av.open(str(path), "w") as file:
        stream = file.add_stream("libx264", rate=RATE, options={"crf": "23"})
        stream.width, stream.height, stream.pix_fmt = WIDTH, HEIGHT, "yuv420p"
        for number in range(FRAMES):
            top, left = int(HEIGHT * (0.5 + 0.4 * np.sin(number / 30))), number
            pixels = scene[top : top + HEIGHT, left : left + WIDTH] + draw.normal(0, 4, (HEIGHT, WIDTH, 1))
            frame = av.VideoFrame.from_ndarray(pixels.clip(0, 255).astype(np.uint8), format="rgb24")
            file.mux(stream.encode(frame))
        file.mux(stream.encode())


def clip(path: Path, decoder: str, number: int) -> torch.Tensor:
    torch.manual_seed(number)
    with open_video(path, decoder) as video:
        return video.read(SAMPLING.at_random(len(video)))


def resident() -> float:
    """MiB of memory that the process holds."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 2**20


def per_second(work: Callable[[int], Any], clips: int) -> float:
    for number in range(2):
        work(number)
    begin = time.process_time()
    for number in range(clips):
        work(number)
    return clips / (time.process_time() - begin)


def measured(paths: Sequence[Path], decoder: str, clips: int, views: int) -> dict[str, Any]:
    def read(number: int) -> torch.Tensor:
        return clip(paths[number % len(paths)], decoder, number)

    def ready(number: int) -> Any:
        return VIEW(read(number), Target(torch.zeros(1)))

    row = {"decoder": decoder, "read clips/s": per_second(read, views), "ready clips/s": per_second(ready, views)}
    for number in range(clips // 10):  # fills the caches of libraries
        read(number)
    before = resident()
    for number in range(clips):
        read(number)
    return {**row, "clips": clips, "memory MiB before": before, "after": resident()}


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--files", type=int, default=8)
    parser.add_argument("--views", type=int, default=100, help="clips whose time is taken")
    parser.add_argument("--clips", type=int, default=1000, help="clips over which memory is watched")
    parser.add_argument("--out", type=Path, help="JSON file for the rows")
    args = parser.parse_args(argv)

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder) / f"{number}.mp4" for number in range(args.files)]
        for number, path in enumerate(paths):
            write(path, number)
        rows = []
        for decoder in decoders():
            rows.append(measured(paths, decoder, args.clips, args.views))
            print(rows[-1], flush=True)
        first, *others = decoders()
        same = [all(torch.equal(clip(path, first, 0), clip(path, other, 0)) for path in paths) for other in others]
    about = {"machine": platform.machine(), "torch": torch.__version__, "av": av.__version__, "same frames": all(same)}
    print(about, flush=True)
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps({**about, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
