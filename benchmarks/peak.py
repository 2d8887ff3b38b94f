"""What is alive at the peak of memory, from the events that PyTorch's CUDA allocator records."""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch

MIB = 2**20
Event = dict[str, Any]
SIGNS = {"alloc": 1, "free_requested": -1}


def live_at_peak(trace: Sequence[Event]) -> tuple[int, list[Event]]:
    """The peak, in bytes above the start of the trace, and the allocations of the trace that are alive then."""
    total = most = end = 0
    for i, event in enumerate(trace):
        total += SIGNS.get(event["action"], 0) * event["size"]
        if total > most:
            most, end = total, i + 1
    live: dict[int, Event] = {}
    for event in trace[:end]:
        if event["action"] == "alloc":
            live[event["addr"]] = event
        elif event["action"] == "free_requested":
            live.pop(event["addr"], None)  # None: it was allocated before the trace
    return most, list(live.values())


def describe(before: int, most: int, live: Sequence[Event], count: int = 25, depth: int = 4) -> str:
    """Text with a line for each of the largest allocations (equal ones together), and its innermost Python frames."""
    in_trace = sum(event["size"] for event in live)
    lines = [
        f"{(before + most) / MIB:.1f} MiB at the peak: {in_trace / MIB:.1f} MiB in {len(live)} allocations of this "
        f"step, {(before + most - in_trace) / MIB:.1f} MiB from before (parameters, optimizer, inputs)"
    ]
    equal = Counter((event["size"], places(event, depth)) for event in live)
    for (size, frames), n in sorted(equal.items(), key=lambda item: -item[0][0] * item[1])[:count]:
        lines.append(f"{n * size / MIB:9.1f} MiB = {n} × {size / MIB:.1f} MiB")
        lines += [f"{'':16}{frame}" for frame in frames or ("no Python frame: autograd's own kernels",)]
    return "\n".join(lines)


def places(event: Event, depth: int) -> tuple[str, ...]:
    """The innermost frames as "file:line function", without those of PyTorch itself where others exist."""
    frames = event.get("frames", ())
    ours = [frame for frame in frames if "/torch/" not in frame["filename"]] or frames
    return tuple(f"{short(frame['filename'])}:{frame['line']} {frame['name']}" for frame in ours[:depth])


def short(path: str) -> str:
    return "/".join(path.split("/")[-2:])


def report(step: Callable[[], object]) -> str:
    """Run a step with the allocator's history on, and describe what was alive at its peak."""
    before = torch.cuda.memory_allocated()
    torch.cuda.memory._record_memory_history(max_entries=1_000_000, context="all", stacks="python")
    try:
        step()
        trace = torch.cuda.memory._snapshot()["device_traces"][torch.cuda.current_device()]
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)
    return describe(before, *live_at_peak(trace))
