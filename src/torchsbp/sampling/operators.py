"""Masks in a compiled step: one operator draws them, into which the compiler does not look.

The compiler would make hundreds of small kernels of what a CUDA graph draws in one launch. The operator's argument
``name`` writes out all that its results depend on but tensors, batch size and rank: every process can read it, and
nothing has to be stored for it.
"""

from ast import literal_eval
from collections.abc import Hashable
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from ..errors import UsageError
from ..ops.compiling import captured_whole, constant_for_dynamo, one_call
from ..ops.graphs import Groups
from ..ops.window_attention import Cut
from ..ops.windows import Windows
from . import drawing
from .area import Images
from .captures import Captures
from .drawing import Given, Kept, Plan, Sampled
from .windows import Grid, Partition

OWN = 5
"""So many tensors of a site, the first ones, are drawn; the others follow from its windows and its ratio."""
torch.library.define("torchsbp::draw", "(str name, Tensor step, Tensor? sizes, SymInt batch) -> Tensor[]")


def drawn(plan: Plan, given: Given) -> tuple[Kept, ...]:
    """Return ``plan.draw(given)``, in a compiled step."""
    batch, step, images = given
    sites = tuple([(s.stage, s.heads, s.ratio, numbers_in(s.partition)) for s in plan.sites])
    how = plan.sampler, plan.seed, plan.per_sample, plan.per_block, plan.prefix, plan.grids, sites
    name = named(*how, None if images is None else images.padded)
    refusal = refused(name, step.device)
    if refusal:  # as in eager mode; inside of the call the compiler would raise an error of its own
        raise UsageError(refusal)
    tensors = [*call(name, step, None if images is None else images.sizes, batch), None]
    found = []
    for site, numbers in zip(plan.sites, numbers_of(name, step.device), strict=True):
        found.append(kept_of(site.partition, [tensors[number] for number in numbers]))
    return tuple(found)


def numbers_in(partition: Partition | None) -> tuple[Any, ...] | None:
    """Return a partition as numbers, which a compiler takes for constants."""
    if partition is None:
        return None
    return partition.grid, partition.window, partition.shift, partition.pads_first, partition.strided


def kept_of(partition: Partition | None, tensors: list[Any]) -> Kept:
    """Return what a site keeps, from its tensors in the order of ``tensors_of``."""
    rows, inverse, heads, marks, *others = tensors
    if partition is None or not others:
        return Kept(rows, inverse, heads, None, marks)
    slots, slot_of_row, filled, regions, places, number = others
    cut = Cut(places, regions, slots, number)
    windows = Windows(partition.grid, partition.window, slot_of_row, slots, filled, regions, cut)
    return Kept(rows, inverse, heads, windows)


def tensors_of(kept: Kept) -> list[Tensor | None]:
    rows, inverse, heads, windows, marks = kept
    if windows is None:
        return [rows, inverse, heads, marks]
    _, _, slot_of_row, slots, filled, regions, cut = windows
    return [rows, inverse, heads, marks, slots, slot_of_row, filled, regions, cut.places, cut.kept]


@constant_for_dynamo
def named(*constants: Any) -> str:
    return repr(constants)


@lru_cache(256)
def plan_of(name: str) -> tuple[Plan, Grid | None]:
    """Return the plan that the name writes out, and the size to which images are padded."""
    sampler, seed, per_sample, per_block, prefix, grids, sites, padded = literal_eval(name)
    found = []
    for stage, heads, ratio, cut in sites:
        found.append(Sampled(stage, heads, ratio, None if cut is None else Partition(*cut)))
    return Plan(sampler, seed, per_sample, per_block, prefix, grids, tuple(found)), padded


class Kind(NamedTuple):
    """A tensor's dtype, and for each dimension its size without samples and what every sample adds to it."""

    dtype: torch.dtype
    sizes: tuple[tuple[int, int], ...]

    def shape(self, batch: int) -> list[int]:
        return [fixed + batch * each if each else fixed for fixed, each in self.sizes]


class Layout(NamedTuple):
    """``numbers``: which of the operator's tensors every site has (-1: none). ``firsts``: the place of each of these
    tensors in the list of all sites' tensors, the first if it is there several times. ``kinds``: what each is."""

    numbers: tuple[tuple[int, ...], ...]
    firsts: list[int]
    kinds: list[Kind]


