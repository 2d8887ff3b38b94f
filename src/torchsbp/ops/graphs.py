"""CUDA graphs of small passes, whose kernels a GPU runs faster than Python can launch them.

A pass over few rows is some thirty small kernels. When a later step runs it on tensors of the same shapes, it is
captured in a CUDA graph, which is replayed from then on, for all blocks of that kind. A graph reads and writes the same
memory every time: the inputs of a pass, parameters too, are copied to that memory, and its results from it.
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
"""The largest passes that are captured. By elements of an op's input or cotangent; in compiled steps, whose kernels are
fewer and larger, also by multiplications in its product with a square matrix. Beyond these limits the GPU is slower
than Python, and copies cost memory."""
HELD = 128
"""How many passes are remembered: forward and backward of kinds of blocks, for some image sizes."""
PLAIN = (Tensor, torch.nn.Parameter)
Tensors = Sequence[Any]
"""Each a tensor or None."""
Pass = Callable[[Any, Tensors], tuple[Tensors, Any]]
"""``run(static, tensors) -> (results, extra)``. ``static`` is hashable and has no tensors; nor has ``extra``, which
depends on it and on the kinds of the tensors alone."""
Result = TypeVar("Result")


class Groups:
    """Tensors by dtype: those of one dtype are copied at once."""

    def __init__(self, tensors: Tensors) -> None:
        self.numbers: dict[torch.dtype, list[int]] = {}
        for number, tensor in enumerate(tensors):
            if tensor is not None:
                self.numbers.setdefault(tensor.dtype, []).append(number)

    def copy(self, targets: Tensors, sources: Tensors) -> None:
        for numbers in self.numbers.values():
            torch._foreach_copy_([targets[i] for i in numbers], [sources[i] for i in numbers])


class Graph:
    """A captured pass: reads its inputs in ``places``, leaves in ``results`` those that are not inputs passed through.

    While it does not run, other graphs may use the memory of both: graphs run one after the other, and the results of
    one are copied before the next runs.
    """

    def __init__(self, run: Pass, static: Any, given: Tensors, pool: "Pool") -> None:
        def on_places() -> tuple[list[Any], tuple[Tensors, Any]]:
            places = [empty(t) for t in given]
            return places, run(static, places)

        (places, (results, self.extra)), self.replay = pool.record(on_places)
        self.passed = passed(results, places)
        made = [None if number in self.passed else t for number, t in enumerate(results)]
        self.given, self.made = Groups(places), Groups(made)
        self.places, self.results = [unowned(t) for t in places], [unowned(t) for t in made]

    def run(self, given: Tensors) -> tuple[list[Any], Any]:
        self.given.copy(self.places, given)
        self.replay()
        found = [empty(t) for t in self.results]
        self.made.copy(found, self.results)
        return with_passed(found, self.passed, given), self.extra


def passed(results: Tensors, given: Tensors) -> dict[int, tuple[int, torch.Size]]:
    """Results that are inputs passed through, maybe in another shape: number -> (number of the input, shape)."""
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
    """Whether two tensors in one storage are the same values in the same order."""
    if a.dtype != b.dtype or a.storage_offset() != b.storage_offset() or a.numel() != b.numel():
        return False
    return (a.is_contiguous() and b.is_contiguous()) or a.stride() == b.stride()


def with_passed(found: list[Any], same: dict[int, tuple[int, torch.Size]], given: Tensors) -> list[Any]:
    for number, (source, shape) in same.items():
        found[number] = given[source] if given[source].shape == shape else given[source].reshape(shape)
    return found


_GRAPHS: OrderedDict[Hashable, Graph | int] = OrderedDict()
"""By all that a pass depends on: its graph; or the step that first ran it; or NEVER, if it can't be captured."""
NEVER = -1
_NEEDED: dict[Hashable, int] = {}
"""(device, stream) -> the most bytes that any pass has alive at once there."""
_steps = [0]
"""Autograd's number of the last backward pass, by which steps are told apart."""


