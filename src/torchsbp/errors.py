"""What can go wrong that is not the program's fault: the command line tells it in one message, without a traceback."""

from collections.abc import Callable
from inspect import signature
from typing import Any


class UsageError(ValueError):
    """What the user asked for is not possible; the message says what is."""


class UsageTypeError(UsageError, TypeError):
    """An argument is of a type that is not understood."""


class UsageTimeError(UsageError, RuntimeError):
    """What was called is not possible yet, or not any more; the message says what comes first."""


class RunError(Exception):
    """The run can't go on; checkpoints written so far stay as they are."""


class DataError(RunError):
    """A sample can't be read, or the data are not what the configuration says."""


class CheckpointError(RunError):
    """A checkpoint can't be written, read, or does not belong to this model."""


class SignalError(Exception):
    """SIGTERM or SIGINT came; everything is saved."""


def shown(value: Any) -> str:
    """A value in a message: no longer than a line."""
    text = " ".join(repr(value).split())
    return text if len(text) <= 80 else f"{text[:60]} …"


def expect(name: str, value: Any, kinds: type | tuple[type, ...], allowed: str) -> None:
    """An error if an argument is not of these kinds; ``allowed`` says what it may be and how that is made."""
    if not isinstance(value, kinds) or (isinstance(value, bool) and kinds is int):
        raise UsageTypeError(f"{name}={shown(value)} is of type {type(value).__name__}; allowed: {allowed}")


def check_calls(name: str, function: Callable[..., Any], *arguments: str) -> None:
    """An error if a user's function can't be called with so many arguments."""
    try:
        its = signature(function)
    except (TypeError, ValueError):  # written in C: it does not tell
        return
    try:
        its.bind(*arguments)
    except TypeError:
        raise UsageTypeError(f"{name} must be a function of ({', '.join(arguments)}), found one of {its}") from None
