"""Memory and speed of detectors at 800 × 1333 pixels: Mask R-CNN with ConvNeXt-T, Cascade Mask R-CNN with ConvNeXt-B.

    python benchmarks/detection.py --out benchmarks/results/detection.json            # on a GPU: the docs' tables
    python benchmarks/detection.py --modes eager compiled --batches 2 --jobs 12  # prepared together, timed one by one
    python benchmarks/detection.py --device cpu --height 96 --width 128 --batches 1 --methods full "sbp r=0.5"
    python benchmarks/detection.py --show benchmarks/results/detection.json

Images and objects are drawn once. Enough proposals are near objects that the heads sample as many of these as they
may, a quarter, as in a trained detector. So memory is that of the largest steps. On a GPU the parts of the peak are
shown: what is allocated before the step (weights, optimizer, images), what the forward pass of each part adds and keeps
(a compiled backbone counts as one with the pyramid), and the rest, which is short-lived or made in backward. "GPU busy"
is how long kernels run: for the rest of a step the GPU waits for the CPU to launch them. On a CPU: what is saved for
backward, by part.
"""

import argparse
import json
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import children
import commandline
import torchsbp
from case import Stopwatch, release
from torchsbp.config import PRESETS
from torchsbp.memory.estimate import checkpoint_blocks
from torchsbp.memory.peak import peak_bytes
from torchsbp.memory.saved import Saved
from torchsbp.train.detection.model import Detector, compile_backbone
from torchsbp.train.tasks.detection import Data, Detection, DetectionOptions, Lean, Model

MIB = 2**20
CLASSES, OBJECTS, NEAR = 80, 8, 400
MODELS = {
    "mask_rcnn_convnext_tiny": Model("mask_rcnn", "convnext_tiny", {"ls_init_value": 1.0}, drop_path=0.4),
    "cascade_mask_rcnn_convnext_base": Model(
        "cascade_mask_rcnn", "convnext_base", {"ls_init_value": 1.0}, drop_path=0.7, proposals=2000
    ),
}
PARTS = {"backbone.body": "backbone", "backbone": "pyramid", "rpn": "proposals", "heads": "heads"}
Row = dict[str, Any]


@dataclass(frozen=True)
class Method:
    """SBP's options for the backbone (None: plain), what the heads do lean, and whether blocks are checkpointed."""

    sbp: dict[str, Any] | None = None
    lean: Lean = field(default_factory=Lean)
    checkpoint: bool = False

    def prepare(self, model: nn.Module) -> None:
        if self.checkpoint:
            checkpoint_blocks(model.backbone.body)  # type: ignore[union-attr, arg-type]
        if self.sbp is not None:
            torchsbp.apply(model, **self.sbp)


RPN, HEADS = Lean(rpn=True), Lean(rpn=True, recompute=True)
HALF = PRESETS["paper"] | {"per_sample": True, "exact_downsampling": True}  # as in the recipes
METHODS = {
    "full": Method(),
    "checkpointed backbone": Method(checkpoint=True),
    "exact lean": Method({"keep_ratio": 1.0}, RPN),
    "sbp r=0.5, plain heads": Method(HALF),
    "sbp r=0.5": Method(HALF, RPN),
    "sbp r=0.25": Method(HALF | {"keep_ratio": 0.25}, RPN),
    "sbp r=0.5, heads recomputed": Method(HALF, HEADS),
    "sbp r=0.5, half of the proposals": Method(HALF, Lean(rpn=True, proposals=0.5)),
}


class Near(nn.Module):
    """An RPN whose last NEAR proposals are replaced by others near the objects."""

    def __init__(self, rpn: nn.Module) -> None:
        super().__init__()
        self.rpn = rpn

    def forward(self, images: Any, features: Any, targets: list[dict[str, Tensor]]) -> Any:
        proposals, losses = self.rpn(images, features, targets)
        pairs = zip(proposals, targets, strict=True)
        return [torch.cat([its[:-NEAR], near(target["boxes"])]) for its, target in pairs], losses