def run_pass(run: Pass, static: Any, given: Tensors, device: torch.device) -> tuple[Tensors, Any]:
    """Run the pass, by its graph if there is one.

    When it first runs, the memory that it needs is measured. The next step that has it captures it, after a run on
    copies such as a graph has: everything that it needs must be loaded before."""
    if not suits(given):
        return run(static, given)
    where = surroundings(device)
    key = (run, static, *[None if t is None else (t.dtype, t.shape) for t in given], *where)
    step = _steps[0] = max(torch._C._current_graph_task_id(), _steps[0])
    found = _GRAPHS.get(key)
    if isinstance(found, Graph):
        _GRAPHS[key] = _GRAPHS.pop(key, found)  # used last; another device's thread may have cleared them
        return found.run(given)
    if found is None:
        with Alive(*given) as alive:
            result = run(static, given)
        _GRAPHS[key] = step
        if len(_GRAPHS) > HELD:
            _GRAPHS.popitem(last=False)
        needed = alive.peak + sum(t.nbytes for t in given if t is not None)
        _NEEDED[where[:2]] = max(needed, _NEEDED.get(where[:2], 0))
        return result
    if found not in (step, NEVER):
        _GRAPHS[key] = NEVER
        try:
            run(static, [None if t is None else t.clone() for t in given])
            _GRAPHS[key] = Graph(run, static, given, pool_for(device, _NEEDED.get(where[:2], 0)))
        except RuntimeError as error:  # out of memory too: without a graph the step before had enough
            reason = str(error).strip().split("\n")[0]
            warnings.warn(f"a block's pass is not captured in a CUDA graph, and takes longer: {reason}", stacklevel=2)
    return run(static, given)


def measuring() -> bool:
    """Whether the memory that a pass needs is being measured now."""
    return isinstance(_get_current_dispatch_mode(), Alive)


def suits(given: Tensors) -> bool:
    """Whether a pass may be captured: there is no dispatch mode, no other capture, and all are plain tensors."""
    if _get_current_dispatch_mode() is not None or torch.cuda.is_current_stream_capturing():
        return False
    return all(t is None or type(t) in PLAIN for t in given)


def small(x: Tensor, share: float) -> bool:
    """Whether to capture a pass over x: x is within ``share`` of the limits, and Inductor captures no whole steps."""
    if x.numel() > share * LARGEST:
        return False
    return not compiling() or (not captured_whole() and x.numel() * x.shape[-1] <= share * MOST_COMPILED)


def surroundings(device: torch.device) -> tuple[Hashable, ...]:
    """What else decides which kernels run, and where: the device and stream come first, then settings."""
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    cudnn = torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark
    precision = torch.get_float32_matmul_precision(), torch.is_autocast_enabled(device.type)
    return device, stream, torch.are_deterministic_algorithms_enabled(), *cudnn, *precision


def room_for(alive: int) -> int:
    """The size of a pool, in bytes, for so many ``alive`` at once, with fragmentation and a library's workspace."""
    return int(1.06 * alive) + 36 * 2**20


class Pool:
    """The memory that all graphs of the current stream share, allocated as one piece of ``size`` bytes, and another
    stream, on which they are captured. A pool lives as long as one of its graphs."""

    def __init__(self, device: torch.device, size: int = 0) -> None:
        self.device, self.size, self.is_new = device, size, True
        self.stream, self.handle = torch.cuda.Stream(device), torch.cuda.graph_pool_handle()

    def record(self, run: Callable[[], Result]) -> tuple[Result, Callable[[], None]]:
        """Capture ``run``; return its result and a function that replays it. Memory that it frees, and that of its
        result once freed, is used by other graphs of the pool: they run one after the other."""
        stream, graph = torch.cuda.current_stream(self.device), torch.cuda.CUDAGraph()
        self.stream.wait_stream(stream)
        torch._C._cuda_clearCublasWorkspaces()  # made in one capture, they are not for another
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
    """The pool of the current stream, with room for so many bytes. If it has to grow, all graphs are captured anew."""
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
    """Forget all graphs: their memory is given back, and passes are captured anew."""
    _GRAPHS.clear()
    _NEEDED.clear()


def empty(tensor: Grad) -> Grad:
    return None if tensor is None else torch.empty_like(tensor)


class Bytes:
    """Memory that somebody else owns, as ``torch.as_tensor`` reads it."""

    def __init__(self, address: int, size: int) -> None:
        self.__cuda_array_interface__ = {"data": (address, False), "shape": (size,), "typestr": "|u1", "version": 3}


def unowned(tensor: Grad) -> Grad:
    """A tensor in the same memory that does not own it: the allocator may use it for something else."""
    if tensor is None or not tensor.is_cuda or not tensor.numel():
        return tensor
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    content = Bytes(tensor.data_ptr(), (last + 1) * tensor.element_size())
    return torch.as_tensor(content, device=tensor.device).view(tensor.dtype).as_strided(tensor.shape, tensor.stride())
