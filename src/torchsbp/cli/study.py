"""``torchsbp study NAME``: small experiments, resumable, several runs at once; each draws its figure."""

import argparse
import json
import platform
import subprocess
from collections.abc import Callable
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from .. import __version__
from ..errors import DataError, UsageError
from ..report.sheet import sheet
from ..study import STUDIES, contest, pool, results
from ..study.arms import ARMS
from ..study.data import Data, read
from ..study.models import MODELS, SIZES
from ..study.optimizer import OPTIMIZERS
from ..study.plan import Plan
from ..study.training import Place, Row, Run, Settings, trained
from .arguments import natural, positive

PURPOSE = "small experiments: ways to take gradients, against each other"


def run(argv: list[str]) -> None:
    """Train small models from scratch, with and without SBP. Studies for the papers' figures: gradients (at fixed
    weights), trajectory (along training), similarity (of neighbours), accuracy (over grids), masks. Our own: contest
    (accuracy at equal epochs and at equal time), and speed, which contest needs."""
    args = arguments(argv)
    asked = (("models", (*args.models, *filter(None, args.epochs)), MODELS), ("arms", args.arms, ARMS))
    for what, given, known in asked:
        unknown = [name for name in given if name not in known]
        if unknown:
            raise UsageError(f"unknown {what}: {'; '.join(unknown)}; allowed: {'; '.join(known)}")
    study = STUDIES[args.name]
    if study.needs_data and args.data is None:
        raise UsageError(f"{args.name} needs --data: an .npz file with x_train, y_train, x_test, y_test")
    if study.needs_data and not args.data.is_file():
        raise DataError(f"{args.data} is not a file; --data is an .npz file with x_train, y_train, x_test, y_test")
    if study.needs_data and len(read(args.data, args.images)[0]) < args.batch:
        raise UsageError(f"{args.data} has fewer images than --batch {args.batch}; use a smaller one")
    best = contest.tuned(results.read(args.out)) if args.tuned else {}
    plan = Plan(args.models, args.arms, args.seeds, args.epochs, args.lr, args.drop_path, best)
    settings = Settings(
        args.batch, args.optimizer, compile=not args.eager, capture=not args.uncaptured, size=args.size,
        masks=args.masks, images=args.images,
    )  # fmt: skip
    place = Place(args.data, args.out)
    runs = study.jobs(plan)
    if not runs:
        raise UsageError(f"nothing to run: no arm of {args.name} for these --models, or no --lr")
    left = not_done(args.name, runs, settings, args.out)
    print(f"{len(left)} runs, {max(1, args.jobs)} at a time; {len(runs) - len(left)} were done before", flush=True)
    args.out.mkdir(parents=True, exist_ok=True)
    if study.at_trained_weights and left:
        for model in dict.fromkeys(its.model for its in left):
            trained(model, settings, Data.load(args.data, settings.images), args.out, plan.lengths(model)[-1])
    about = {"study": args.name, "settings": asdict(settings), **machine(args.commit)}
    with (args.out / f"{args.name}.jsonl").open("a", encoding="utf-8") as file:
        for row in pool.execute(study.work, left, settings, place, args.jobs, args.seconds):
            print(json.dumps(about | row), file=file, flush=True)
            print(told(row), flush=True)
    print(written(args.name, args.out))


def not_done(name: str, runs: list[Run], settings: Settings, out: Path) -> list[Run]:
    """The runs that are still to be done. Raise ``UsageError`` if the folder has results with other settings."""
    before = [row for row in results.read(out) if row["study"] == name]
    now = json.loads(json.dumps(asdict(settings)))
    other = next((row["settings"] for row in before if row["settings"] != now), None)
    if other is not None:
        differ = ", ".join(f"{key} {other.get(key)!r}" for key in now if other.get(key) != now[key])
        raise UsageError(f"{out} has results of {name} with {differ}; use the same, or another --out")
    done = [row for row in before if "done" in row]
    return [its for its in runs if not any(covers(row, its) for row in done)]


def covers(row: Row, run: Run) -> bool:
    """Whether a finished run gave what this one would: it was the same run, or it had further lengths besides."""
    same = all(row[key] == getattr(run, key) for key in ("model", "arm", "seed", "lr", "drop_path"))
    return same and {*run.lengths} <= {*row["shorter"], row["epochs"]}


def told(row: Row) -> str:
    """A line about a row of results: its run, and numbers or the error."""
    numbers = [f"{key} {row[key]:.4g}" for key in ("epoch", "accuracy", "agreement", "loss", "ms") if key in row]
    return f"{row['run']}: {row.get('error') or ', '.join(numbers) or ('done' if 'done' in row else 'found')}"


def written(name: str, out: Path) -> str:
    """Write the tables and figures of a study into the folder. Return the tables."""
    rows = results.read(out)
    text = tables(name, rows)
    (out / f"{name}.md").write_text(text, encoding="utf-8")
    for file, figure in figures(name, rows).items():
        (out / file).write_text(figure, encoding="utf-8")
    return text


