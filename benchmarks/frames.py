"""Memory and step time of online action detection against the number of frames: ResNet-50 and LSTR, trained together.

    python benchmarks/frames.py --out benchmarks/results/frames.json   # on a GPU, bf16: eager; 160 frames also compiled
    python benchmarks/frames.py --frames 10 20 --size 32 --batch 2 --device cpu --compiled 10   # small, to try it
    python benchmarks/frames.py --show benchmarks/results/frames.json

One row per mode, method and number of frames: a step is forward, backward and Adam's update. Peak memory is that of
everything: weights, gradients, Adam's state ("static": what stays between steps), frames of 8 bits and activations.
Four fifths of the frames are long memory, one fifth work memory. If a number of frames does not fit, its row says so,
and larger ones are left out. Checkpointing is by chunks of frames: all but one chunk's activations are recomputed.
"""

import argparse
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

import children
import commandline
from case import MIB, MODES, Row, Stopwatch, release
from torchsbp import SBPConfig
from torchsbp.memory.peak import peak_bytes
from torchsbp.train.data.window import Window
from torchsbp.train.online.detector import OnlineDetector
from torchsbp.train.online.encoder import Encoder, make_encoder, width
from torchsbp.train.online.lstr import LSTR, Temporal
from torchsbp.train.tasks.online_action import multi_label_loss

METHODS = {
    "full": ({}, None),
    "checkpoint": ({"checkpoint": True}, None),
    "frozen encoder": ({"frozen": True}, None),
    "sbp r=1/2": ({}, 0.5),
    "sbp r=1/5": ({}, 0.2),
    "sbp r=1/8": ({}, 0.125),
    "sbp r=1/5, checkpoint": ({"checkpoint": True}, 0.2),
}
"""(options of the encoder, keep-ratio of frames)"""
COMPILED = ["full", "checkpoint", "sbp r=1/5"]
CLASSES = 22
FRAMES = [32, 64, 128, 160, 256, 512, 1024]
FLOORS = {"memory": 0.28, "speed": 1.6}
"""Targets for r = 1/5 at 160 frames, relative to full backprop."""


@dataclass(frozen=True)
class Setting:
    """A method in a mode. ``model`` is there for ``children.groups``."""

    method: str
    mode: str
    frames: tuple[int, ...]
    batch: int
    size: int
    device: str
    chunk: int
    encoder: str = "resnet50"
    bf16: bool = True
    warmup: int = 2
    steps: int = 5
    model: str = "frames"

    @property
    def names(self) -> Row:
        return {"mode": self.mode, "method": self.method}


