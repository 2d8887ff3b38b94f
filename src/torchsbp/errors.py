"""Errors that are not the program's fault: the command line reports each in one message, without a traceback."""

from collections.abc import Callable
from inspect import signature
from typing import Any


class UsageError(ValueError):
    """What the user asks for is not possible; the message says what is."""


class UsageTypeError(UsageError, TypeError):
    """An argument has a wrong type, or an unknown name."""


class UsageTimeError(UsageError, RuntimeError):
    """A call is not possible in the current state; the message says what to do instead, or first."""


class RunError(Exception):
    """The run can't go on; checkpoints written so far stay as they are."""


class DataError(RunError):
    """A sample can't be read, or the data are not what the configuration says."""


class CheckpointError(RunError):
    """A checkpoint can't be written, read, or does not belong to this model."""


class SignalError(Exception):
    """The process received SIGTERM or SIGINT; everything is saved."""


def shown(value: Any) -> str:
    """Return a value's repr for a message, no longer than a line."""
    text = " ".join(repr(value).split())
    return text if len(text) <= 80 else f"{text[:60]} …"


def expect(name: str, value: Any, kinds: type | tuple[type, ...], allowed: str) -> None:
    """Raise UsageTypeError unless an argument is of these kinds; ``allowed`` says what it may be and how to make it."""
    allows_bool = bool in (kinds if isinstance(kinds, tuple) else (kinds,))  # which Python counts among the ints
    if not isinstance(value, kinds) or (isinstance(value, bool) and not allows_bool):
        raise UsageTypeError(f"{name}={shown(value)} is of type {type(value).__name__}; allowed: {allowed}")


def check_calls(name: str, function: Callable[..., Any], *arguments: str) -> None:
    """Raise UsageTypeError if a user's function can't be called with these positional arguments."""
    try:
        its = signature(function)
    except (TypeError, ValueError):  # written in C, without a signature
        return
    try:
        its.bind(*arguments)
    except TypeError:
        raise UsageTypeError(f"{name} must be a function of ({', '.join(arguments)}), found one of {its}") from None
