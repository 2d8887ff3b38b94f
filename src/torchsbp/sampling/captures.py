"""Masks drawn in one launch: what a GPU draws again and again is captured in a CUDA graph and replayed.

Masks take many small kernels, hundreds for a Swin, which the CPU needs longer to launch than the GPU to run. They are a
function of the step counter, which is on the device, and of image sizes, which are copied to where a graph reads them.
So a replay draws the masks of the next step.
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
from ..ops.device import device_of
from ..ops.graphs import Pool

Drawn = TypeVar("Drawn")
HELD = 32
"""The most graphs that are held for one backbone, or for all in compiled steps: one per image size, batch size, …"""
ALIGNED = 16
"""Addresses are multiples of so many bytes: Triton has faster kernels for these."""


class Part(NamedTuple):
    """Where a tensor lies among the bytes of all packed tensors."""

    begin: int
    end: int
    dtype: torch.dtype
    shape: torch.Size


class Packed(NamedTuple):
    """A tree whose tensors lie one behind the other in ``content``: ``parts`` says where. ``numbers`` says which part a
    leaf of the tree is; if it is None, the leaf is in ``leaves``. ``constants`` are kept alive."""

    content: Tensor
    parts: list[Part]
    numbers: list[int | None]
    leaves: list[Any]
    spec: Any
    constants: list[Any]

    def copy(self) -> Any:
        """Return the tree with tensors of its own: the packed ones change in the next replay."""
        tensors = views(self.content.clone(), self.parts)
        pairs = zip(self.numbers, self.leaves, strict=True)
        return tree_unflatten([leaf if number is None else tensors[number] for number, leaf in pairs], self.spec)


def pack(tree: Any, constants: list[Any], device: torch.device) -> Packed:
    """Pack a tree. Constants stay as they are, and a tensor that occurs twice is packed once."""
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
"""(tree, constants in it, device) -> an object with a method ``copy``."""
Key = tuple[StorageWeakRef, int, torch.device, int, Hashable]
"""The step counter's storage and address, device, stream, and all else that masks depend on."""


class Captured(NamedTuple):
    """A graph: ``replay`` draws anew into ``packed``, and reads the sizes of images from ``sizes``."""

    replay: Callable[[], None]
    packed: Any
    sizes: Tensor | None

    def drawn(self, sizes: Tensor | None) -> Any:
        if self.sizes is not None and sizes is not None:
            self.sizes.copy_(sizes)
        self.replay()
        return self.packed.copy()


class Captures:
    """Graphs, by what they depend on. The first time, masks are drawn without one; the second time, this is captured.
    A copy of a model begins without graphs. ``pack`` says how the results of a graph are held and copied."""

    def __init__(self, pack: Pack = pack) -> None:
        self.pack = pack
        self.graphs: OrderedDict[Key, Captured | None] = OrderedDict()
        self.pools: WeakValueDictionary[Hashable, Pool] = WeakValueDictionary()

    def __reduce__(self) -> Any:
        return Captures, (self.pack,)

    def drawn(
        self, draw: Callable[[Tensor | None], Drawn], sizes: Tensor | None, step: Tensor, depends: Hashable
    ) -> Drawn:
        """Return ``draw(sizes)``, from a graph if possible: ``draw`` reads nothing that changes but sizes and step."""
        if not step.is_cuda or _get_current_dispatch_mode() is not None or torch.cuda.is_current_stream_capturing():
            return device_of(step).run_apart(lambda: draw(sizes))
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
        """Delete the graphs whose step counter is gone, with its model."""
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
