"""Algorithm 1 for any position-wise function: a forward with gradients at kept positions, without them at the rest."""

from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ..errors import UsageError, UsageTypeError, expect, shown

Function = Callable[[Tensor], Tensor]
_LOOKED: set[tuple[object, ...]] = set()
_KNOWN: WeakKeyDictionary[Function, set[torch.Size]] = WeakKeyDictionary()


def sbp(fn: Function, x: Tensor, keep: Tensor, dim: int = 1, *, recompute: bool = False, check: bool = False) -> Tensor:
    """Apply a function that treats positions along ``dim`` independently, with gradients at kept positions only.

    The result is ``gate(fn(x))``, Algorithm 1 of the image paper.

    ``keep`` holds the kept positions, ``[k]``, each once. Every position runs once, in one of two calls of fn, as in
    the paper: the kept ones with gradients, the rest without. ``recompute=True`` saves only the kept part of x.

    Positions that are repeated or out of range are refused. On a GPU, where this waits for their values, they are
    looked at in the first call with these sizes only, or in every call with ``check=True``.
    """
    dim = check_arguments(fn, x, keep, dim)
    if check or looks(keep, (x.shape[dim], keep.shape[0], keep.device), _LOOKED):
        check_positions(keep, x.shape[dim])
    if not torch.is_grad_enabled():
        return with_positions(fn(x), x, dim, x.shape[dim])
    refuse_batch_norm(fn, "positions")
    drop = complement(keep, x.shape[dim])
    kept_x = x.index_select(dim, keep)
    kept = checkpoint(fn, kept_x, use_reentrant=False) if recompute else fn(kept_x)
    kept = with_positions(kept, kept_x, dim, keep.shape[0])
    with torch.no_grad():
        dropped_x = x.index_select(dim, drop)
        dropped = with_positions(fn(dropped_x), dropped_x, dim, drop.shape[0])
        if kept.dim() < x.dim() and keep.shape[0] == drop.shape[0] > 1:  # a dimension of that size may be another one
            check_with_one(fn, dropped_x.narrow(dim, 0, 1), dim)
    return merge(kept, keep, dropped, drop, dim)


def check_arguments(fn: object, x: object, keep: Any, dim: object) -> int:
    """Return ``dim`` counted from the front; raise an error if an argument is not what it must be."""
    if not callable(fn):
        raise UsageTypeError(f"fn={shown(fn)} can't be called; allowed: a function or module of a tensor")
    expect("x", x, Tensor, "a tensor with positions along a dimension")
    assert isinstance(x, Tensor)
    expect("dim", dim, int, "the dimension of x that holds positions, an int")
    assert isinstance(dim, int)
    if not -x.dim() <= dim < x.dim():
        raise UsageError(f"dim={dim} is not a dimension of x, which has the shape {tuple(x.shape)}")
    n = x.shape[dim]
    if not isinstance(keep, Tensor):
        is_share = isinstance(keep, float) and 0 < keep <= 1
        some = f"torch.randperm({n})[:{max(1, round(keep * n))}]" if is_share else f"torch.tensor([0, {n - 1}])"
        expect("keep", keep, Tensor, f"a tensor of the positions to keep, such as {some}")
    assert isinstance(keep, Tensor)
    if keep.dim() != 1 or keep.dtype not in (torch.int32, torch.int64):
        raise UsageError(
            f"keep must be a vector of position indices (int64); got {keep.dtype} with shape {tuple(keep.shape)}. "
            "From a boolean mask, use mask.nonzero().flatten()."
        )
    if keep.device != x.device:
        raise UsageError(f"keep is on {keep.device}, x on {x.device}; use keep.to(x.device)")
    if keep.shape[0] > n:
        raise UsageError(f"keep has {keep.shape[0]} positions, x has {n} along dim {dim}; each may be kept once")
    return dim % x.dim()


def looks(values: Tensor, key: tuple[object, ...], looked: set[tuple[object, ...]]) -> bool:
    """Whether to look at values: on the CPU always, on a device, which has to be waited for, once per key."""
    if torch.compiler.is_compiling() or type(values) is not Tensor or values.is_meta:
        return False
    if values.is_cpu:
        return True
    if key in looked or (values.is_cuda and torch.cuda.is_current_stream_capturing()):
        return False
    looked.add(key)
    return True


def check_positions(keep: Tensor, n: int) -> None:
    """Raise an error if a position is repeated or not in ``range(n)``."""
    found, counts = keep.unique(return_counts=True)
    beyond = found[(found < 0) | (found >= n)].tolist()
    if beyond:
        raise UsageError(f"keep has positions out of range ({shown(beyond)}); allowed: 0 … {n - 1}")
    repeated = found[counts > 1].tolist()
    if repeated:
        raise UsageError(f"keep repeats positions ({shown(repeated)}), each may be kept once; use keep.unique()")


def with_positions(y: Tensor, x: Tensor, dim: int, n: int) -> Tensor:
    """Return y, or raise an error if it does not have n positions along ``dim``."""
    expect("fn(x)", y, Tensor, "a tensor")
    if y.dim() <= dim or y.shape[dim] != n:
        raise UsageError(
            f"fn must treat positions one by one and keep them in dim {dim}: of an input of shape {tuple(x.shape)} it "
            f"made {tuple(y.shape)}, not {n} positions in dim {dim}"
        )
    return y


def check_with_one(fn: Function, x: Tensor, dim: int) -> None:
    """Raise an error if fn does not turn one position into one; checked once per function and shape."""
    if torch.compiler.is_compiling() or (x.is_cuda and torch.cuda.is_current_stream_capturing()):
        return
    try:
        known = _KNOWN.setdefault(fn, set())
    except TypeError:  # it can't be remembered
        known = set()
    if x.shape not in known:
        with torch.random.fork_rng([x.device] if x.is_cuda else []):  # random numbers stay those of the training run
            with_positions(fn(x), x, dim, 1)
        known.add(x.shape)


def refuse_batch_norm(fn: object, parts: str) -> None:
    """Raise an error for batch norms in training mode: kept and dropped parts differ in their statistics, so the split
    would change the forward pass."""
    if not isinstance(fn, nn.Module):
        return
    kind = nn.modules.batchnorm._BatchNorm
    norms = [name for name, module in fn.named_modules() if isinstance(module, kind) and module.training]
    if norms:
        ends = [name if end.isdecimal() else end for name in norms for end in [name.rpartition(".")[2]]]
        patterns = ", ".join(f'"*.{end}"' for end in dict.fromkeys(ends))
        command = f" (torchsbp train: --freeze '[{patterns}]')" if norms[0] else ""
        raise UsageError(
            f"{norms[0] or type(fn).__name__} is a batch norm in training mode: its statistics would differ between "
            f"kept and dropped {parts}. Freeze it with .eval(){command}, or replace it by a norm that does not look "
            f"across {parts}."
        )


def complement(keep: Tensor, n: int) -> Tensor:
    """Return the positions of ``range(n)`` that are not in ``keep``, ascending; the shape does not depend on values."""
    taken = torch.zeros(n, dtype=torch.int8, device=keep.device).index_fill(0, keep.long(), 1)
    return taken.argsort(stable=True)[: n - keep.shape[0]]


def merge(a: Tensor, index_a: Tensor, b: Tensor, index_b: Tensor, dim: int) -> Tensor:
    """Put both parts in their places along ``dim``."""
    order = torch.cat([index_a, index_b]).argsort()
    return torch.cat([a, b], dim).index_select(dim, order)
