"""What the commands share: options, the environment that they record, the file that they write."""

import argparse
import json
import platform
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

import timm
import torch

from case import MODES, Row, Setting
from methods import METHODS
from models import MEASURED, MODELS
from torchsbp.cli.study import checkout


def parser(doc: str | None, models: list[str] = MEASURED, methods: list[str] | None = None) -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    result.add_argument("--models", nargs="+", default=models, choices=list(MODELS), metavar="MODEL")
    result.add_argument("--methods", nargs="+", default=methods, choices=list(METHODS), metavar="METHOD")
    result.add_argument("--cases", nargs="+", metavar="MODEL:METHOD", help="these alone, instead of all pairs")
    result.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=["cuda", "cpu"])
    result.add_argument("--float32", dest="bf16", action="store_false", help="no autocast")
    result.add_argument("--steps", type=int, default=30)
    result.add_argument("--warmup", type=int, default=5)
    result.add_argument("--jobs", type=int, default=1, help="cases prepared at the same time; one at a time is timed")
    result.add_argument("--limit", type=float, default=300, help="seconds for a case to prepare, and to be measured")
    result.add_argument("--out", type=Path, help="JSON file for the rows")
    result.add_argument("--commit", default="", help="commit to record, instead of what git says")
    return result


def settings(args: argparse.Namespace) -> list[Setting]:
    """Every chosen method, in every mode and model that it suits, in the registries' order; or the chosen cases."""
    if args.cases:
        return cases(args)
    given = {f.name: getattr(args, f.name) for f in fields(Setting) if hasattr(args, f.name)}
    return [
        Setting(model, title, mode, **given)
        for model, spec in MODELS.items()
        for mode in MODES
        for title, method in METHODS.items()
        if model in args.models
        and mode in (args.modes or spec.modes)
        and title in (args.methods or spec.methods or METHODS)
        and method.suits(model, mode)
    ]


def cases(args: argparse.Namespace) -> list[Setting]:
    """The cases that are given by name, MODEL:METHOD."""
    found: list[Setting] = []
    for case in args.cases:
        model, _, method = case.partition(":")
        alone = settings(argparse.Namespace(**vars(args) | {"cases": None, "models": [model], "methods": [method]}))
        if not alone:
            raise SystemExit(f"--cases: {case!r} is no model and method, MODEL:METHOD, that suit each other")
        found += alone
    return found


def environment(args: argparse.Namespace) -> dict[str, str]:
    device = torch.cuda.get_device_name() if args.device == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    versions = {"torch": torch.__version__, "timm": timm.__version__, "python": platform.python_version()}
    return {
        "device": device,
        **versions,
        "commit": args.commit or checkout(),
        "precision": "bf16" if args.bf16 else "float32",
    }


def write(args: argparse.Namespace, rows: list[Row]) -> None:
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps({**environment(args), "rows": rows}, indent=1))


def read(path: Path) -> list[Row]:
    return json.loads(path.read_text())["rows"]


def fastest_mode(rows: Sequence[Row], model: str) -> str:
    """The mode in which plain training of a model is fastest, which the other methods have to beat."""
    plain = [row for row in rows if (row["model"], row["method"]) == (model, "full") and "step ms" in row]
    return min(plain, key=lambda row: row["step ms"])["mode"] if plain else "eager"
