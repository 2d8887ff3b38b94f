"""``torchsbp COMMAND …``. A command is a file beside this one that has ``PURPOSE`` and ``run(argv)``.

Its name is the file's, or the file's ``NAME``. Exit codes: 0 done; 1 it can't go on; 2 wrong usage or configuration;
75 a signal came, everything is saved: run the same command again with ``--resume auto``. What is wrong with the
user's input, data or machine is told in one message; anything else is our mistake and keeps its traceback.
"""

import sys
from collections.abc import Sequence
from importlib import import_module
from pkgutil import iter_modules
from typing import Protocol, cast

from .. import cli
from ..errors import DataError, RunError, SignalError, UsageError

IMPOSSIBLE, MISUSED = 1, 2
INTERRUPTED = 75  # EX_TEMPFAIL: try again


class Command(Protocol):
    PURPOSE: str
    """what it does, in a few words"""

    def run(self, argv: list[str]) -> int | None:
        """Its exit code, None if all is well."""
        ...


def commands() -> dict[str, Command]:
    """Every command, by name."""
    modules = {file.name: import_module(f"{cli.__name__}.{file.name}") for file in iter_modules(cli.__path__)}
    found = {getattr(its, "NAME", name): its for name, its in modules.items() if hasattr(its, "PURPOSE")}
    return cast(dict[str, Command], found)


def usage() -> str:
    lines = [f"  {name:<10}{command.PURPOSE}" for name, command in sorted(commands().items())]
    return "\n".join(["usage: torchsbp COMMAND …", "", *lines, "", "torchsbp COMMAND --help says more."])


def main(argv: Sequence[str] | None = None) -> int:
    name, *rest = [*(sys.argv[1:] if argv is None else argv)] or ["--help"]
    if name in ("-h", "--help"):
        print(usage())
        return 0
    command = commands().get(name)
    if command is None:
        return told(f"torchsbp: unknown command {name!r}\n{usage()}", MISUSED)
    try:
        return command.run(rest) or 0
    except SignalError:
        return told("interrupted: everything is saved; continue with --resume auto", INTERRUPTED)
    except UsageError as error:
        return told(f"torchsbp {name}: {error}", MISUSED)
    except DataError as error:  # from a worker it comes with the worker's traceback before it
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


if __name__ == "__main__":
    sys.exit(main())
