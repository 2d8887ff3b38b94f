"""Every model of timm and torchvision: is it patched, and is what is patched right?

    python benchmarks/catalogue.py --jobs 2          # models without a result; then the table in docs/adapters.md
    python benchmarks/catalogue.py --only "vit_*,torchvision/swin*" --again
    python benchmarks/catalogue.py --only "resnet18,test_*" --out some.jsonl

Each model is patched as its library builds it, on the meta device. Then a narrow version with a few blocks makes a
training step on small images in float64, which ``torchsbp.check`` compares with its gated twin. Every model has a
process of its own, with limits of time and memory. Rows are appended to the file as they come.
"""

import argparse
import os
import re
import resource
import time
import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from functools import partial
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import timm
import torch
import torchvision
from torch import nn

import children
import torchsbp
from covered import RESULTS, Row, append, markdown, matches, read, write_page
from torchsbp.adapters import find_backbones
from torchsbp.cli.models import examine
from torchsbp.cli.named import SIZE_OPTIONS, find_model, maker
from torchsbp.cli.study import checkout

FORKED = get_context("forkserver")  # libraries are imported once
VIDEO = torchvision.models.list_models(module=torchvision.models.video)
BLOCKS = 3  # of a stage, at most
DEPTHS = (2, 2, BLOCKS, 2)
SMALLER = (  # names of options as constructors have them; a model gets the first line that it takes
    {"depth": BLOCKS, "embed_dim": 128, "num_heads": 2},
    {"num_blocks": BLOCKS, "embed_dim": 128},
    {"depths": DEPTHS, "dims": (16, 24, 32, 48)},
    {"depths": DEPTHS, "embed_dim": 48},
    {"depths": DEPTHS, "embed_dim": (32, 32, 64, 64)},
    {"depths": DEPTHS},
    {"depth": BLOCKS},
    {},
)


def names() -> list[str]:
    """All models of timm, and torchvision's classification and video models."""
    image = torchvision.models.list_models(module=torchvision.models)
    return [f"timm/{name}" for name in timm.list_models()] + [f"torchvision/{name}" for name in (*image, *VIDEO)]


def limit_memory(gib: float) -> None:
    """Allow the process so much more memory than it has already (Linux)."""
    has = int(re.findall(r"VmData:\s+(\d+) kB", Path("/proc/self/status").read_text())[0]) * 1024
    resource.setrlimit(resource.RLIMIT_DATA, (has + int(gib * 2**30), resource.RLIM_INFINITY))


def trial(name: str, gib: float) -> Iterator[Row]:
    """Yield whether the model can be patched, then the outcome of a step of its small version."""
    limit_memory(gib)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    model = find_model(name).build()
    about = examine(model)
    try:
        torchsbp.apply(model)
    except ValueError as error:
        yield {"result": "refused", "why": reason(about, str(error))}
        return
    yield {"result": "not run"}
    torch.Tensor.float = torch.Tensor.double  # a library that casts to float32 by itself gets float64
    library, _, short = name.partition("/")
    options, shape = small(library, short, model)
    if not shape:
        yield {"why": "takes no small image"}
        return
    torch.manual_seed(0)
    model = shortened(maker(library)(short, **options)).double().train()
    with torch.no_grad():
        for p in model.parameters():  # initial values of zero or 1e-6 would hide errors
            p.add_(torch.randn_like(p) * 0.1)
    found = torchsbp.check(torchsbp.apply(model, keep_ratio=0.5), torch.randn(shape))
    wrong = {} if found.passed else {"why": f"{found.worst} differs"}
    rounded = {"forward": float(f"{found.forward:.0e}"), "gradient": float(f"{found.gradient:.0e}")}
    yield {"result": "passed" if found.passed else "failed", **wrong, **rounded}


def reason(about: dict[str, Any], message: str) -> str:
    """Why a model is refused, in few words. Asserts that the message to the user names the model's classes."""
    if not about["backbones"]:
        unnamed = [name for name in (about["model"], *about["block classes"]) if name not in message]
        assert not unnamed, f"the refusal does not name {unnamed}"
        return f"no adapter for {about['model']}"
    blocks = [block for backbone in about["backbones"] for block in backbone["blocks"]]
    problems = [f"{block['class']}: {problem}" for block in blocks for problem in block["problems"]]
    brief = dict.fromkeys(problem.partition(";")[0].partition(", which")[0] for problem in problems)
    return "; ".join(brief) or message.partition("\n")[0]


