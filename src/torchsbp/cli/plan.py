"""``torchsbp plan MODEL --memory 16GiB``: the configuration that fits a memory budget."""

import json

from ..memory.plan import HEADROOM, plan
from ..memory.sizes import parse_size
from .arguments import heading, parser, sbp_config, sbp_options
from .named import find_model

PURPOSE = "the configuration that fits a memory budget"


def run(argv: list[str]) -> None:
    """The configuration that fits the memory of a GPU with the least loss of gradient quality, then the best speed."""
    arguments = parser("plan", run.__doc__ or "")
    arguments.add_argument("--memory", required=True, help="of the GPU: 16GiB, 16G, 16GB, 8000MiB")
    arguments.add_argument(
        "--headroom", type=float, default=HEADROOM, help="share of it that is not to be planned with"
    )
    args = arguments.parse_args(argv)
    parse_size(args.memory)
    named = find_model(args.model, args.size, args.channels_last, args.shape)
    shape = (args.batch, *named.shape)
    found = plan(
        named.build,
        shape,
        args.memory,
        precision=args.precision,
        optimizer=args.optimizer,
        configs=[sbp_config(args)] if sbp_options(args) else None,
        headroom=args.headroom,
    )
    if args.json:
        print(json.dumps({"title": heading(args, named), **found.to_dict()}))
    else:
        print(f"{heading(args, named)}: predicted for a CUDA device\n{found}")
