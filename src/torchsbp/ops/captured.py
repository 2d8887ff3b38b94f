"""captured: a backward pass as one launch, where Python takes longer to say what is to be done than a GPU to do it.

A pass over few rows is some thirty small kernels. If a later step has tensors of the same shapes, it is captured in a
CUDA graph, which is replayed from then on, for all blocks of that kind. A graph reads and writes the same memory every
time: cotangent, saved tensors and parameters are copied there, gradients from there.
"""

from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from functools import wraps
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode

from .layers import Grad

LARGEST = 2**24
"""elements of a cotangent: with more of them the GPU is the slower one, and copies cost memory"""
HELD = 16
"""graphs at the same time"""
Backward = Callable[..., Sequence[Grad]]


class Context(NamedTuple):
    """What a backward pass reads of its function's ctx; ``static`` is all that is not a tensor."""

    saved_tensors: Sequence[Grad]
    needs_input_grad: tuple[bool, ...]
    static: Any


class Groups:
    """Tensors to be copied at once: those of one precision."""

    def __init__(self, tensors: Sequence[Grad]) -> None:
        self.numbers: dict[torch.dtype, list[int]] = {}
        for number, tensor in enumerate(tensors):
            if tensor is not None:
                self.numbers.setdefault(tensor.dtype, []).append(number)

    def copy(self, targets: Sequence[Any], sources: Sequence[Any]) -> None:
        for numbers in self.numbers.values():
            torch._foreach_copy_([targets[i] for i in numbers], [sources[i] for i in numbers])


class Graph:
    """A backward pass that reads ``places``, the cotangent and the saved tensors, and leaves ``results``."""

    def __init__(self, backward: Backward, context: Context, dy: Tensor) -> None:
        given = (dy, *context.saved_tensors)
        self.places, self.given = [empty(t) for t in given], Groups(given)
        self.given.copy(self.places, given)
        there = context._replace(saved_tensors=self.places[1:])
        backward(there, self.places[0])  # everything is loaded that it needs
        self.results, self.replay = record(lambda: backward(there, self.places[0]), dy.device)
        self.found = Groups(self.results)

    def run(self, context: Context, dy: Tensor) -> tuple[Grad, ...]:
        self.given.copy(self.places, (dy, *context.saved_tensors))
        self.replay()
        found = tuple(empty(t) for t in self.results)
        self.found.copy(found, self.results)
        return found


_GRAPHS: OrderedDict[Hashable, Graph | int] = OrderedDict()
"""For what they depend on; or the number of the step that had that first."""
_ASIDE: dict[Hashable, tuple[torch.cuda.Stream, Any]] = {}
"""For a device and a stream on it: another one to capture on, and the memory of its graphs. They run one after the
other, and of what one leaves there everything is copied before the next."""


def captured(backward: Backward) -> Backward:
    """The backward of an autograd function whose ctx has a ``static``, which can be hashed."""

    @wraps(backward)
    def wrapper(ctx: Any, dy: Tensor) -> Sequence[Grad]:
        if torch.compiler.is_compiling():
            return backward(ctx, dy)
        context = Context(ctx.saved_tensors, ctx.needs_input_grad, ctx.static)  # checkpointing unpacks a tensor once
        if not suits(dy):
            return backward(context, dy)
        shapes = [None if t is None else (t.dtype, t.shape) for t in context.saved_tensors]
        key = backward, context[1:], dy.dtype, dy.shape, *shapes, *surroundings(dy.device)
        step = torch._C._current_graph_task_id()
        found = _GRAPHS.setdefault(key, step)
        _GRAPHS.move_to_end(key)
        if found == step:
            if len(_GRAPHS) > HELD:
                _GRAPHS.popitem(last=False)
            return backward(context, dy)
        if not isinstance(found, Graph):
            found = _GRAPHS[key] = Graph(backward, context, dy)
        return found.run(context, dy)

    return wrapper


def suits(dy: Tensor) -> bool:
    """Whether it is small, on a GPU, and nobody else looks at every operator or captures them already."""
    if not dy.is_cuda or dy.numel() > LARGEST or _get_current_dispatch_mode() is not None:
        return False
    return not torch.cuda.is_current_stream_capturing()


def surroundings(device: torch.device) -> tuple[Hashable, ...]:
    """What else decides about the kernels that run, and where."""
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    return device, stream, torch.are_deterministic_algorithms_enabled(), torch.get_float32_matmul_precision()


def record(run: Callable[[], Sequence[Grad]], device: torch.device) -> tuple[Sequence[Grad], Callable[[], None]]:
    """Where it leaves its results, and what runs it again."""
    stream = torch.cuda.current_stream(device)
    where = device, stream.cuda_stream
    if where not in _ASIDE:
        _ASIDE[where] = torch.cuda.Stream(device), torch.cuda.graph_pool_handle()
    (aside, pool), graph = _ASIDE[where], torch.cuda.CUDAGraph()
    aside.wait_stream(stream)
    with torch.cuda.stream(aside):
        graph.capture_begin(pool=pool, capture_error_mode="thread_local")
        try:
            results = run()
        finally:
            graph.capture_end()
    stream.wait_stream(aside)
    return results, graph.replay


def empty(tensor: Grad) -> Grad:
    return None if tensor is None else torch.empty_like(tensor)
