"""One case: a model prepared for training by a method, whose steps are timed and whose memory is read."""

import gc
import statistics
import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

import peak
from methods import METHODS
from models import MODELS
from torchsbp.memory.peak import peak_bytes

MIB = 2**20
MODES = {"eager": None, "compiled": "default", "graphs": "reduce-overhead"}  # modes of torch.compile
Row = dict[str, Any]


@dataclass(frozen=True)
class Setting:
    """What to measure and how, by names in the registries, from which a child process builds the case."""

    model: str
    method: str
    mode: str = "eager"
    batch: int | None = None
    size: int | None = None
    build: dict[str, Any] = field(default_factory=dict)
    device: str = "cpu"
    bf16: bool = True
    warmup: int = 5
    steps: int = 30
    rounds: int = 1
    profile: bool = False
    snapshot: bool = False

    @property
    def names(self) -> Row:
        return {"model": self.model, "mode": self.mode, "method": self.method}


class Stopwatch:
    """Marks in time. On CUDA they are device events, read when all work is done, so that nothing waits in between."""

    def __init__(self, device: str) -> None:
        self.cuda = device == "cuda"
        self.marks: list[Any] = []

    def mark(self) -> None:
        if self.cuda:
            self.marks.append(torch.cuda.Event(enable_timing=True))
            self.marks[-1].record()
        else:
            self.marks.append(time.perf_counter())

    def between(self, first: int, last: int) -> float:
        """Milliseconds from one mark to another."""
        a, b = self.marks[first], self.marks[last]
        return a.elapsed_time(b) if self.cuda else 1000 * (b - a)


class Case:
    """One model prepared by one method, ready to be stepped."""

    def __init__(self, setting: Setting) -> None:
        torch.manual_seed(0)
        self.setting, self.spec, self.method = setting, MODELS[setting.model], METHODS[setting.method]
        self.size = setting.size or self.spec.size
        with torch.device(setting.device):
            self.model = self.spec.build(self.size, **self.method.build, **setting.build)
        self.method.prepare(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=self.cuda)
        mode = MODES[setting.mode]
        self.call = self.model if mode is None else torch.compile(self.model, mode=mode)
        self.feed(setting.batch or self.spec.batch)

    @property
    def cuda(self) -> bool:
        return self.setting.device == "cuda"

    def feed(self, batch: int) -> None:
        """Make random images and labels, after the previous ones are freed."""
        self.batch, self.images = batch, torch.empty(0)
        with torch.device(self.setting.device):
            shape = self.spec.shape(self.size, **self.setting.build)
            images, self.labels = torch.randn(batch, *shape), torch.randint(1000, (batch,))
        self.images = images.to(memory_format=torch.channels_last) if self.spec.channels_last else images

    def forward(self) -> torch.Tensor:
        autocast = torch.autocast(self.setting.device, torch.bfloat16) if self.setting.bf16 else nullcontext()
        with self.method.around(), autocast:
            return F.cross_entropy(self.call(self.images).float(), self.labels)

    def step(self, watch: Stopwatch) -> None:
        """One training step, with four marks."""
        watch.mark()
        self.optimizer.zero_grad(set_to_none=True)
        loss = self.forward()
        watch.mark()
        loss.backward()
        watch.mark()
        self.optimizer.step()
        watch.mark()

    def steps(self, count: int) -> Stopwatch:
        watch = Stopwatch(self.setting.device)
        for _ in range(count):
            self.step(watch)
        if self.cuda:
            torch.cuda.synchronize()
        return watch


def release() -> None:
    """Give unused memory back to the device."""
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


class Flops(TorchDispatchMode):
    """Counts as PyTorch's FlopCounterMode does, but without hooks on modules: these forbid ``autograd.grad`` inside a
    backward pass, which is how blocks are run again."""

    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func._overloadpacket in flop_registry:
            self.total += flop_registry[func._overloadpacket](*args, **(kwargs or {}), out_val=result)
        return result


def count_flops(setting: Setting, batch: int) -> int:
    """Multiply-adds (times two) of forward and backward, with recomputation; counted on two images and scaled."""
    case = Case(replace(setting, mode="eager", batch=2))
    with Flops() as counter:
        case.forward().backward()
    return counter.total * batch // 2


