"""``torchsbp plan MODEL --memory 16GiB``: find the configuration, or the batch, that fits a memory budget."""

import argparse
import json
from typing import Any

from ..errors import UsageError
from ..memory.estimate import build, describe
from ..memory.plan import HEADROOM, has_rules, plan, usable_of
from ..memory.sizes import mib, parse_size
from .arguments import heading, parser, sbp_config, sbp_options, spellings
from .named import Named, find_model

PURPOSE = "the configuration, or the batch, that fits a memory budget"


def run(argv: list[str]) -> None:
    """Find the configuration that fits the memory of a GPU. Preferred is what is recommended for the model's family,
    then the least loss of gradient quality, then the best speed."""
    arguments = parser("plan", run.__doc__ or "")
    arguments.add_argument(
        "--memory", help="of the GPU: 16GiB, 16G, 16GB, 8000MiB; that of the one here if there is one"
    )
    arguments.add_argument(
        "--headroom", type=float, default=HEADROOM, help="share of it that is not to be planned with"
    )
    arguments.add_argument(
        *spellings("largest_batch"),
        action="store_true",
        help="the largest batch with every usual configuration, or with the given one; measured if a GPU is here",
    )
    args = arguments.parse_args(argv)
    memory = memory_here() if args.memory is None else args.memory
    named = find_model(args.model, args.size, args.channels_last, args.shape)
    configs = [sbp_config(args)] if sbp_options(args) else None
    if args.largest_batch:
        return show_largest(args, named, parse_size(memory), configs)
    found = plan(
        named.build,
        (args.batch, *named.shape),
        memory,
        precision=args.precision,
        optimizer=args.optimizer,
        configs=configs,
        headroom=args.headroom,
    )
    if args.json:
        print(json.dumps({"title": heading(args, named), **found.to_dict()}))
    else:
        print(f"{heading(args, named)}: predicted for a CUDA device\n{found}")
        if configs is None and has_rules(build(named.build)) is None:
            print(f"torchsbp can't patch this model: torchsbp models {args.model} says why")


def memory_here() -> int:
    import torch

    if not torch.cuda.is_available():
        raise UsageError("there is no GPU here: say how much memory yours has, such as --memory 16GiB")
    return torch.cuda.get_device_properties(0).total_memory


def show_largest(args: argparse.Namespace, named: Named, memory: int, configs: list[Any] | None) -> None:
    import torch

    from ..memory.largest import largest, on_gpu, usual

    model, shape, usable = build(named.build), (args.batch, *named.shape), usable_of(memory, args.headroom)
    fits = torch.cuda.is_available() and memory <= memory_here()
    measure = on_gpu(named.build, shape, args.precision, args.optimizer) if fits else None
    found = [
        largest(model, shape, usable, config, args.precision, args.optimizer, measure)
        for config in configs or usual(model)
    ]
    budget = f"{mib(memory)}, of which {mib(usable)} may be allocated"
    title = f"{heading(args, named, batch=False)}: the largest batch in {budget}"
    if args.json:
        lines = [vars(its) | {"config": describe(its.config)} for its in found]
        print(json.dumps({"title": title, "memory": memory, "usable": usable, "largest": lines}))
    else:
        print("\n".join([title, *(f"  {its}" for its in found)]))
