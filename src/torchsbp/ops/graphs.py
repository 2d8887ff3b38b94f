"""CUDA graphs: passes of an op as one launch, where Python takes longer to say what is to be done than a GPU to do it.

A pass over few rows is some thirty small kernels. If a later step has tensors of the same shapes, it is captured in a
CUDA graph, which is replayed from then on, for all blocks of that kind. A graph reads and writes the same memory every
time: what a pass is given is copied there, parameters too, and its results from there.
"""

import warnings
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple, TypeVar
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode

from .alive import Alive
from .compiling import captured_whole, compiling
from .layers import Grad

LARGEST, MOST_COMPILED = 2**24, 2**33
"""elements of an op's input or cotangent, and in compiled steps, which launch less and whose kernels are larger,
multiplications of it with a square matrix: with more of them the GPU is the slower one, and copies cost memory."""
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

    def __init__(self, run: Pass, static: Any, given: Tensors, pool: "Pool") -> None:
        def on_places() -> tuple[list[Any], tuple[Tensors, Any]]:
            places = [empty(t) for t in given]
            return places, run(static, places)

        (places, (results, self.extra)), self.replay = pool.record(on_places)
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
    sources: dict[int, list[int]] = {}
    for number, tensor in enumerate(given):
        if tensor is not None:
            sources.setdefault(storage(tensor), []).append(number)
    found = {}
    for number, tensor in enumerate(results):
        for source in () if tensor is None else sources.get(storage(tensor), ()):
            if same_values(tensor, given[source]):
                found[number] = source, tensor.shape
    return found


def storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def same_values(a: Tensor, b: Tensor) -> bool:
    """Of two tensors in one storage, whether they are the same values in the same order."""
    if a.dtype != b.dtype or a.storage_offset() != b.storage_offset() or a.numel() != b.numel():
        return False
    return (a.is_contiguous() and b.is_contiguous()) or a.stride() == b.stride()


def with_passed(found: list[Any], same: dict[int, tuple[int, torch.Size]], given: Tensors) -> list[Any]:
    for number, (source, shape) in same.items():
        found[number] = given[source] if given[source].shape == shape else given[source].reshape(shape)
    return found


_GRAPHS: OrderedDict[Hashable, Graph | int] = OrderedDict()
"""For what they depend on; or the number of the step that had that first; or NEVER, if it can't be captured."""
NEVER = -1
_NEEDED: dict[Hashable, int] = {}
"""The most bytes that a pass has alive at once, for a device and a stream."""
_steps = [0]
"""The backward pass that ran last: it tells steps apart."""


def run_pass(run: Pass, static: Any, given: Tensors, device: torch.device) -> tuple[Tensors, Any]:
    """The pass, from its graph if there is one. In the first step that has it, it is seen what it needs. It is captured
    in the second, when it has run on copies as a graph has them, so that everything is loaded that it needs."""
    if not suits(given):
        return run(static, given)
    where = surroundings(device)
    key = (run, static, *[None if t is None else (t.dtype, t.shape) for t in given], *where)
    step = _steps[0] = max(torch._C._current_graph_task_id(), _steps[0])
    found = _GRAPHS.get(key)
    if isinstance(found, Graph):
        _GRAPHS.move_to_end(key)
        return found.run(given)
    if found is None:
        _GRAPHS[key] = step
        if len(_GRAPHS) > HELD:
            _GRAPHS.popitem(last=False)
        with Alive() as alive:
            result = run(static, given)
        needed = alive.peak + sum(t.nbytes for t in given if t is not None)
        _NEEDED[where[:2]] = max(needed, _NEEDED.get(where[:2], 0))
        return result
    if found not in (step, NEVER):
        _GRAPHS[key] = NEVER
        try:
            run(static, [None if t is None else t.clone() for t in given])
            _GRAPHS[key] = Graph(run, static, given, pool_for(device, _NEEDED[where[:2]]))
        except RuntimeError as error:  # of memory too: there was enough for the step before
            reason = str(error).strip().split("\n")[0]
            warnings.warn(f"a block's pass is not captured in a CUDA graph, and takes longer: {reason}", stacklevel=2)
    return run(static, given)


def seen() -> bool:
    """Whether a pass runs now to see what it needs."""
    return isinstance(_get_current_dispatch_mode(), Alive)


def suits(given: Tensors) -> bool:
    """Whether nobody else looks at every operator or captures them already, and all are plain tensors."""
    if _get_current_dispatch_mode() is not None or torch.cuda.is_current_stream_capturing():
        return False
    return all(t is None or type(t) in PLAIN for t in given)


def small(x: Tensor, part: float) -> bool:
    """Whether a pass over x is to be captured: it is no larger than that part of what is allowed."""
    if x.numel() > part * LARGEST:
        return False
    return not compiling() or (not captured_whole() and x.numel() * x.shape[-1] <= part * MOST_COMPILED)


def surroundings(device: torch.device) -> tuple[Hashable, ...]:
    """What else decides about the kernels that run, and where."""
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    cudnn = torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark
    precision = torch.get_float32_matmul_precision(), torch.is_autocast_enabled(device.type)
    return device, stream, torch.are_deterministic_algorithms_enabled(), *cudnn, *precision


def room_for(alive: int) -> int:
    """Bytes in which so much can be alive at once, fragments and a library's workspace included."""
    return int(1.06 * alive) + 36 * 2**20


class Pool:
    """Where graphs of the current stream are captured, on another stream, and the memory that all of them use, in one
    piece of that size. It lives as long as one of them."""

    def __init__(self, device: torch.device, size: int = 0) -> None:
        self.device, self.size, self.is_new = device, size, True
        self.stream, self.handle = torch.cuda.Stream(device), torch.cuda.graph_pool_handle()

    def record(self, run: Callable[[], Result]) -> tuple[Result, Callable[[], None]]:
        """What it gives, and what runs it again. Memory that it frees, or that is freed of what it gives, is used by
        other graphs: they run one after the other."""
        stream, graph = torch.cuda.current_stream(self.device), torch.cuda.CUDAGraph()
        self.stream.wait_stream(stream)
        torch._C._cuda_clearCublasWorkspaces()  # those of one capture are not for another
        with torch.cuda.stream(self.stream):
            graph.capture_begin(pool=self.handle, capture_error_mode="thread_local")
            try:
                if self.is_new and self.size:
                    torch.empty(self.size, dtype=torch.uint8, device=self.device)
                self.is_new = False
                result = run()
            finally:
                graph.capture_end()
                torch._C._cuda_clearCublasWorkspaces()
        stream.wait_stream(self.stream)
        return result, Recorded(graph, self).replay


class Recorded(NamedTuple):
    graph: torch.cuda.CUDAGraph
    pool: Pool

    def replay(self) -> None:
        self.graph.replay()


_POOLS: WeakValueDictionary[Hashable, Pool] = WeakValueDictionary()


def pool_for(device: torch.device, alive: int) -> Pool:
    """That of the current stream in which so much can be alive. If it has to grow, its graphs are captured anew."""
    where = surroundings(device)[:2]
    pool = _POOLS.get(where)
    if pool is None or pool.size < room_for(alive):
        if pool is not None:
            del pool
            _GRAPHS.clear()
            torch.cuda.empty_cache()
        pool = _POOLS[where] = Pool(device, room_for(alive))
    return pool


def release() -> None:
    """Let passes be captured anew, and give their memory back."""
    _GRAPHS.clear()
    _NEEDED.clear()


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
