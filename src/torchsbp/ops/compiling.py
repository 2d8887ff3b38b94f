"""What ``torch.compile`` sees of the ops.

It reads a step twice: its bytecode first, to find calls, then these calls themselves, forward and backward, on tensors
without data. Ops are functions of tensors and of options, so the second reading finds all there is to find; the first
would take much longer.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from hashlib import sha256
from threading import local
from typing import Any

import torch
from torch._guards import TracingContext
from torch._subclasses.fake_tensor import FakeTensorMode

Call = Callable[..., Any]
_CALLS: list[Call] = []
_KINDS: dict[str, type[Any]] = {}


class _Asked(local):
    """What a compiler asks an op for, other than to be read; by thread, as steps may be compiled in several at once."""

    shapes_alone = captured_later = False


_asked = _Asked()


def compiling() -> bool:
    """Whether a compiler reads this, the first time or the second."""
    return torch.compiler.is_compiling() or (TracingContext.try_get() is not None and not _asked.shapes_alone)


def captured_whole() -> bool:
    """Whether what a compiler reads will be captured as a whole, in CUDA graphs of its own: mode="reduce-overhead"."""
    config: Any = sys.modules.get("torch._inductor.config")
    return config is not None and config.triton.cudagraphs


def read_by_inductor() -> bool:
    """Whether the compiler that reads this, the second time, is PyTorch's own."""
    virtual: Any = sys.modules.get("torch._inductor.virtualized")
    return virtual is not None and isinstance(virtual.V.fake_mode, FakeTensorMode)


def no_data() -> bool:
    """Whether tensors stand for others of their shapes: there is nothing to launch a kernel on."""
    return _asked.shapes_alone


def read_to_be_captured() -> bool:
    """Whether what a compiler reads is a pass by itself, which will be captured."""
    return _asked.captured_later


def shapes_alone() -> AbstractContextManager[None]:
    """Inside, the shapes of what an op makes are asked for by the compiler, which will not see how it does."""
    return _asking("shapes_alone")


def captured_later() -> AbstractContextManager[None]:
    """Inside, a compiler reads a pass by itself."""
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
    """For an operator's call a name that tells all that it depends on but tensors: the same in every process."""
    return f"{what} {sha256(repr(depends).encode()).hexdigest()}"


def op(function: type[torch.autograd.Function]) -> Call:
    """Its ``apply``, for tensors, constants and tuples of these; to a compiler it is one call."""

    def call(*packed: Any) -> Any:
        return function.apply(*[_unpacked(value) for value in packed])

    def run(*flat: Any) -> Any:
        if torch.compiler.is_compiling() and _are_calls():
            return call(*[_packed(value) if isinstance(value, tuple) else value for value in flat])
        return function.apply(*flat)

    _CALLS.append(call)
    return run


def one_call(function: Call) -> Call:
    """The function, of tensors and constants, which to a compiler is one call."""

    def run(*given: Any) -> Any:
        if torch.compiler.is_compiling():
            _are_calls()
        return function(*given)

    _CALLS.append(function)
    return run


def _are_calls() -> bool:
    """True: the compiler has been told. Not when this file is imported, as that would import the compiler."""
    for call in _CALLS:
        torch.compiler.allow_in_graph(call)
    return True


def _packed(options: tuple[Any, ...]) -> tuple[Any, ...]:
    """A named tuple as a plain one behind the name of its kind: what a compiler takes for a constant."""
    return _name(type(options)), *[_packed(value) if isinstance(value, tuple) else value for value in options]


def _unpacked(value: Any) -> Any:
    if not isinstance(value, tuple):
        return value
    kind = _KINDS[value[0]]
    return getattr(kind, "_make", kind)([_unpacked(each) for each in value[1:]])


def _name(kind: type[Any]) -> str:
    """Of a kind, by which it is found again."""
    _KINDS[kind.__qualname__] = kind
    return kind.__qualname__


# As torch.compiler.assume_constant_result has it: run when they are read.
setattr(_are_calls, "_dynamo_marked_constant", True)  # noqa: B010
setattr(_name, "_dynamo_marked_constant", True)  # noqa: B010
