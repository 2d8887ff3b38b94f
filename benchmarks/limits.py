"""The largest batch that fits into a GPU's memory, and how fast it trains.

    python benchmarks/limits.py --models vit_base --limits 16 24 80 --jobs 4 --out benchmarks/results/limits.json
    python benchmarks/limits.py --show benchmarks/results/limits.json

Models run eagerly. The allocator is capped, so one large GPU stands for smaller ones of the same speed.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import torch

import children
import commandline
from case import Case, Row, Setting, measure, release

GIB = 2**30
CONTEXT = GIB // 2  # memory that CUDA itself takes
UNIT, SMALL = 32, (32, 64)  # batches
METHODS = ["full", "checkpoint", "sbp query r=0.25", "sbp query r=0.25, saved"]


def largest(fits: Callable[[int], bool], guess: int, unit: int, trials: int = 30) -> int:
    """The largest multiple of ``unit`` that fits, 0 if none: by doubling strides from the guess, then bisection."""
    low, high, stride = 0, 0, 1  # in units: low fits, high does not; 0: not known
    at = max(1, guess // unit)
    for _ in range(trials):
        low, high = (at, high) if fits(at * unit) else (low, at)
        if high - low == 1:
            break
        middle = (low + high) // 2
        at = low + stride if not high else middle if low else max(high - stride, middle)
        stride *= 2
    return low * unit


def predict(peaks: Sequence[float], limit: float) -> int:
    """The batch at which memory reaches the limit, if it is affine in the batch: ``peaks`` are those of SMALL."""
    each = (peaks[1] - peaks[0]) / (SMALL[1] - SMALL[0])
    return int((limit - peaks[0]) / each) + SMALL[0] if each > 0 else SMALL[1]


def cap(limit: float) -> None:
    total = torch.cuda.get_device_properties().total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, limit / total))


def peak_of(case: Case, batch: int) -> float:
    """Bytes at the peak of two steps."""
    release()
    torch.cuda.reset_peak_memory_stats()
    case.feed(batch)
    case.steps(2)
    return torch.cuda.max_memory_allocated()


def does_fit(case: Case, batch: int) -> bool:
    try:
        peak_of(case, batch)
    except torch.OutOfMemoryError:
        return False
    return True


def timed(case: Case, batch: int) -> Row:
    """The row of that batch, or of a smaller one where memory fits two steps but is too fragmented for more."""
    while batch:
        release()
        case.feed(batch)
        try:
            return {"batch": batch} | measure(case)
        except torch.OutOfMemoryError:
            batch -= UNIT
    return {"batch": 0}


def search(setting: Setting, limits: Sequence[float]) -> Iterator[Row]:
    """Work for a child process: yield an empty row when the model is built, then a row per limit (GiB)."""
    case = Case(setting)
    yield {}
    peaks = [peak_of(case, batch) for batch in SMALL]
    for limit in sorted(limits):
        release()
        cap(limit * GIB - CONTEXT)
        batch = largest(partial(does_fit, case), predict(peaks, limit * GIB - CONTEXT), UNIT)
        yield {"limit GiB": limit} | timed(case, batch)


def markdown(rows: Sequence[Row]) -> str:
    """One line per model and method, one column per limit."""
    limits = sorted({row["limit GiB"] for row in rows if "limit GiB" in row})
    table: dict[tuple[str, str], dict[float, str]] = {}
    for row in rows:
        cells = table.setdefault((row["model"], row["method"]), {})
        if "images/s" in row:
            cells[row["limit GiB"]] = f"{row['batch']}, {row['images/s']:.0f} images/s"
    lines = [" | ".join(["| model | method", *(f"{limit:g} GiB: batch, speed" for limit in limits)]) + " |"]
    lines.append("|---" * (2 + len(limits)) + "|")
    for names, cells in table.items():
        lines.append(f"| {' | '.join([*names, *(cells.get(limit, '–') for limit in limits)])} |")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> None:
    parser = commandline.parser(__doc__, ["vit_base"], METHODS)
    parser.add_argument("--limits", nargs="+", type=float, default=[16, 24, 80], metavar="GIB")
    parser.add_argument("--show", type=Path, help="print the table of a JSON file and stop")
    parser.set_defaults(modes=["eager"], steps=4, warmup=1)
    args = parser.parse_args(argv)

    if args.show:
        print(markdown(commandline.read(args.show)))
        return
    if args.device != "cuda":
        parser.error("memory is capped on a CUDA device; none was found")
    rows: list[Row] = []
    work = partial(search, limits=args.limits)
    for row in children.run(work, commandline.settings(args), args.jobs, args.limit):
        rows.append(row)
        commandline.write(args, rows)
        print(row, flush=True)
    print(markdown(rows))


if __name__ == "__main__":
    main()
