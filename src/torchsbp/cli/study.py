"""``torchsbp study contest``, ``torchsbp study gradients``: arms against each other on small models."""

import argparse
import json
import platform
from collections.abc import Callable, Iterable
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from ..errors import DataError, UsageError
from ..study import contest, gradients, pool
from ..study.training import MODELS, Data, Row, Settings

PURPOSE = "small experiments: ways to take gradients, against each other"


def run(argv: list[str]) -> None:
    """Small models from scratch, with and without SBP. contest: train them, with paired seeds, several at once.
    gradients: bias and variance at the weights that full backpropagation reaches."""
    args = arguments(argv)
    for what, given, known in (("models", args.models, MODELS), ("arms", args.arms, contest.ARMS)):
        unknown = [name for name in given if name not in known]
        if unknown:
            raise UsageError(f"unknown {what}: {'; '.join(unknown)}; allowed: {'; '.join(known)}")
    if not args.data.is_file():
        raise DataError(f"{args.data} is not a file; --data is an .npz file with x_train, y_train, x_test, y_test")
    settings = Settings(args.epochs, args.batch, args.lr, compile=not args.eager, toy=args.toy)
    args.out.mkdir(parents=True, exist_ok=True)
    results, study = args.out / f"{args.name}.jsonl", STUDIES[args.name]
    with results.open("a") as file:
        for row in study(args, settings, contest.read(results)):
            print(json.dumps(row | {"settings": asdict(settings), **machine()}), file=file, flush=True)
            print(json.dumps(row), flush=True)
    table = contest.table if args.name == "contest" else gradients.table
    found = table(contest.read(results))
    (args.out / f"{args.name}.md").write_text(found + "\n")
    print(found)


def arguments(argv: list[str]) -> argparse.Namespace:
    defaults = Settings()
    parser = argparse.ArgumentParser("torchsbp study", description=run.__doc__)
    parser.add_argument("name", choices=STUDIES)
    parser.add_argument("--data", type=Path, required=True, help=".npz: x_train [N, H, W, 3], y_train, x_test, y_test")
    parser.add_argument(
        "--out", type=Path, required=True, help="folder for NAME.jsonl and NAME.md; started again, it goes on"
    )
    parser.add_argument("--models", type=listed(","), default=["vit", "convnext"], help=f"of {', '.join(MODELS)}")
    parser.add_argument(
        "--arms", type=listed(";"), default=list(contest.ARMS), help=f"of {'; '.join(contest.ARMS)}", metavar="ARM;ARM"
    )
    parser.add_argument("--epochs", type=int, default=defaults.epochs)
    parser.add_argument("--batch", type=int, default=defaults.batch)
    parser.add_argument("--lr", type=float, default=1.0, help="times each model's own")
    parser.add_argument("--eager", action="store_true", help="do not compile")
    parser.add_argument("--toy", action="store_true", help="models of a few blocks, to see that it runs")
    parser.add_argument("--seeds", type=int, default=2, help="of a contest: how many")
    parser.add_argument("--jobs", type=int, default=1, help="of a contest: runs at once")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="of a contest: for everything")
    parser.add_argument("--masks", type=int, default=16, help="of gradients: how many to compare")
    return parser.parse_args(argv)


def run_contest(args: argparse.Namespace, settings: Settings, before: list[Row]) -> Iterable[Row]:
    finished = contest.done(before, settings.epochs)
    left = [its for its in contest.runs(args.models, args.arms, range(args.seeds)) if its.name not in finished]
    return pool.execute(left, settings, args.data, args.jobs, args.seconds)


def run_gradients(args: argparse.Namespace, settings: Settings, before: list[Row]) -> Iterable[Row]:
    data = Data.load(args.data, torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    finished = {(row["model"], row["arm"]) for row in before}
    for model in args.models:
        arms = [its.arm for its in contest.runs([model], args.arms, [0]) if (model, its.arm) not in finished]
        yield from gradients.compare(model, arms, settings, data, args.masks)


STUDIES = {"contest": run_contest, "gradients": run_gradients}


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