def small(library: str, name: str, model: nn.Module) -> tuple[dict[str, Any], tuple[int, ...]]:
    """Options that make a model small, and the shape of its images: the first that work on meta, else {} and ()."""
    channels, *_, side = find_model(f"{library}/{name}").shape
    stride = max((info["reduction"] for info in getattr(model, "feature_info", ())), default=32)
    sizes = [(4 * stride, 6 * stride), (4 * stride, 4 * stride), (7 * stride, 7 * stride), (side, side)]
    frames = (8,) if name in VIDEO else ()
    for size, smaller, told in product(sizes, SMALLER, (True, False)):
        options = smaller | ({SIZE_OPTIONS[library]: size if library == "timm" else size[0]} if told else {})
        shape = (2, channels, *frames, *size)
        try:
            with torch.device("meta"), torch.no_grad():
                maker(library)(name, **options).double().train()(torch.empty(shape, dtype=torch.float64))
            return options, shape
        except Exception:  # libraries raise all kinds of errors for an option or a size that they do not take
            continue
    return {}, ()


def shortened(model: nn.Module) -> nn.Module:
    """Remove all but the first BLOCKS sampled blocks of every stage. Others stay, as they may change the width."""
    for _, module, adapter, layout in find_backbones(model):
        for stage in layout.stages_of(module):
            sampled = [block for block in stage.blocks if adapter.sampled(module.get_submodule(block))]
            for block in sampled[BLOCKS:]:
                path, _, key = block.rpartition(".")
                chain = module.get_submodule(path)
                if isinstance(chain, (nn.Sequential, nn.ModuleList)):
                    del chain._modules[key]
    return model


def alone(name: str, seconds: float, gib: float) -> Row:
    """The row of a model, made in a process of its own."""
    child = children.Child(partial(trial, gib=gib), name, seconds, FORKED)
    row = {"name": name, "result": "error"} | (child.listen() or {})
    for more in () if "error" in row else child.measure():
        row |= more
    error = row.pop("error", "")
    if error == children.OUT_OF_MEMORY:
        error = f"needs more than {gib:g} GiB"
    elif error and row["result"] == "not run" and not error.startswith("not done"):
        row["result"] = "failed"
    return row | ({"why": error} if error else {})


def environment() -> Row:
    versions = {module.__name__: module.__version__ for module in (torch, timm, torchvision)}
    return {"date": time.strftime("%Y-%m-%d"), **versions, "commit": checkout(), "names": len(names())}


def run(todo: Sequence[str], args: argparse.Namespace) -> None:
    """Append the rows of these models to the file as they come."""
    os.environ["OMP_NUM_THREADS"] = "1"
    FORKED.set_forkserver_preload(["timm", "torchvision", "children", "torchsbp.cli.models"])
    now = environment()
    if read(args.out)[0][-1:] != [now]:
        append(args.out, now)
    pool = ThreadPoolExecutor(args.jobs)
    rows = [pool.submit(alone, name, args.seconds, args.gib) for name in todo]
    try:
        for i, done in enumerate(as_completed(rows), 1):
            row = done.result()
            append(args.out, row)
            print(f"{i}/{len(todo)}  {row['name']:<48} {row['result']:<8} {row.get('why', '')[:100]}", flush=True)
    finally:
        pool.shutdown(cancel_futures=True)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="*", help="patterns of names, with commas between")
    parser.add_argument("--again", action="store_true", help="also what has a result")
    parser.add_argument("--jobs", type=int, default=1, help="models at the same time, one thread each")
    parser.add_argument("--seconds", type=float, default=120, help="limit for each half of a model's trial")
    parser.add_argument("--gib", type=float, default=8, help="limit of memory")
    parser.add_argument("--out", type=Path, default=RESULTS, help="file of rows")
    args = parser.parse_args(argv)
    chosen = [name for name in names() if matches(name, args.only)]
    if not chosen:
        parser.error(f"no name of timm or torchvision matches {args.only!r}")
    done = () if args.again else read(args.out)[1]
    todo = [name for name in chosen if name not in done]
    if todo:
        run(todo, args)
    if args.out == RESULTS:
        write_page()
    else:
        print(markdown(*read(args.out)))


if __name__ == "__main__":
    main()
