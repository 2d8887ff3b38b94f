"""``torchsbp study contest --data cifar10.npz --out results``: arms against each other, with paired seeds."""

import argparse
import json
import platform
from collections.abc import Callable
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from ..errors import DataError, UsageError
from ..study import contest, pool
from ..study.training import MODELS, Settings

PURPOSE = "small experiments: arms against each other, with paired seeds"
STUDIES = ("contest",)


def run(argv: list[str]) -> None:
    """Train small models from scratch, several at once, with and without SBP; write what they reach, draw a table."""
    defaults = Settings()
    parser = argparse.ArgumentParser("torchsbp study", description=run.__doc__)
    parser.add_argument("name", choices=STUDIES)
    parser.add_argument(
        "--data", type=Path, required=True, help=".npz with x_train [N, H, W, 3], y_train, x_test, y_test"
    )
    parser.add_argument("--out", type=Path, required=True, help="folder of contest.jsonl and contest.md")
    parser.add_argument("--models", type=listed(","), default=["vit", "convnext"], help=f"of {', '.join(MODELS)}")
    parser.add_argument(
        "--arms", type=listed(";"), default=list(contest.ARMS), help=f"of {'; '.join(contest.ARMS)}", metavar="ARM;ARM"
    )
    parser.add_argument("--seeds", type=int, default=2, help="how many")
    parser.add_argument("--epochs", type=int, default=defaults.epochs)
    parser.add_argument("--batch", type=int, default=defaults.batch)
    parser.add_argument("--lr", type=float, default=1.0, help="times each model's own")
    parser.add_argument("--jobs", type=int, default=1, help="runs at once")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="for everything")
    parser.add_argument("--eager", action="store_true", help="do not compile")
    parser.add_argument("--toy", action="store_true", help="models of a few blocks, to see that it runs")
    args = parser.parse_args(argv)
    for what, given, known in (("models", args.models, MODELS), ("arms", args.arms, contest.ARMS)):
        unknown = [name for name in given if name not in known]
        if unknown:
            raise UsageError(f"unknown {what}: {'; '.join(unknown)}; allowed: {'; '.join(known)}")
    if not args.data.is_file():
        raise DataError(f"{args.data} is not a file; --data is an .npz file with x_train, y_train, x_test, y_test")
    settings = Settings(args.epochs, args.batch, args.lr, compile=not args.eager, toy=args.toy)
    args.out.mkdir(parents=True, exist_ok=True)
    results = args.out / "contest.jsonl"
    finished = contest.done(contest.read(results), args.epochs)
    left = [its for its in contest.runs(args.models, args.arms, range(args.seeds)) if its.name not in finished]
    with results.open("a") as file:
        for row in pool.execute(left, settings, args.data, args.jobs, args.seconds):
            line = json.dumps(row | {"settings": asdict(settings), **machine()})
            print(line, file=file, flush=True)
            print(line, flush=True)
    found = contest.table(contest.read(results))
    (args.out / "contest.md").write_text(found + "\n")
    print(found)


def listed(separator: str) -> Callable[[str], list[str]]:
    return lambda text: [name.strip() for name in text.split(separator) if name.strip()]


def machine() -> dict[str, str]:
    """Where it was measured."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.machine()
    try:
        timm = version("timm")
    except PackageNotFoundError:
        timm = ""
    return {"device": device, "torch": torch.__version__, "timm": timm}
