"""Window attention alone, on a GPU: our kernels against F.scaled_dot_product_attention with bias and mask.

python benchmarks/windows.py                     # milliseconds of forward and backward, by stage and keep-ratio
python benchmarks/windows.py --tune --jobs 12    # which warps and stages are fastest for every kernel
"""

import argparse
import itertools
import math
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from torchsbp.ops.heads import take_head_rows
from torchsbp.ops.window_attention import Cut
from torchsbp.ops.window_launches import KernelWindowAttention
from torchsbp.sampling.windows import Partition, cut_all, first_in_each


class Shape(NamedTuple):
    """The attention of one stage."""

    batch: int
    heads: int
    width: int
    grid: tuple[int, ...]
    window: tuple[int, ...]
    shift: tuple[int, ...]


SWIN, VIDEO = ((7, 7), (3, 3)), ((8, 7, 7), (4, 3, 3))
SHAPES = {
    "swin 1": Shape(128, 3, 32, (56, 56), *SWIN),
    "swin 2": Shape(128, 6, 32, (28, 28), *SWIN),
    "swin 3": Shape(128, 12, 32, (14, 14), *SWIN),
    "swin 4": Shape(128, 24, 32, (7, 7), (7, 7), (0, 0)),
    "video 1": Shape(8, 3, 32, (16, 56, 56), *VIDEO),
    "video 3": Shape(8, 12, 32, (16, 14, 14), *VIDEO),
    "window 12": Shape(64, 4, 32, (96, 96), (12, 12), (6, 6)),
}
RATIOS = (1.0, 0.5, 0.25)


class Tuned(KernelWindowAttention):
    """Launches all kernels with other options (warps and stages)."""

    def __init__(self, **options: int) -> None:
        self.options = options

    def launch(self, kernel: str, programs: int, **arguments: Any) -> None:
        super().launch(kernel, programs, **arguments | self.options)


class Inputs(NamedTuple):
    q: Tensor
    k: Tensor
    v: Tensor
    bias: Tensor
    cut: Cut
    rows: Tensor | None


def inputs(shape: Shape, ratio: float) -> Inputs:
    torch.manual_seed(0)
    device, n, area = torch.device("cuda"), math.prod(shape.grid), math.prod(shape.window)
    partition = Partition(shape.grid, shape.window, shape.shift, False)
    cut, rows = cut_all(partition, device), None
    if ratio < 1:
        kept, windows = first_in_each(torch.rand(1, n, device=device).argsort(1), partition, ratio)
        cut, rows = windows.cut, (torch.arange(shape.batch, device=device)[:, None] * n + kept).flatten()
    qkv = torch.randn(shape.batch, n, 3, shape.heads, shape.width, device=device, dtype=torch.bfloat16)
    bias = torch.randn(shape.heads, area, area, device=device)
    return Inputs(*qkv.permute(2, 0, 3, 1, 4), bias, cut, rows)


def passes(attention: KernelWindowAttention, x: Inputs) -> dict[str, Callable[[], Any]]:
    """Functions that run forward, and backward from kept queries."""
    scale = x.q.shape[-1] ** -0.5
    o, lse = attention.forward(x.q, x.k, x.v, x.bias, None, x.cut, scale)
    q, o = take_head_rows(x.q, x.rows), take_head_rows(o, x.rows)
    lse = take_head_rows(lse.unsqueeze(-1), x.rows).squeeze(-1)
    do = torch.randn_like(o)
    return {
        "forward": lambda: attention.forward(x.q, x.k, x.v, x.bias, None, x.cut, scale),
        "backward": lambda: attention.backward(do, q, x.k, x.v, o, lse, x.bias, None, x.cut, scale, False, True),
    }


def plain_passes(shape: Shape) -> dict[str, Callable[[], Any]]:
    """What a library runs for whole windows: rows are already cut into windows, and bias and mask are one tensor."""
    windows, area = shape.batch * math.prod(shape.grid) // math.prod(shape.window), math.prod(shape.window)
    size = windows, shape.heads, area, shape.width
    q, k, v = (torch.randn(size, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    bias = torch.randn(1, shape.heads, area, area, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    added = bias.expand(windows, -1, -1, -1).contiguous() if any(shape.shift) else bias
    o = F.scaled_dot_product_attention(q, k, v, attn_mask=added)
    do = torch.randn_like(o)
    return {
        "forward": lambda: F.scaled_dot_product_attention(q, k, v, attn_mask=added),
        "backward": lambda: torch.autograd.grad(o, (q, k, v, bias), do, retain_graph=True),
    }


def milliseconds(run: Callable[[], Any], times: int = 20) -> float:
    for _ in range(3):
        run()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
    marks[0].record()
    for _ in range(times):
        run()
    marks[1].record()
    torch.cuda.synchronize()
    return marks[0].elapsed_time(marks[1]) / times


def compare() -> None:
    for name, shape in SHAPES.items():
        plain = {kind: milliseconds(run) for kind, run in plain_passes(shape).items()}
        print(f"{name:10} plain      " + "  ".join(f"{kind} {ms:7.3f} ms" for kind, ms in plain.items()), flush=True)
        for ratio in RATIOS:
            times = {
                kind: milliseconds(run) for kind, run in passes(KernelWindowAttention(), inputs(shape, ratio)).items()
            }
            print(f"{name:10} r = {ratio:<5}  " + "  ".join(f"{k} {ms:7.3f} ms" for k, ms in times.items()), flush=True)
        torch.cuda.empty_cache()


OPTIONS = [{"num_warps": warps, "num_stages": stages} for warps, stages in itertools.product((2, 4, 8), (1, 2, 3))]


def compiled(case: tuple[str, float, dict[str, int]]) -> None:
    """Fill Triton's cache."""
    name, ratio, options = case
    for run in passes(Tuned(**options), inputs(SHAPES[name]._replace(batch=16), ratio)).values():
        run()


def tune(jobs: int) -> None:
    names = ["swin 1", "swin 3", "video 1", "window 12"]
    with ProcessPoolExecutor(jobs, get_context("spawn")) as pool:
        list(pool.map(compiled, itertools.product(names, RATIOS, OPTIONS)))
    for name, ratio in itertools.product(names, RATIOS):
        x = inputs(SHAPES[name], ratio)
        found = {tuple(options.values()): passes(Tuned(**options), x) for options in OPTIONS}
        for kind in ("forward", "backward"):
            times = sorted((milliseconds(runs[kind]), key) for key, runs in found.items())
            print(f"{name:10} r = {ratio:<5} {kind:9}" + "  ".join(f"{key} {ms:.3f}" for ms, key in times), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tune", action="store_true", help="(warps, stages) and milliseconds, the fastest first")
    parser.add_argument("--jobs", type=int, default=8, help="processes that compile")
    args = parser.parse_args()
    tune(args.jobs) if args.tune else compare()


if __name__ == "__main__":
    main()
