"""The command line: ``torchsbp COMMAND …``. A command is a function of its arguments, imported when it is called."""

import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import NamedTuple


class Command(NamedTuple):
    """Where its function is, "module:name", and what it does in a few words."""

    function: str
    purpose: str

    def load(self) -> Callable[[list[str]], int | None]:
        module, _, name = self.function.partition(":")
        return getattr(import_module(module), name)


COMMANDS = {
    "profile": Command("torchsbp.memory.commands:profile", "memory of a training step, by method and by block"),
    "plan": Command("torchsbp.memory.commands:plan", "the configuration that fits a memory budget"),
    "models": Command("torchsbp.models:main", "which models are supported, and which blocks of a model"),
    "train": Command("torchsbp.train.cli:train", "train from a recipe"),
    "eval": Command("torchsbp.train.cli:evaluate", "evaluate a run or weights"),
    "report": Command("torchsbp.report:main", "tables, curves and a page from runs"),
}
"""A new command is one more line; its function raises ValueError with a message for the user if it is misused."""


def usage() -> str:
    lines = [f"  {name:<10}{command.purpose}" for name, command in COMMANDS.items()]
    return "\n".join(["usage: torchsbp COMMAND …", "", *lines, "", "torchsbp COMMAND --help says more."])


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; exit status 2 and a message if it is misused."""
    name, *rest = [*(sys.argv[1:] if argv is None else argv)] or ["--help"]
    if name in ("-h", "--help"):
        print(usage())
        return 0
    if name not in COMMANDS:
        print(f"torchsbp: unknown command {name!r}\n{usage()}", file=sys.stderr)
        return 2
    try:
        return COMMANDS[name].load()(rest) or 0
    except (ValueError, TypeError, OSError) as error:
        print(f"torchsbp {name}: {error}", file=sys.stderr)
        return 2
    except ModuleNotFoundError as error:
        print(f"torchsbp {name}: {error}; pip install 'torchsbp[train]' has everything", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
