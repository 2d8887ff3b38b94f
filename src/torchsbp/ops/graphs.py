"""CUDA graphs: passes of an op as one launch, where Python takes longer to say what is to be done than a GPU to do it.

A pass over few rows is some thirty small kernels. If a later step has tensors of the same shapes, it is captured in a
CUDA graph, which is replayed from then on, for all blocks of that kind. A graph reads and writes the same memory every
time: what a pass is given is copied there, parameters too, and its results from there.
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
"""elements of an op's input or cotangent: with more of them the GPU is the slower one, and copies cost memory"""
HELD = 128
"""passes: forward and backward of kinds of blocks, for some image sizes"""
PLAIN = (Tensor, torch.nn.Parameter)
Tensors = Sequence[Any]
"""or None"""
Pass = Callable[[Any, Tensors], tuple[Tensors, Any]]
"""Of what is not a tensor, and can be hashed, and of tensors: tensors, and what else follows from the former."""
Result = TypeVar("Result")


class Groups:
    """Tensors to be copied at once: those of one precision."""

    def __init__(self, tensors: Tensors) -> None:
        self.numbers: dict[torch.dtype, list[int]] = {}
        for number, tensor in enumerate(tensors):
            if tensor is not None:
                self.numbers.setdefault(tensor.dtype, []).append(number)

    def copy(self, targets: Tensors, sources: Tensors) -> None:
        for numbers in self.numbers.values():
            torch._foreach_copy_([targets[i] for i in numbers], [sources[i] for i in numbers])


class Graph:
    """A pass that reads ``places`` and leaves ``results``, but for those that are what it is given.

    Both are memory that is free while it does not run: graphs run one after the other, and what one leaves is copied
    before the next.
    """

    def __init__(self, run: Pass, static: Any, given: Tensors, device: torch.device) -> None:
        def on_places() -> tuple[list[Any], tuple[Tensors, Any]]:
            places = [empty(t) for t in given]
            return places, run(static, places)

        (places, (results, self.extra)), self.replay = record(on_places, device)
        self.passed = passed(results, places)
        made = [None if number in self.passed else t for number, t in enumerate(results)]
        self.given, self.made = Groups(places), Groups(made)
        self.places, self.results = [place_of(t) for t in places], [place_of(t) for t in made]

    def run(self, given: Tensors) -> tuple[list[Any], Any]:
        self.given.copy(self.places, given)
        self.replay()
        found = [empty(t) for t in self.results]
        self.made.copy(found, self.results)
        return with_passed(found, self.passed, given), self.extra


def passed(results: Tensors, given: Tensors) -> dict[int, tuple[int, torch.Size]]:
    """Results that are what was given, if in another shape: their number, its number, and the shape."""
    numbers = {where(t): number for number, t in enumerate(given) if t is not None}
    found = {number: (numbers.get(where(t)), t.shape) for number, t in enumerate(results) if t is not None}
    return {number: (source, shape) for number, (source, shape) in found.items() if source is not None}


def where(tensor: Tensor) -> Hashable:
    return tensor.untyped_storage()._cdata, tensor.storage_offset(), tensor.numel(), tensor.dtype


def with_passed(found: list[Any], same: dict[int, tuple[int, torch.Size]], given: Tensors) -> list[Any]:
    for number, (source, shape) in same.items():
        found[number] = given[source] if given[source].shape == shape else given[source].reshape(shape)
    return found


_GRAPHS: OrderedDict[Hashable, Graph | int] = OrderedDict()
"""For what they depend on; or the number of the step that had that first."""
_steps = [0]
"""The backward pass that ran last: it tells steps apart."""


def run_pass(run: Pass, static: Any, given: Tensors, device: torch.device) -> tuple[Tensors, Any]:
    """The pass, from its graph if there is one. It is captured in the second step that has it, when it has run on
    copies as a graph has them, so that everything is loaded that it needs."""
    if not suits(given):
        return run(static, given)
    key = (run, static, *[None if t is None else (t.dtype, t.shape) for t in given], *surroundings(device))
    step = _steps[0] = max(torch._C._current_graph_task_id(), _steps[0])
    found = _GRAPHS.setdefault(key, step)
    _GRAPHS.move_to_end(key)
    if isinstance(found, Graph):
        return found.run(given)
    if found != step:
        run(static, [None if t is None else t.clone() for t in given])
        _GRAPHS[key] = Graph(run, static, given, device)
    elif len(_GRAPHS) > HELD:
        _GRAPHS.popitem(last=False)
    return run(static, given)


def small(given: Tensors) -> bool:
    return bool(given[0].numel() <= LARGEST)


def suits(given: Tensors) -> bool:
    """Whether it is small, and nobody else looks at every operator or captures them already."""
    if not small(given) or _get_current_dispatch_mode() is not None:
        return False
    if not all(t is None or type(t) in PLAIN for t in given):
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
    key = device, stream.cuda_stream
    pool = _POOLS.get(key)
    if pool is None:
        pool = _POOLS[key] = Pool(device)
    graph = torch.cuda.CUDAGraph()
    pool.stream.wait_stream(stream)
    torch._C._cuda_clearCublasWorkspaces()  # those of one capture are not for another
    with torch.cuda.stream(pool.stream):
        graph.capture_begin(pool=pool.handle, capture_error_mode="thread_local")
        try:
            result = run()
        finally:
            graph.capture_end()
            torch._C._cuda_clearCublasWorkspaces()
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