def tables(name: str, rows: list[Row]) -> str:
    """The tables of a study: what the papers found and what we find, its own tables, and what failed."""
    study = STUDIES[name]
    done = {row["run"] for row in rows if row["study"] == name and "done" in row}
    failed = {row["run"]: row["error"] for row in rows if row["study"] == name and "error" in row}
    findings = study.findings(rows)
    parts = [results.findings_table(findings)] if findings else []
    parts += [study.table(rows), *(f"{run}: {error}" for run, error in failed.items() if run not in done)]
    return "\n\n".join(parts) + "\n"


def figures(name: str, rows: list[Row]) -> dict[str, str]:
    """File name -> SVG."""
    sheets = STUDIES[name].drawings(rows).items()
    return {f"{name}{f'_{part}' if part else ''}.svg": sheet(drawings) for part, drawings in sheets if drawings}


def arguments(argv: list[str]) -> argparse.Namespace:
    defaults = Settings()
    parser = argparse.ArgumentParser("torchsbp study", description=run.__doc__)
    parser.add_argument("name", choices=STUDIES)
    parser.add_argument("--data", type=Path, help=".npz: x_train [N, H, W, 3], y_train, x_test, y_test")
    parser.add_argument(
        "--out", type=Path, required=True, help="folder for NAME.jsonl, NAME.md and figures; started again, it goes on"
    )
    parser.add_argument("--models", type=listed(",", str), default=("vit", "convnext"), help=f"of {', '.join(MODELS)}")
    parser.add_argument("--arms", type=listed(";", str), default=(), help=f"of {'; '.join(ARMS)}", metavar="ARM;ARM")
    parser.add_argument(
        "--epochs", type=by_model, default={}, metavar="N,N | MODEL N,N;MODEL N,N",
        help="a contest trains for each of them (40)",
    )  # fmt: skip
    parser.add_argument("--optimizer", choices=OPTIMIZERS, default=defaults.optimizer, help="muon: of matrices")
    parser.add_argument(
        "--lr", type=listed(",", float), default=(1.0,), help="times each model's own; a contest tries all"
    )
    parser.add_argument(
        "--drop-path", type=listed(",", float), default=(), help="stochastic depth (0); a contest tries all"
    )
    parser.add_argument(
        "--tuned", action="store_true", help="begin from what suits each arm best so far: --lr multiplies that"
    )
    parser.add_argument("--seeds", type=positive, default=1, help="how many")
    parser.add_argument("--batch", type=positive, default=defaults.batch)
    parser.add_argument("--images", type=natural, default=0, help="the first so many; 0: all")
    parser.add_argument("--masks", type=positive, default=defaults.masks, help="to compare gradients by")
    parser.add_argument(
        "--size", choices=SIZES, default=defaults.size, help="of the models: small for a CPU, toy for a test"
    )
    parser.add_argument("--eager", action="store_true", help="do not compile")
    parser.add_argument("--uncaptured", action="store_true", help="steps are not CUDA graphs")
    parser.add_argument("--jobs", type=natural, default=1, help="runs at once; 0: one after the other, in this process")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="for everything: then it ends")
    parser.add_argument("--commit", help="to be recorded, instead of what git says")
    return parser.parse_args(argv)


def listed(separator: str, kind: Callable[[str], Any]) -> Callable[[str], tuple[Any, ...]]:
    return lambda text: tuple(kind(name.strip()) for name in text.split(separator) if name.strip())


def by_model(text: str) -> dict[str, tuple[int, ...]]:
    """ "10,20" -> {"": (10, 20)}; "vit 20;convnext 10" -> {"vit": (20,), "convnext": (10,)}"""
    parts = [part.split() for part in text.split(";") if part.strip()]
    return {" ".join(words[:-1]): listed(",", positive)(words[-1]) for words in parts}


def machine(commit: str | None) -> dict[str, str]:
    """What is recorded with results: the device, the versions, the commit."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.machine()
    try:
        timm = version("timm")
    except PackageNotFoundError:
        timm = ""
    versions = {"torch": torch.__version__, "timm": timm, "torchsbp": __version__}
    return {"device": device, **versions, "commit": checkout() if commit is None else commit}


def checkout() -> str:
    """The commit of this checkout, with "-dirty" if ``src`` was changed since; "" if the package is installed or git is
    missing. Other changes don't count: results may be written into the same tree."""
    folder = Path(__file__).parents[3]
    if not (folder / ".git").exists():
        return ""
    try:
        commit, changes = (
            subprocess.run(["git", "-C", folder, *asked], capture_output=True, text=True, timeout=10).stdout.strip()
            for asked in (["rev-parse", "--short", "HEAD"], ["status", "--porcelain", "src"])
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return f"{commit}-dirty" if changes else commit
