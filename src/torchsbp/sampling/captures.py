"""Drawing as one launch: what a GPU draws time and again is captured in a CUDA graph and replayed.

Masks are many small kernels, hundreds for a Swin: more of the CPU's time than of the GPU's. They are a
function of the step counter on the device, and of the images' sizes, which are copied to where a graph reads them. So a
replay draws those of the next step.
"""

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple, TypeVar
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import _get_current_dispatch_mode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from ..ops.constants import holding
from ..ops.graphs import Pool

Drawn = TypeVar("Drawn")
HELD = 32
"""graphs of one backbone, in compiled steps of all: image sizes, batches"""
ALIGNED = 16
"""bytes, as Triton's kernels like addresses"""


class Part(NamedTuple):
    """Where a tensor lies among the bytes of all."""

    begin: int
    end: int
    dtype: torch.dtype
    shape: torch.Size


class Packed(NamedTuple):
    """A tree whose tensors are bytes, one behind the other: ``parts`` says where, ``numbers`` which of them every leaf
    is, ``leaves`` has what is none. ``constants`` are held."""

    content: Tensor
    parts: list[Part]
    numbers: list[int | None]
    leaves: list[Any]
    spec: Any
    constants: list[Any]

    def copy(self) -> Any:
        """The tree, with tensors of its own: what is packed may change afterwards."""
        tensors = views(self.content.clone(), self.parts)
        pairs = zip(self.numbers, self.leaves, strict=True)
        return tree_unflatten([leaf if number is None else tensors[number] for number, leaf in pairs], self.spec)


def pack(tree: Any, constants: list[Any], device: torch.device) -> Packed:
    """Constants stay as they are. What is there twice is packed once."""
    leaves, spec = tree_flatten(tree)
    constant = {id(leaf) for leaf in tree_leaves(constants)}
    packed = {id(leaf): leaf for leaf in leaves if isinstance(leaf, Tensor) and id(leaf) not in constant}
    parts, end = [], 0
    for leaf in packed.values():
        begin, end = end, end + leaf.numel() * leaf.element_size()
        parts.append(Part(begin, end, leaf.dtype, leaf.shape))
        end = -(-end // ALIGNED) * ALIGNED
    content = torch.empty(end, dtype=torch.uint8, device=device)
    for place, leaf in zip(views(content, parts), packed.values(), strict=True):
        place.copy_(leaf)
    place_of = {key: number for number, key in enumerate(packed)}
    numbers = [place_of.get(id(leaf)) for leaf in leaves]
    rest = [leaf if number is None else None for leaf, number in zip(leaves, numbers, strict=True)]
    return Packed(content, parts, numbers, rest, spec, constants)


def views(content: Tensor, parts: list[Part]) -> list[Tensor]:
    return [content[part.begin : part.end].view(part.dtype).view(part.shape) for part in parts]


Pack = Callable[[Any, list[Any], torch.device], Any]
"""Of a tree, constants in it and a device: what has a ``copy``."""
Key = tuple[StorageWeakRef, int, torch.device, int, Hashable]
"""The step counter's memory, device and stream, and what else decides."""


class Captured(NamedTuple):
    """What draws again, what it draws, and where it reads the images' sizes."""

    replay: Callable[[], None]
    packed: Any
    sizes: Tensor | None

    def drawn(self, sizes: Tensor | None) -> Any:
        if self.sizes is not None and sizes is not None:
            self.sizes.copy_(sizes)
        self.replay()
        return self.packed.copy()


class Captures:
    """The graphs by what they depend on: the first time something is drawn as it stands, the second time captured. A
    copy of a model has its own. ``pack`` says how that is held which a graph draws, and copied."""

    def __init__(self, pack: Pack = pack) -> None:
        self.pack = pack
        self.graphs: OrderedDict[Key, Captured | None] = OrderedDict()
        self.pools: WeakValueDictionary[Hashable, Pool] = WeakValueDictionary()

    def __reduce__(self) -> Any:
        return Captures, (self.pack,)

    def drawn(
        self, draw: Callable[[Tensor | None], Drawn], sizes: Tensor | None, step: Tensor, depends: Hashable
    ) -> Drawn:
        """What ``draw`` gives for these sizes; it reads them, the step counter, and nothing else that changes."""
        if not step.is_cuda or _get_current_dispatch_mode() is not None or torch.cuda.is_current_stream_capturing():
            return draw(sizes)
        stream = torch.cuda.current_stream(step.device).cuda_stream
        key = (StorageWeakRef(step.untyped_storage()), step.data_ptr(), step.device, stream, depends)
        if key not in self.graphs:
            self.let_go()
            self.graphs[key] = None
            if len(self.graphs) > HELD:
                self.graphs.popitem(last=False)
            return draw(sizes)
        self.graphs.move_to_end(key)
        captured = self.graphs[key] = self.graphs[key] or self.capture(draw, sizes, step.device)
        return captured.drawn(sizes)

    def let_go(self) -> None:
        """Of graphs whose step counter is gone, with its model."""
        for key in [key for key in self.graphs if key[0].expired()]:
            del self.graphs[key]

    def capture(self, draw: Callable[[Tensor | None], Any], sizes: Tensor | None, device: torch.device) -> Captured:
        own = None if sizes is None else sizes.clone()
        stream = torch.cuda.current_stream(device).cuda_stream
        pool = self.pools.get((device, stream)) or Pool(device)
        self.pools[device, stream] = pool
        with holding() as constants:
            packed, replay = pool.record(lambda: self.pack(draw(own), constants, device))
        return Captured(replay, packed, own)