class Case:
    """A detector for so many frames, and its training steps."""

    def __init__(self, setting: Setting, frames: int) -> None:
        torch.manual_seed(0)
        self.setting = setting
        options, ratio = METHODS[setting.method]
        config = Encoder(name=setting.encoder, chunk=setting.chunk, **options)
        window = Window(long=frames - frames // 5, long_rate=1, work=frames // 5)
        with torch.device(setting.device):
            encoder = make_encoder(config, setting.size, (0.485, 0.456, 0.406), (0.229, 0.224, 0.225), start=True)
            temporal = LSTR(width(encoder, setting.size, config.name), CLASSES - 1, window, Temporal())
            self.video = torch.randint(
                0, 256, (setting.batch, frames, 3, setting.size, setting.size), dtype=torch.uint8
            )
            self.empty = torch.zeros(setting.batch, window.long, dtype=torch.bool)
            labels = torch.randint(CLASSES - 1, (setting.batch, window.work))
        self.targets = torch.nn.functional.one_hot(labels, CLASSES).float()
        self.model = OnlineDetector(encoder, temporal, config).to(setting.device, memory_format=torch.channels_last)
        if ratio is not None:
            self.model.apply_sbp(SBPConfig(keep_ratio=ratio, sampler="frames", per_sample=False))
        if setting.mode != "eager":
            self.model.compile(mode=MODES[setting.mode])
        trained = [its for its in self.model.parameters() if its.requires_grad]
        self.optimizer = torch.optim.Adam(trained, lr=1e-6, fused=setting.device == "cuda")

    def steps(self, count: int) -> Stopwatch:
        watch = Stopwatch(self.setting.device)
        for number in range(count):
            watch.mark()
            self.model.set_step(number)
            with torch.autocast(self.setting.device, torch.bfloat16, enabled=self.setting.bf16):
                loss = multi_label_loss(self.model(self.video, self.empty), self.targets)
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
        watch.mark()
        if watch.cuda:
            torch.cuda.synchronize()
        return watch


def measure(setting: Setting) -> Iterator[Row]:
    """Work for a child process: yield an empty row when the smallest case has run, then one per number of frames."""
    Case(setting, setting.frames[0]).steps(2)
    release()
    yield {}
    for frames in setting.frames:
        try:
            yield {"frames": frames, "batch": setting.batch, "size": setting.size, **measured(Case(setting, frames))}
        except (torch.OutOfMemoryError, RuntimeError) as error:
            if "out of memory" not in str(error):
                raise
            yield {"frames": frames, "batch": setting.batch, "size": setting.size, "error": "out of memory"}
            return
        release()


def measured(case: Case) -> Row:
    cuda, row = case.setting.device == "cuda", {}
    case.steps(case.setting.warmup)
    if cuda:
        row["static MiB"] = torch.cuda.memory_allocated() / MIB
        torch.cuda.reset_peak_memory_stats()
    watch = case.steps(case.setting.steps)
    if cuda:  # CUDA graphs hold their memory, and the allocator does not count it as allocated
        graphs = case.setting.mode == "graphs"
        row["peak MiB"] = (torch.cuda.max_memory_reserved() if graphs else peak_bytes()) / MIB
    times = [watch.between(i, i + 1) for i in range(case.setting.steps)]
    return row | {"step ms": statistics.median(times)}


def add_ratios(rows: Sequence[Row]) -> None:
    """Add memory and speed relative to full backprop of the same mode and number of frames."""
    full = {(row["mode"], row["frames"]): row for row in rows if row["method"] == "full" and "step ms" in row}
    for row in rows:
        plain = full.get((row["mode"], row.get("frames")))
        if plain and "step ms" in row:
            row["speed"] = plain["step ms"] / row["step ms"]
            if "peak MiB" in row:
                row["memory"] = row["peak MiB"] / plain["peak MiB"]


def markdown(rows: Sequence[Row]) -> str:
    """A table per mode, with a line per method and a column per number of frames."""
    tables = []
    for mode in dict.fromkeys(row["mode"] for row in rows):
        its = [row for row in rows if row["mode"] == mode and "frames" in row]
        counts = sorted({row["frames"] for row in its})
        lines = [" | ".join([f"| {mode}", *(f"{count} frames" for count in counts)]) + " |"]
        lines.append("|---" * (1 + len(counts)) + "|")
        for method in dict.fromkeys(row["method"] for row in its):
            cells = {row["frames"]: cell(row) for row in its if row["method"] == method}
            lines.append(f"| {' | '.join([method, *(cells.get(count, '–') for count in counts)])} |")
        tables.append("\n".join(lines))
    return "\n\n".join(tables)


def cell(row: Row) -> str:
    if "error" in row:
        return row["error"]
    memory = f"{row['peak MiB'] / 1024:.1f} GiB, " if "peak MiB" in row else ""
    times = f"{row['step ms']:.0f} ms"
    relative = f" ({row['memory']:.2f}×, {row['speed']:.2f}×)" if "memory" in row and row["method"] != "full" else ""
    return memory + times + relative


def floors(rows: Sequence[Row]) -> list[str]:
    """Lines that compare the targets for r = 1/5 with what was measured."""
    found = {(row["mode"], row["method"], row.get("frames")): row for row in rows}
    lines = []
    for mode in MODES:
        row = found.get((mode, "sbp r=1/5", 160), {})
        if "memory" in row:
            held = row["memory"] <= FLOORS["memory"] and row["speed"] >= FLOORS["speed"]
            lines.append(f"{'ok' if held else 'NOT'}: {mode}, 160 frames: {row['memory']:.3f}×, {row['speed']:.2f}×")
    long, full = (found.get(("eager", *key), {}).get("peak MiB") for key in (("sbp r=1/5", 512), ("full", 128)))
    if long and full:
        held = "ok" if long <= full else "NOT"
        lines.append(f"{held}: 512 frames at r=1/5 {long:.0f} MiB, 128 frames in full {full:.0f} MiB")
    return lines


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--frames", nargs="+", type=int, default=FRAMES)
    parser.add_argument("--modes", nargs="+", choices=list(MODES), default=list(MODES), help="graphs: CUDA graphs")
    parser.add_argument("--compiled", nargs="*", type=int, default=[160], help="numbers of frames to compile for")
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=list(METHODS), metavar="METHOD")
    parser.add_argument("--encoder", default="resnet50")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--chunk", type=int, default=256, help="frames encoded at a time without gradients")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=["cuda", "cpu"])
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--limit", type=float, default=240, help="seconds for a method to prepare, and to be measured")
    parser.add_argument("--out", type=Path, help="JSON file for the rows")
    parser.add_argument("--commit", default="", help="commit to record, instead of what git says")
    parser.add_argument("--show", type=Path, help="print the tables of a JSON file and stop")
    args = parser.parse_args(argv)
    args.bf16 = True
    if args.show:
        rows = commandline.read(args.show)
        print("\n".join([markdown(rows), "", *floors(rows)]))
        return
    common = {name: getattr(args, name) for name in ("batch", "size", "device", "chunk", "encoder", "steps")}
    settings = [Setting(method, "eager", tuple(args.frames), **common) for method in args.methods]
    modes = [mode for mode in args.modes if mode != "eager"] if args.compiled else []
    compiled = [replace(its, frames=tuple(args.compiled)) for its in settings if its.method in COMPILED]
    settings = settings if "eager" in args.modes else []
    settings += [replace(its, mode=mode) for mode in modes for its in compiled]
    rows = []
    for row in children.run(measure, settings, len(METHODS), args.limit):
        rows.append(row)
        add_ratios(rows)
        commandline.write(args, rows)
        print(row, flush=True)
    print("\n".join([markdown(rows), "", *floors(rows)]))


if __name__ == "__main__":
    main()
