"""Parse a recipe and the options after it into the configuration of a run. Its task adds options of its own."""

import argparse
from dataclasses import fields, is_dataclass
from difflib import get_close_matches
from importlib.resources import files
from os.path import isfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_type_hints

from ..config import options
from ..errors import UsageError

if TYPE_CHECKING:
    from jsonargparse import ArgumentParser

    from ..train.config import Config

RECIPES = Path(str(files("torchsbp") / "recipes"))


def recipes() -> list[str]:
    return sorted(path.relative_to(RECIPES).with_suffix("").as_posix() for path in RECIPES.rglob("*.yaml"))


def find_recipe(name: str) -> Path:
    """A shipped recipe by name, or any file."""
    for path in (Path(name), RECIPES / f"{name}.yaml"):
        if isfile(path):
            return path
    near = get_close_matches(name, recipes(), n=3)
    hint = f"; did you mean {', '.join(near)}?" if near else ""
    raise UsageError(f"no recipe {name!r}: neither a file nor one of {', '.join(recipes())}{hint}")


def parse(command: str, argv: list[str]) -> "Config":
    from ..train.config import Config

    argv = [spelled(word) for word in argv]
    if argv and not argv[0].startswith("-"):
        argv = ["--config", str(find_recipe(argv[0])), *argv[1:]]
    task = task_name(argv)
    for path in files_of(argv):
        check_sections(of_file(path), sections(task), path)
    arguments = parser(command, task)
    found = arguments.parse_args(argv)
    found.pop("config")
    check_sections(vars(found), sections(task), "the command line")
    return Config(**vars(arguments.instantiate(found)))


def spelled(word: str) -> str:
    """An option by the name that it has in recipes: ``--channels-last`` and ``--keep-ratio`` are understood too."""
    from ..train.config import Config

    if not word.startswith("--"):
        return word
    name, given, value = word[2:].partition("=")
    name = name.replace("-", "_")
    if name in {its.name for its in options()} - {its.name for its in fields(Config)}:
        name = f"sbp.{name}"
    return f"--{name}{given}{value}"


def files_of(argv: list[str]) -> list[str]:
    """The recipe files among the arguments."""
    words = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    words.add_argument("--config", dest="paths", action="append", default=[])
    return [path for path in words.parse_known_args(argv)[0].paths if isfile(path)]


def sections(task: str) -> dict[str, Any]:
    """The sections of a configuration, which have options of their own, and the sections within them."""
    from ..train import tasks
    from ..train.config import Config

    return {**parts(Config), "task": parts(tasks.find(task).Options)}


def parts(kind: Any) -> dict[str, Any]:
    hints = get_type_hints(kind)
    return {name: parts(hint) for name, hint in hints.items() if isinstance(hint, type) and is_dataclass(hint)}


def check_sections(content: Any, known: dict[str, Any], where: str, name: str = "") -> None:
    """Raise ``UsageError`` if a section has something else in the place of options."""
    its_own = content if isinstance(content, dict) else getattr(content, "__dict__", None)
    if its_own is None:
        found = "nothing" if content is None else repr(content)
        what = f"{name} has options of its own" if name else "a recipe has options"
        raise UsageError(f"{where}: {what} (NAME: VALUE), found {found}; allowed: {', '.join(known) or 'its options'}")
    for its, within in known.items():
        if its in its_own:
            check_sections(its_own[its], within, where, f"{name}.{its}" if name else its)


def parser(command: str, task: str) -> "ArgumentParser":
    """A parser of the options that every run has, and of the task's."""
    from jsonargparse import ArgumentParser, set_parsing_settings

    from ..train import tasks
    from ..train.config import Config

    set_parsing_settings(docstring_parse_attribute_docstrings=True)
    of = "RECIPE" if command == "train" else "RUN"
    result = ArgumentParser(
        prog=f"torchsbp {command}",
        usage=f"torchsbp {command} {of} [--option value …]",  # the names of all options would hide what is wrong
        allow_abbrev=False,
        description=f"torchsbp {command} RECIPE [options]. Recipes: {', '.join(recipes())}, or a YAML file. "
        f"Tasks: {', '.join(tasks.names())}, or package.module:Class; the options of {task} are shown.",
    )
    result.add_argument("--config", action="config", help="a further YAML file, over the recipe")
    result.add_class_arguments(tasks.find(task).Options, "task")
    result.set_defaults({"task.name": task})
    result.add_class_arguments(Config, skip={"task"})
    return result


def task_name(argv: list[str]) -> str:
    """The task that recipe files and options name: the last name counts, as for any other option."""
    from ..train.tasks import DEFAULT

    words = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for option, name_in in (("--config", of_recipe), ("--task", of_task), ("--task.name", str)):
        words.add_argument(option, dest="names", action="append", type=name_in, default=[])
    return next((name for name in reversed(words.parse_known_args(argv)[0].names) if name), DEFAULT)


def of_recipe(text: str) -> str:
    content = read(text)
    return named(content.get("task")) if isinstance(content, dict) else ""


def of_task(text: str) -> str:
    return named(read(text))


def named(task: Any) -> str:
    return str(task.get("name") or "") if isinstance(task, dict) else ""


def read(text: str) -> Any:
    """The content of a YAML file, or of a YAML text. None if it can't be read: that is reported later."""
    import yaml

    try:
        return of_file(text) if isfile(text) else yaml.safe_load(text)
    except (ValueError, yaml.YAMLError):
        return None


def of_file(path: str) -> Any:
    import yaml

    try:
        with open(path) as file:  # so that errors have its name
            return yaml.safe_load(file)
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise UsageError(f"{path} can't be read as YAML: {' '.join(str(error).split())}") from error
