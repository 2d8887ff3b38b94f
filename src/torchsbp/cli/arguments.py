"""Arguments that ``profile`` and ``plan`` share: a model by name, a training step, and SBP's options."""

import argparse
from collections.abc import Callable
from contextlib import suppress
from typing import Any, get_args, get_origin

from ..config import Option, SBPConfig, options
from ..memory.checks import ALSO, PRECISIONS
from ..memory.estimate import OPTIMIZERS
from .named import HELP, Named

KINDS = [bool, list[int], int, float, list[float], str, list[str]]  # tried in this order: what fits few texts first
TRUTH = {"true": True, "yes": True, "false": False, "no": False}


def parser(command: str, description: str) -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(f"torchsbp {command}", description=description)
    result.add_argument("model", metavar="MODEL", help=HELP)
    result.add_argument("--batch", type=positive, default=64)
    result.add_argument("--size", type=positive, help="of square images; the model's own unless given")
    result.add_argument("--shape", type=sizes, metavar="3,224,224", help="of one sample, instead of --size")
    result.add_argument("--precision", default="bf16", type=lambda name: ALSO.get(name, name), choices=PRECISIONS)
    result.add_argument("--optimizer", default="adamw", choices=OPTIMIZERS)
    result.add_argument(*spellings("channels_last"), action="store_true", help="memory layout of model and images")
    result.add_argument("--json", action="store_true", help="print JSON instead of a table")
    group = result.add_argument_group("stochastic backpropagation", "the fields of torchsbp.SBPConfig")
    for option in options():
        names = spellings(option.name) + [f"--sbp.{name[2:]}" for name in spellings(option.name)]
        group.add_argument(*names, dest=option.name, type=reader(option), help=option.help.replace("%", "%%"))
    return result


def spellings(name: str) -> list[str]:
    """Both spellings of an option, such as ``--keep-ratio`` and ``--keep_ratio``."""
    return list(dict.fromkeys((f"--{name.replace('_', '-')}", f"--{name}")))


def positive(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)


def natural(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number, 0 or more")
    return int(text)


def sizes(text: str) -> tuple[int, ...]:
    return tuple(positive(part.strip()) for part in text.split(","))


def reader(option: Option) -> Callable[[str], Any]:
    """A function from text to a value, of the first of the option's types that the text fits."""

    def read(text: str) -> Any:
        for kind in sorted(option.types, key=KINDS.index):
            if kind == list[int] and text == "1":  # for ``blocks`` this is the share of all blocks, not an index
                continue
            with suppress(ValueError, KeyError):
                return as_kind(text.strip(), kind)
        raise argparse.ArgumentTypeError(f"{text!r} is not {forms(option.types)}")

    return read


def as_kind(text: str, kind: Any) -> Any:
    if kind is bool:
        return TRUTH[text.lower()]
    if get_origin(kind) is list:
        return [as_kind(part.strip(), get_args(kind)[0]) for part in text.split(",")]
    return kind(text)


def forms(kinds: tuple[Any, ...]) -> str:
    """What may be written for these types, in words."""
    words = {bool: "true, false", int: "a whole number", float: "a number", str: "a word"}
    known = [words.get(kind, "a list with commas") for kind in kinds]
    return " or ".join(dict.fromkeys(known))


def sbp_options(args: argparse.Namespace) -> dict[str, Any]:
    """The options of SBP that were given."""
    return {its.name: value for its in options() if (value := getattr(args, its.name)) is not None}


def sbp_config(args: argparse.Namespace) -> SBPConfig:
    return SBPConfig(**sbp_options(args))


def heading(args: argparse.Namespace, named: Named, batch: bool = True) -> str:
    images = len(named.shape) == 3
    sides = "×".join(str(side) for side in (named.shape[1:] if images else named.shape))
    size = [f"batch {args.batch}"] if batch else []
    return ", ".join([args.model, *size, sides, args.precision, args.optimizer])
