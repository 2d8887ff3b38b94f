"""``torchsbp COMMAND …``. A command is a file beside this one that has ``PURPOSE`` and ``run(argv)``.

Its name is the file's, or the file's ``NAME``. Exit codes: 0 done; 1 the command can't go on; 2 wrong usage or
configuration; 75 a signal came and everything is saved: run the same command again with ``--resume auto``; 130 Ctrl-C
ended it at once. Faults of the user's input, data or machine are reported in one message; any other error is a bug of
ours and keeps its traceback.
"""

import ast
import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from typing import NamedTuple

from .. import __version__, cli
from ..errors import DataError, RunError, SignalError, UsageError

IMPOSSIBLE, MISUSED = 1, 2
INTERRUPTED = 75  # EX_TEMPFAIL: try again
ENDED = 130  # as shells report a process that SIGINT has ended


class Command(NamedTuple):
    """A command's file, parsed but not imported: help then needs neither torch nor what the commands need."""

    module: str
    PURPOSE: str
    """what it does, in a few words"""

    def run(self, argv: list[str]) -> int | None:
        """Run the command. Return its exit code; None means 0."""
        return import_module(self.module).run(argv)


def commands() -> dict[str, Command]:
    """Every command, by name."""
    found = {}
    for file in iter_modules(cli.__path__):
        words = constants(Path(getattr(file.module_finder, "path", "")) / f"{file.name}.py")
        if "PURPOSE" in words:
            found[words.get("NAME", file.name)] = Command(f"{cli.__name__}.{file.name}", words["PURPOSE"])
    return dict(sorted(found.items()))


def constants(path: Path) -> dict[str, str]:
    """The string constants of a file, by name."""
    found = {}
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            found.update({name.id: node.value.value for name in node.targets if isinstance(name, ast.Name)})
    return found


def usage() -> str:
    lines = [f"  {name:<10}{command.PURPOSE}" for name, command in commands().items()]
    return "\n".join(
        [
            "usage: torchsbp COMMAND …",
            "",
            "Stochastic backpropagation for PyTorch: forward on every token, backward from a sampled subset.",
            "",
            *lines,
            "",
            "torchsbp COMMAND --help says more; torchsbp --version.",
        ]
    )


def main(argv: Sequence[str] | None = None) -> int:
    with ended_by_ctrl_c():
        return answered(*([*(sys.argv[1:] if argv is None else argv)] or ["--help"]))


@contextmanager
def ended_by_ctrl_c() -> Iterator[None]:
    """Inside, Ctrl-C ends the process at once, even during imports. The loop of ``train`` handles it in its own way."""
    own = signal.getsignal(signal.SIGINT) is not signal.default_int_handler
    if own or threading.current_thread() is not threading.main_thread():
        yield
        return
    signal.signal(signal.SIGINT, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def end(*_: object) -> None:
    os.write(2, b"interrupted\n")
    os._exit(ENDED)


def answered(name: str, *rest: str) -> int:
    """Run a command and return its exit code."""
    if name in ("-h", "--help"):
        print(usage())
        return 0
    if name == "--version":
        print(f"torchsbp {__version__}")
        return 0
    command = commands().get(name)
    if command is None:
        return told(f"torchsbp: unknown command {name!r}\n{usage()}", MISUSED)
    try:
        return command.run([*rest]) or 0
    except SignalError:
        return told("interrupted: everything is saved; continue with --resume auto", INTERRUPTED)
    except UsageError as error:
        return told(f"torchsbp {name}: {error}", MISUSED)
    except DataError as error:  # a worker's error has the worker's traceback before the message
        return told(f"error: {str(error).rstrip().splitlines()[-1].split('DataError: ')[-1]}", IMPOSSIBLE)
    except (RunError, OSError) as error:
        return told(f"error: {error}", IMPOSSIBLE)
    except ModuleNotFoundError as error:
        if str(error.name).startswith(__name__.partition(".")[0]):
            raise
        return told(f"torchsbp {name}: {error}; pip install 'torchsbp[train]' has everything", MISUSED)


def told(message: str, code: int) -> int:
    print(message, file=sys.stderr)
    return code