def measure(case: Case) -> Row:
    """Time of a step and its parts (medians), and on CUDA its memory.

    A CUDA graph holds its memory from the first step on, and the allocator does not count it as allocated. So with
    graphs the peak is what is reserved.
    """
    case.steps(case.setting.warmup)
    release()
    row: Row = {}
    if case.cuda:
        case.optimizer.zero_grad(set_to_none=True)
        static = torch.cuda.memory_allocated()
        loss = case.forward()
        row["activations MiB"] = (torch.cuda.memory_allocated() - static) / MIB
        loss.backward()
        del loss
        torch.cuda.reset_peak_memory_stats()
    watch = case.steps(case.setting.steps)
    if case.cuda:
        row["reserved MiB"] = torch.cuda.max_memory_reserved() / MIB
        graphs = case.setting.mode == "graphs"
        row["peak MiB"] = row["reserved MiB"] if graphs else peak_bytes() / MIB
    starts = range(0, len(watch.marks), 4)
    for i, name in enumerate(("forward", "backward", "update")):
        row[f"{name} ms"] = statistics.median(watch.between(start + i, start + i + 1) for start in starts)
    row["step ms"] = statistics.median(watch.between(start, start + 4) for start in starts[:-1])
    row["images/s"] = 1000 * case.batch / row["step ms"]
    return row


def measured(setting: Setting) -> Iterator[Row]:
    """Work for a child process: yield an empty row when the case is compiled and warm, then a row per round.

    "build s" is how long compiling took beside the other cases of the group: compare it only with theirs.
    """
    row = setting.names
    if METHODS[setting.method].eager:
        row["flops"] = count_flops(setting, setting.batch or MODELS[setting.model].batch)
    release()
    case = Case(setting)
    row |= {"batch": case.batch, "size": case.size}
    begun = time.perf_counter()
    case.steps(2)
    if setting.mode != "eager":
        row["build s"] = time.perf_counter() - begun
    release()
    yield {}
    for number in range(setting.rounds):
        found = row | measure(case)
        if setting.profile and not number:
            found["profile"] = profile(case)
        if setting.snapshot and case.cuda and not number:
            found["snapshot"] = peak.report(lambda: case.steps(1))
        yield found


def profile(case: Case) -> str:
    """Describe the kernels (operators on CPU) of one step: their time, their number, and which take most. On CUDA also
    say what the CPU does: the number of launches, and how long it takes to launch each part of a step."""
    kind = case.setting.device.upper()
    activities = {getattr(torch.profiler.ProfilerActivity, name) for name in ("CPU", kind)}
    with torch.profiler.profile(activities=activities) as profiler:
        case.steps(1)
    found = [e for e in profiler.key_averages() if not e.is_user_annotation]
    events = [e for e in found if e.device_type.name == kind]
    times = {e.key: (e.self_device_time_total if case.cuda else e.self_cpu_time_total) / 1000 for e in events}
    total, count = sum(times.values()), sum(e.count for e in events)
    lines = [f"{total:.2f} ms busy in {count} {'kernels' if case.cuda else 'operators'}"]
    if case.cuda:
        parts = ", ".join(f"{name} {ms:.2f} ms" for name, ms in launched(case).items())
        lines.append(f"{sum(e.count for e in found if 'LaunchKernel' in e.key)} launches; of the CPU's time: {parts}")
    for event in sorted(events, key=lambda e: -times[e.key])[:28]:
        time_ = times[event.key]
        lines.append(f"{time_:9.3f} ms {time_ / total:6.1%} {event.count:5d} ×  {event.key[:100]}")
    return "\n".join(lines)


def launched(case: Case) -> dict[str, float]:
    """Milliseconds that the CPU takes to launch each part of a step (medians). Every step begins with an idle GPU."""
    watches = []
    for _ in range(case.setting.steps):
        torch.cuda.synchronize()
        watches.append(Stopwatch("cpu"))
        case.step(watches[-1])
    parts = enumerate(("forward", "backward", "update"))
    return {name: statistics.median(watch.between(i, i + 1) for watch in watches) for i, name in parts}