@lru_cache(256)
def layout(name: str, device: torch.device) -> Layout:
    """Find the layout, by drawing two batches without data: sizes that differ between them grow with the batch."""
    two, three = (without_data(name, device, batch) for batch in (2, 3))
    keys = [keys_of(site, kept) for site, kept in zip(plan_of(name)[0].sites, two, strict=True)]
    flat = [key for of_site in keys for key in of_site]
    once = [key for key in dict.fromkeys(flat) if key is not None]
    number = {None: -1} | {key: number for number, key in enumerate(once)}
    firsts = [flat.index(key) for key in once]
    pairs = list(zip(flattened(two), flattened(three), strict=True))
    numbers = tuple(tuple(number[key] for key in of_site) for of_site in keys)
    return Layout(numbers, firsts, [kind(*pairs[first]) for first in firsts])


def keys_of(site: Sampled, kept: Kept) -> list[Hashable]:
    """Return a key for every tensor of a site, equal for tensors that several sites share; None for no tensor."""
    found = enumerate(tensors_of(kept))
    return [None if t is None else id(t) if i < OWN else (i, site.ratio, site.partition) for i, t in found]


def kind(two: Any, three: Any) -> Kind:
    """Return the kind of a tensor, from what it is for 2 and for 3 samples."""
    return Kind(two.dtype, tuple((3 * a - 2 * b, b - a) for a, b in zip(two.shape, three.shape, strict=True)))


def without_data(name: str, device: torch.device, batch: int) -> tuple[Kept, ...]:
    from torch._subclasses.fake_tensor import FakeTensorMode

    plan, padded = plan_of(name)
    with _disable_current_modes(), FakeTensorMode():
        sizes = None if padded is None else torch.ones(batch, 2, dtype=torch.int64, device=device)
        return plan.draw(given_for(torch.zeros((), dtype=torch.int64, device=device), sizes, batch, padded))


def given_for(step: Tensor, sizes: Tensor | None, batch: int, padded: Grid | None) -> Given:
    return Given(batch, step, None if sizes is None or padded is None else Images(sizes, padded))


def flattened(sites: tuple[Kept, ...]) -> list[Any]:
    return [tensor for kept in sites for tensor in tensors_of(kept)]


def distinct(name: str, step: Tensor, sizes: Tensor | None, batch: int) -> list[Tensor]:
    """Draw, and return every tensor once."""
    plan, padded = plan_of(name)
    found = flattened(plan.draw(given_for(step, sizes, batch, padded)))
    return [found[first] for first in layout(name, step.device).firsts]


def copied(tensors: list[Tensor]) -> list[Tensor]:
    found = [torch.empty_like(t, memory_format=torch.contiguous_format) for t in tensors]
    Groups(tensors).copy(found, tensors)
    return found


class Lent(NamedTuple):
    """What a graph draws. Callers get copies, since compilers expect results of an operator in memory of their own.
    ``constants`` are kept alive."""

    tensors: list[Tensor]
    constants: list[Any]

    def copy(self) -> list[Tensor]:
        return copied(self.tensors)


def lent(tensors: list[Tensor], constants: list[Any], device: torch.device) -> Lent:
    return Lent(tensors, constants)


CAPTURES = Captures(lent)
"""The graphs for the step counters of all models; those of deleted models are deleted when another one draws."""


def release() -> None:
    """Delete all graphs, which gives their memory back; masks are then captured anew."""
    CAPTURES.graphs.clear()


@torch.library.impl("torchsbp::draw", "default")
def _draw(name: str, step: Tensor, sizes: Tensor | None, batch: int) -> list[Tensor]:
    def draw(sizes: Tensor | None) -> list[Tensor]:
        return copied(distinct(name, step, sizes, batch))

    return CAPTURES.drawn(draw, sizes, step, (name, batch, drawing.rank()))


@torch.library.register_fake("torchsbp::draw")
def _kinds(name: str, step: Tensor, sizes: Tensor | None, batch: int) -> list[Tensor]:
    return [step.new_empty(kind.shape(batch), dtype=kind.dtype) for kind in layout(name, step.device).kinds]


@one_call
def call(name: str, step: Tensor, sizes: Tensor | None, batch: int) -> list[Tensor]:
    """Call the operator. A step that is captured as a whole needs no graph inside, so it draws without the operator."""
    return (distinct if captured_whole() else torch.ops.torchsbp.draw)(name, step, sizes, batch)


@constant_for_dynamo
def refused(name: str, device: torch.device) -> str:
    """Return why this can't be drawn, "" if it can."""
    try:
        layout(name, device)
    except UsageError as error:
        return str(error)
    return ""


@constant_for_dynamo
def numbers_of(name: str, device: torch.device) -> tuple[tuple[int, ...], ...]:
    return layout(name, device).numbers