def near(boxes: Tensor) -> Tensor:
    sides = (boxes[:, 2:] - boxes[:, :2]).repeat(NEAR // len(boxes), 2)
    return boxes.repeat(NEAR // len(boxes), 1) + 0.04 * sides * (2 * torch.rand_like(sides) - 1)


def detector(name: str, method: Method, device: str) -> Detector:
    model = MODELS[name]
    if method.lean.proposals < 1:
        model = Model(**{**vars(model), "norm": "group"})
    task = Detection(DetectionOptions("detection", model, method.lean, Data()), 0, [str(i) for i in range(CLASSES)])
    with torch.device(device):
        found = task.model(start=False)
    assert isinstance(found, Detector)
    return found


def batch_of(count: int, height: int, width: int) -> tuple[Tensor, Tensor, list[dict[str, Tensor]]]:
    """Images padded to multiples of 32, with boxes and masks that fill them."""
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(count, 3, -(-height // 32) * 32, -(-width // 32) * 32, generator=generator)
    targets = []
    for _ in range(count):
        corner, side = torch.rand(OBJECTS, 2, generator=generator), torch.rand(OBJECTS, 2, generator=generator)
        scale = torch.tensor([width, height])
        corner, side = 0.6 * corner * scale, (0.08 + 0.3 * side) * scale
        boxes = torch.cat([corner, corner + side], 1)
        masks = torch.zeros(OBJECTS, height, width, dtype=torch.uint8)
        for mask, (x0, y0, x1, y1) in zip(masks, boxes.int().tolist(), strict=True):
            mask[y0:y1, x0:x1] = 1
        labels = torch.randint(1, CLASSES + 1, (OBJECTS,), generator=generator)
        targets.append({"boxes": boxes, "labels": labels, "masks": masks})
    return images, torch.tensor([[height, width]] * count), targets


@dataclass(frozen=True)
class Setting:
    """What to measure and how, from which a child process builds the case."""

    model: str
    batch: int
    mode: str
    method: str
    height: int
    width: int
    device: str
    warmup: int
    steps: int
    rounds: int = 1

    @property
    def names(self) -> Row:
        return {"model": self.model, "batch": self.batch, "mode": self.mode, "method": self.method}


class Case:
    """A detector on its device, with batch and optimizer."""

    def __init__(self, setting: Setting) -> None:
        torch.manual_seed(0)
        self.device, self.method, self.compiled = setting.device, METHODS[setting.method], setting.mode == "compiled"
        self.model = detector(setting.model, self.method, self.device).train()
        self.method.prepare(self.model)
        self.model.rpn = Near(self.model.rpn)  # type: ignore[assignment]
        self.model.to(self.device, memory_format=torch.channels_last)
        if self.compiled:
            compile_backbone(self.model, 1)
        images, self.sizes, targets = batch_of(setting.batch, setting.height, setting.width)
        self.images = images.to(self.device, memory_format=torch.channels_last)
        self.targets = [{key: value.to(self.device) for key, value in its.items()} for its in targets]
        self.optimizer = torch.optim.AdamW(self.model.parameters(), 1e-5, fused=self.device == "cuda")

    def forward(self) -> Tensor:
        if self.method.sbp is not None:
            torchsbp.set_sizes(self.model, self.sizes, self.images.shape[-2:])
        with torch.autocast(self.device, torch.bfloat16):
            return torch.stack([*self.model(self.images, self.sizes, self.targets).values()]).sum()

    def step(self) -> None:
        self.forward().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def time(self, steps: int) -> float:
        """Milliseconds of a step, the median of ``steps``."""
        watch = Stopwatch(self.device)
        watch.mark()
        for _ in range(steps):
            self.step()
            watch.mark()
        if self.device == "cuda":
            torch.cuda.synchronize()
        return statistics.median(watch.between(i, i + 1) for i in range(steps))

    def busy(self) -> Row:
        """How long the kernels of a step run on a GPU, and how many there are."""
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
            self.step()
            torch.cuda.synchronize()
        found = [e for e in profiler.key_averages() if e.device_type.name == "CUDA" and not e.is_user_annotation]
        return {
            "busy ms": sum(e.self_device_time_total for e in found) / 1000,
            "kernels": sum(e.count for e in found),
        }

    def peak(self) -> Row:
        """The peak of a step on a GPU and its parts, in MiB."""
        torch.cuda.synchronize()
        before = last = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        with Watched(self.model, self.compiled, torch.cuda.memory_allocated) as told:
            loss = self.forward()
            forward = torch.cuda.memory_allocated()
        kept = {}
        for part, allocated in told.items():
            kept[part], last = allocated - last, allocated
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        torch.cuda.synchronize()
        top = peak_bytes()
        state = sum(t.numel() * t.element_size() for its in self.optimizer.state.values() for t in its.values())
        parts = {"optimizer": state, "weights and images": before - state, **kept, "rest": top - forward}
        return {"peak MiB": top / MIB, "parts MiB": {part: size / MIB for part, size in parts.items()}}

    def saved(self) -> Row:
        """What is saved for backward on a CPU, by part, in MiB."""
        with Saved(self.model, self.images) as saved:
            loss = self.forward()
        parts = dict.fromkeys(PARTS.values(), 0)
        for name, size in saved.by_module.items():
            part = next((title for prefix, title in PARTS.items() if name.startswith(prefix)), "heads")
            parts[part] += size
        del loss
        return {"saved MiB": saved.total / MIB, "parts MiB": {part: size / MIB for part, size in parts.items()}}


class Watched:
    """Calls ``read`` whenever a part of a detector has run forward. A compiled backbone gets no hooks, as it would be
    compiled anew: it is read together with the pyramid, before the RPN."""

    def __init__(self, model: nn.Module, compiled: bool, read: Callable[[], int]) -> None:
        self.model, self.compiled, self.read = model, compiled, read
        self.found: dict[str, int] = {}

    def __enter__(self) -> dict[str, int]:
        rpn = self.model.get_submodule("rpn")
        self.handles = [rpn.register_forward_hook(lambda *_: self.note("proposals"))]
        if self.compiled:
            self.handles.append(rpn.register_forward_pre_hook(lambda *_: self.note("backbone", "pyramid")))
        else:
            for name in ("backbone.body", "backbone"):
                part = self.model.get_submodule(name)
                self.handles.append(part.register_forward_hook(lambda *_, title=PARTS[name]: self.note(title)))
        return self.found

    def note(self, *titles: str) -> None:
        self.found |= dict.fromkeys(titles, self.read())

    def __exit__(self, *_: object) -> None:
        self.note("heads")
        for handle in self.handles:
            handle.remove()


def measured(args: argparse.Namespace) -> Iterator[Row]:
    about = {name: getattr(args, name) for name in ("height", "width", "device", "warmup", "steps", "rounds")}
    settings = [
        Setting(model, batch, mode, method, **about)
        for model in args.models
        for mode in args.modes
        for batch in args.batches
        for method in args.methods
    ]
    if args.jobs > 1:
        yield from children.run(rows_of, settings, args.jobs, args.limit, turns=args.rounds > 1)
        return
    for setting in settings:
        yield setting.names | alone(setting)


def alone(setting: Setting) -> Row:
    """Measure in this process. An error becomes a row too, so that the other cases are still measured."""
    try:
        _, *rounds = rows_of(setting)
        return children.middle(rounds)
    except (RuntimeError, torch.OutOfMemoryError) as error:
        return {"error": str(error).splitlines()[0]}
    finally:
        release()


def rows_of(setting: Setting) -> Iterator[Row]:
    """Work for a child process: yield an empty row when the case is ready, then a row per round."""
    case = Case(setting)
    if setting.device == "cpu":
        yield {}
        row = case.saved()
    else:
        case.time(setting.warmup)
        release()
        yield {}
        case.time(2)
        row = case.peak() | case.busy()
    for _ in range(setting.rounds):
        yield {"step ms": case.time(setting.steps), **row}


def add_ratios(rows: list[Row]) -> None:
    """Add memory and speed relative to full backprop of the same model, batch and mode."""
    full = {(r["model"], r["batch"], r["mode"]): r for r in rows if r["method"] == "full" and "error" not in r}
    for row in rows:
        base = full.get((row["model"], row["batch"], row["mode"]))
        if base is not None and "error" not in row:
            key = "peak MiB" if "peak MiB" in row else "saved MiB"
            row["memory"], row["speed"] = row[key] / base[key], base["step ms"] / row["step ms"]


def markdown(rows: Sequence[Row]) -> str:
    titles = list(next(row["parts MiB"] for row in rows if "error" not in row))
    busy = ["GPU busy"] if any("busy ms" in row for row in rows) else []
    head = ["model, batch, mode", "method", "MiB", "step", *busy, *titles]
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for row in rows:
        which = f"| {row['model']}, {row['batch']}, {row['mode']} | {row['method']} | "
        if "error" in row:
            lines.append(f"{which}{row['error']} |")
            continue
        cells = [f"{row.get('peak MiB', row.get('saved MiB')):.0f}", f"{row['step ms']:.0f} ms"]
        if "speed" in row:  # full backprop was measured as well
            cells = [f"{cells[0]}, {row['memory']:.2f}×", f"{cells[1]}, {row['speed']:.2f}× speed"]
        cells += [f"{row['busy ms']:.0f} ms in {row['kernels']}" if "busy ms" in row else "–"] if busy else []
        cells += [f"{row['parts MiB'][title]:.0f}" for title in titles]
        lines.append(f"{which}{' | '.join(cells)} |")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> None:
    result = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    result.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS), metavar="MODEL")
    result.add_argument("--methods", nargs="+", default=list(METHODS), choices=list(METHODS), metavar="METHOD")
    result.add_argument("--batches", nargs="+", type=int, default=[2, 8])
    result.add_argument("--modes", nargs="+", default=["eager"], choices=["eager", "compiled"], help="of the backbone")
    result.add_argument("--height", type=int, default=800)
    result.add_argument("--width", type=int, default=1333)
    result.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=["cuda", "cpu"])
    result.add_argument("--warmup", type=int, default=2)
    result.add_argument("--steps", type=int, default=10)
    result.add_argument("--rounds", type=int, default=1, help="cases of a group take turns so often; medians are told")
    result.add_argument("--jobs", type=int, default=1, help="cases prepared at the same time; one at a time is timed")
    result.add_argument("--limit", type=float, default=240, help="seconds for a case to prepare, and to be measured")
    result.add_argument("--out", type=Path, help="JSON file for the rows, written as they come")
    result.add_argument("--commit", default="", help="commit to record, instead of what git says")
    result.add_argument("--show", type=Path, help="print the table of a file instead of measuring")
    args = result.parse_args(argv)
    args.bf16 = True
    if args.show:
        print(markdown(commandline.read(args.show)))
        return
    rows: list[Row] = []
    with suppress(BrokenPipeError):
        for row in measured(args):
            rows = children.replaced(rows, row, ("model", "batch", "mode", "method"))
            add_ratios(rows)
            print(json.dumps(row), flush=True)
            commandline.write(args, rows)
        print(markdown(rows), flush=True)


if __name__ == "__main__":
    main()
