"""What ``torch.compile`` sees of the ops.

It reads a step twice. Dynamo reads bytecode and finds calls; AOTAutograd then runs these, forward and backward, on fake
tensors. An op is one call to Dynamo, which would take much longer to read it. As a function of tensors and options it
hides nothing from AOTAutograd.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from hashlib import sha256
from threading import local
from typing import Any, TypeVar

import torch
from torch._guards import TracingContext
from torch._subclasses.fake_tensor import FakeTensorMode

Call = Callable[..., Any]
Function = TypeVar("Function", bound=Call)
_CALLS: list[Call] = []
_KINDS: dict[str, type[Any]] = {}


class _Asked(local):
    """Why the compiler runs an op, other than to trace it into a step; by thread, as several may compile at once."""

    shapes_alone = captured_later = False


_asked = _Asked()


def compiling() -> bool:
    """Whether Dynamo or AOTAutograd traces this; not where shapes alone are asked for."""
    return torch.compiler.is_compiling() or (TracingContext.try_get() is not None and not _asked.shapes_alone)


def captured_whole() -> bool:
    """Whether Inductor will capture the step as a whole, in CUDA graphs of its own (mode="reduce-overhead")."""
    config: Any = sys.modules.get("torch._inductor.config")
    return config is not None and config.triton.cudagraphs


def read_by_inductor() -> bool:
    """Whether AOTAutograd traces this for Inductor, not for another backend."""
    virtual: Any = sys.modules.get("torch._inductor.virtualized")
    return virtual is not None and isinstance(virtual.V.fake_mode, FakeTensorMode)


def no_data() -> bool:
    """Whether shapes alone are asked for: tensors are fake, and there is nothing to launch a kernel on."""
    return _asked.shapes_alone


def read_to_be_captured() -> bool:
    """Whether a pass is compiled by itself, to be captured in a CUDA graph."""
    return _asked.captured_later


def shapes_alone() -> AbstractContextManager[None]:
    """Inside, an op runs on fake tensors for the shapes of its results; its operators are not traced."""
    return _asking("shapes_alone")


def captured_later() -> AbstractContextManager[None]:
    """Inside, a pass is compiled by itself, to be captured."""
    return _asking("captured_later")


@contextmanager
def _asking(what: str) -> Iterator[None]:
    before = getattr(_asked, what)
    setattr(_asked, what, True)
    try:
        yield
    finally:
        setattr(_asked, what, before)


def call_named(what: str, *depends: Any) -> str:
    """A name for an operator's call that tells all it depends on but tensors: the same in every process."""
    return f"{what} {sha256(repr(depends).encode()).hexdigest()}"


def constant_for_dynamo(function: Function) -> Function:
    """Let Dynamo run the function when it reads a call of it, and take the result for a constant of its graph. That is
    ``torch.compiler.assume_constant_result``, which would import the compiler, and Triton with it."""
    setattr(function, "_dynamo_marked_constant", True)  # noqa: B010
    return function


def op(function: type[torch.autograd.Function]) -> Call:
    """The function's ``apply``, on tensors, constants and tuples of these; for Dynamo it is one call."""

    def call(*packed: Any) -> Any:
        return function.apply(*[_unpacked(value) for value in packed])

    def run(*flat: Any) -> Any:
        if torch.compiler.is_compiling() and _are_calls():
            return call(*[_packed(value) if isinstance(value, tuple) else value for value in flat])
        return function.apply(*flat)

    _CALLS.append(call)
    return run


def one_call(function: Call) -> Call:
    """The function, on tensors and constants; for Dynamo it is one call."""

    def run(*given: Any) -> Any:
        if torch.compiler.is_compiling():
            _are_calls()
        return function(*given)

    _CALLS.append(function)
    return run


@constant_for_dynamo
def _are_calls() -> bool:
    """Tell Dynamo of all calls, and return True. Not done at import, as that would import the compiler."""
    for call in _CALLS:
        torch.compiler.allow_in_graph(call)
    return True


def _packed(options: tuple[Any, ...]) -> tuple[Any, ...]:
    """A named tuple as a plain one that begins with the name of its class: Dynamo takes that for a constant."""
    return _name(type(options)), *[_packed(value) if isinstance(value, tuple) else value for value in options]


def _unpacked(value: Any) -> Any:
    if not isinstance(value, tuple):
        return value
    kind = _KINDS[value[0]]
    return getattr(kind, "_make", kind)([_unpacked(each) for each in value[1:]])


@constant_for_dynamo
def _name(kind: type[Any]) -> str:
    """The name of a class, by which ``_unpacked`` finds it again."""
    _KINDS[kind.__qualname__] = kind
    return kind.__qualname__
