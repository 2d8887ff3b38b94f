"""Errors that torch raises at a machine's limits, translated: messages with the numbers, and which option to change."""

import re
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import torch

from ..errors import RunError
from ..memory.sizes import MIB
from .config import Config
from .distributed import Processes

KILLED = re.compile(r"DataLoader worker \(pid\(?s?\)? ?[\d, ]+\) (?:is killed by signal: (.+?)\.|exited unexpectedly)")
CUT_OFF = (ConnectionError, EOFError)
"""what a process gets if a worker ends while it hands over a batch"""
CPU_FULL = re.compile(r"DefaultCPUAllocator.*?tried to allocate (\d+) bytes", re.S)


@contextmanager
def told(config: Config, processes: Processes) -> Iterator[None]:
    """Inside, errors about memory and worker processes become ``RunError``; all others pass unchanged."""
    try:
        yield
    except (RuntimeError, MemoryError, *CUT_OFF) as error:
        try:
            known = in_our_words(error, config, processes)
        except RuntimeError as later:  # torch may report an ended worker at any moment, even at this one
            error, known = later, in_our_words(later, config, processes)
        if known is None:
            raise
        raise known from error


def in_our_words(error: Exception, config: Config, processes: Processes) -> RunError | None:
    """The error to raise instead; None if this one is not about the machine's limits."""
    text = str(error)
    if isinstance(error, torch.OutOfMemoryError | MemoryError) or CPU_FULL.search(text):
        return RunError(out_of_memory(text, config, processes))
    if end := end_of_worker(error):
        with suppress(AttributeError, ValueError):  # there is no such signal, or this is not the main thread
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch's handler could raise again for the same worker
        return RunError(
            f"a process that reads data was {end}; often memory was short: fewer task.data.workers read less at "
            "once. Continue with --resume auto"
        )
    return None


def end_of_worker(error: Exception) -> str:
    """How a worker process ended; "" if the error is about something else."""
    if killed := KILLED.search(str(error)):
        return f"killed ({killed[1]})" if killed[1] else "lost"
    raised_there = "in DataLoader worker process" in str(error)
    return "lost" if isinstance(error, CUT_OFF) and not raised_there else ""


def out_of_memory(text: str, config: Config, processes: Processes) -> str:
    """The message: how much was asked for, how much there is, and how to need less."""
    micro = config.per_forward(processes.world)
    asked = re.search(r"allocate ([\d.]+ [KMGT]iB)", text)
    on_cpu = CPU_FULL.search(text)
    wanted = f" ({asked[1]} more were needed)" if asked else ""
    wanted = f" ({int(on_cpu[1]) / MIB:.0f} MiB more were needed)" if on_cpu else wanted
    there = ""
    if processes.device.type == "cuda":
        there = f" of {torch.cuda.get_device_properties(processes.device).total_memory / MIB:.0f} MiB"
    ways = ["torchsbp plan says what fits"]
    if micro > 1:
        ways.insert(0, f"--micro_batch {smaller(micro)} leaves the batch of {config.batch} as it is")
    if config.sbp.preset == "none":
        ways.append("--sbp.preset exact saves activations")
    elif config.sbp.recompute not in (None, True, 1):
        ways.append("--sbp.recompute true saves activations")
    return f"out of memory{there} with {micro} samples per forward{wanted}: {'; '.join(ways)}"


def smaller(micro: int) -> int:
    """The largest divisor that is at most half: the batch stays the same, in more forwards."""
    return max(n for n in range(1, micro // 2 + 1) if micro % n == 0)
