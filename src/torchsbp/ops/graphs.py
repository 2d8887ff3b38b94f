"""CUDA graphs: backward passes as one launch, where Python takes longer to say what is to be done than a GPU to do it.

A pass over few rows is some thirty small kernels. If a later step has tensors of the same shapes, it is captured in a
CUDA graph, which is replayed from then on, for all blocks of that kind. A graph reads and writes the same memory every
time: cotangent, saved tensors and parameters are copied there, gradients from there.
"""

from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple, TypeVar
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode

from .layers import Grad

LARGEST = 2**24
"""elements of a cotangent: with more of them the GPU is the slower one, and copies cost memory"""
HELD = 64
"""backward passes: kinds of blocks, image sizes"""
Backward = Callable[..., Sequence[Grad]]
Result = TypeVar("Result")


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
    """A backward pass that reads ``places``, the cotangent and the saved tensors, and leaves ``results``.

    Both are memory that is free while it does not run: graphs run one after the other, and what one leaves is copied
    before the next.
    """

    def __init__(self, backward: Backward, context: Context, dy: Tensor) -> None:
        given = (dy, *context.saved_tensors)

        def run() -> tuple[list[Grad], Sequence[Grad]]:
            places = [empty(t) for t in given]
            return places, backward(context._replace(saved_tensors=places[1:]), places[0])

        (places, results), self.replay = record(run, dy.device)
        self.given, self.found = Groups(places), Groups(results)
        self.places, self.results = [place_of(t) for t in places], [place_of(t) for t in results]

    def run(self, context: Context, dy: Tensor) -> tuple[Grad, ...]:
        self.given.copy(self.places, (dy, *context.saved_tensors))
        self.replay()
        found = tuple(empty(t) for t in self.results)
        self.found.copy(found, self.results)
        return found


_GRAPHS: OrderedDict[Hashable, Graph | int] = OrderedDict()
"""For what they depend on; or the number of the step that had that first."""


def run_backward(backward: Backward, context: Context, dy: Tensor) -> Sequence[Grad]:
    """The pass, from its graph if there is one. In the first step that has it, it runs as it stands; in the second, on
    copies as a graph has them, so that everything is loaded that it needs, and is captured."""
    if not suits(dy):
        return backward(context, dy)
    shapes = [None if t is None else (t.dtype, t.shape) for t in context.saved_tensors]
    key = backward, context[1:], dy.dtype, dy.shape, *shapes, *surroundings(dy.device)
    step = torch._C._current_graph_task_id()
    found = _GRAPHS.setdefault(key, step)
    _GRAPHS.move_to_end(key)
    if isinstance(found, Graph):
        return found.run(context, dy)
    if found == step:
        if len(_GRAPHS) > HELD:
            _GRAPHS.popitem(last=False)
        return backward(context, dy)
    copies = [None if t is None else t.clone() for t in context.saved_tensors]
    results = backward(context._replace(saved_tensors=copies), dy.clone())
    del copies
    _GRAPHS[key] = Graph(backward, context, dy)
    return results


def suits(dy: Tensor) -> bool:
    """Whether it is small, and nobody else looks at every operator or captures them already."""
    if dy.numel() > LARGEST or _get_current_dispatch_mode() is not None:
        return False
    return not torch.cuda.is_current_stream_capturing()


def surroundings(device: torch.device) -> tuple[Hashable, ...]:
    """What else decides about the kernels that run, and where."""
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    return device, stream, torch.are_deterministic_algorithms_enabled(), torch.get_float32_matmul_precision()


class Pool:
    """Where the graphs of a stream are captured, on another stream, and the memory that all of them use. It lives as
    long as one of them."""

    def __init__(self, device: torch.device) -> None:
        self.stream, self.handle = torch.cuda.Stream(device), torch.cuda.graph_pool_handle()


class Recorded(NamedTuple):
    graph: torch.cuda.CUDAGraph
    pool: Pool

    def replay(self) -> None:
        self.graph.replay()


_POOLS: WeakValueDictionary[Hashable, Pool] = WeakValueDictionary()


def record(run: Callable[[], Result], device: torch.device) -> tuple[Result, Callable[[], None]]:
    """What it gives, and what runs it again, on the stream that is current now. Memory that it frees, or that is freed
    of what it gives, is used by other graphs of that stream: they run one after the other."""
    stream = torch.cuda.current_stream(device)
    where = device, stream.cuda_stream
    pool = _POOLS.get(where)
    if pool is None:
        pool = _POOLS[where] = Pool(device)
    graph = torch.cuda.CUDAGraph()
    pool.stream.wait_stream(stream)
    with torch.cuda.stream(pool.stream):
        graph.capture_begin(pool=pool.handle, capture_error_mode="thread_local")
        try:
            result = run()
        finally:
            graph.capture_end()
    stream.wait_stream(pool.stream)
    return result, Recorded(graph, pool).replay


def release() -> None:
    """Let backward passes be captured anew, and give their memory back."""
    _GRAPHS.clear()


def empty(tensor: Grad) -> Grad:
    return None if tensor is None else torch.empty_like(tensor)


class Bytes:
    """Memory that is somebody else's, for ``torch.as_tensor``."""

    def __init__(self, address: int, size: int) -> None:
        self.__cuda_array_interface__ = {"data": (address, False), "shape": (size,), "typestr": "|u1", "version": 3}


def place_of(tensor: Grad) -> Grad:
    """The same memory, which may be used for something else."""
    if tensor is None or not tensor.is_cuda or not tensor.numel():
        return tensor
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    content = Bytes(tensor.data_ptr(), (last + 1) * tensor.element_size())
    return torch.as_tensor(content, device=tensor.device).view(tensor.dtype).as_strided(tensor.shape, tensor.stride())
