"""Tasks by name. Every file here registers its own; tasks elsewhere do the same, or are named package.module:Class."""

from collections.abc import Callable, Mapping
from importlib import import_module
from pkgutil import iter_modules

from ...errors import DataError, UsageError
from ..ranges import check
from ..task import Task, TaskOptions

DEFAULT = "classification"
"""the task of recipes and checkpoints that name none"""

TASKS: dict[str, type[Task]] = {}


def register(name: str) -> Callable[[type[Task]], type[Task]]:
    """A class decorator: ``task.name`` in a recipe chooses the task by this name."""

    def remember(task: type[Task]) -> type[Task]:
        TASKS[name] = task
        return task

    return remember


def names() -> list[str]:
    return sorted({*TASKS, *(module.name for module in iter_modules(__path__))})


def find(name: str) -> type[Task]:
    """The class of the task of that name."""
    if ":" in name:
        return by_path(name)
    if name not in names():
        raise UsageError(f"task.name {name!r} is unknown; known: {', '.join(names())}, or package.module:Class")
    if name not in TASKS:
        import_module(f"{__name__}.{name}")
    return TASKS[name]


def by_path(name: str) -> type[Task]:
    """``package.module:Class`` of any package that can be imported."""
    module, _, attribute = name.partition(":")
    try:
        found = getattr(import_module(module), attribute, None)
    except (ModuleNotFoundError, ValueError) as error:
        raise UsageError(f"task.name {name!r} can't be imported: {error}") from error
    if not (isinstance(found, type) and issubclass(found, Task)):
        raise UsageError(f"task.name {name!r} is no class derived from torchsbp.train.task.Task")
    return found


def start(options: TaskOptions, seed: int) -> Task:
    """Make the task that the options name, to train with; raise ``DataError`` if it has no validation data."""
    task = checked(options)(options, seed)
    if not len(task.valid_data):
        raise DataError(f"task {options.name}: there are no validation data, which decide what is best")
    return task


def trained(options: TaskOptions, seed: int, about: Mapping[str, str]) -> Task:
    """Make the task that the options name, for weights that are trained already: see ``Task.trained``."""
    return checked(options).trained(options, seed, about)


def checked(options: TaskOptions) -> type[Task]:
    """The class of the task. Raise ``UsageError`` if these are not its options, or numbers are out of range."""
    task = find(options.name or DEFAULT)
    if not isinstance(options, task.Options):
        wanted, given = task.Options.__qualname__, type(options).__qualname__
        raise UsageError(f"task.name {options.name!r} takes {task.__module__}.{wanted}, found {given}")
    check(options, "task")
    return task
