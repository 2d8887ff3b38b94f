"""check: does a patched model compute what its definition says? For adapters, ours and yours."""

import copy
import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from ..adapters.names import find
from ..config import SBPConfig
from ..errors import UsageError, shown
from ..ops.device import device_of
from ..ops.layers import BackwardOptions
from ..ops.rows import RowWeight
from ..sampling.masks import Masks
from .apply import patched_entries, remove, trained_entries

ROUNDING, TOLERANCE = 1e-12, 1e-9  # the largest errors of outputs and of gradients that pass
Step = tuple[list[Tensor], dict[str, Tensor]]
Gates = dict[str, "CallGates"]
GateLike = Callable[..., Tensor]
"""(output, residual path or None, weighted or not) -> the output, whose gradient comes from kept positions."""


@dataclass(frozen=True)
class Check:
    """The largest relative errors of a patched model: of its outputs, and of its gradients (at parameter ``worst``).

    A gradient's error is relative to its norm plus 1e-4 of the largest gradient's norm. ``passed``: both are rounding.
    """

    forward: float
    gradient: float
    worst: str

    @property
    def passed(self) -> bool:
        return self.forward <= ROUNDING and self.gradient <= TOLERANCE


def check(model: nn.Module, *inputs: Any) -> Check:
    """Compare a training step of a patched model with the definition of SBP, to test an adapter.

        assert torchsbp.check(model, images).passed

    The model is called as ``model(*inputs)``. It must be in training mode, with attention="query" and scale "none" or
    "rows". The step runs on copies in float64, and the model is not changed. The definition is an unpatched twin with
    gates: the gradient at the output of a sampled block goes through the block where positions are kept, and past it,
    along the residual path, where they are dropped. With scale="rows" what the block adds to the residual path is
    weighted where it is kept.
    """
    for entry, module in patched_entries(model):
        entry.check(module)
        config = entry.config
        if config.attention != "query" or config.scale == "weight":
            raise UsageError(
                f"check compares attention='query' with scale='none' or 'rows', found attention={config.attention!r} "
                f"with scale={config.scale!r}; call torchsbp.remove(model), then apply with the former"
            )
    inputs = tree_map(lambda t: t.double() if isinstance(t, Tensor) and t.is_floating_point() else t, inputs)
    twin = remove(copy.deepcopy(model).double())
    patched = copy.deepcopy(model).double()
    gates = record_gates(patched)
    try:
        outputs, gradients = training_step(patched, inputs)
    except Exception:
        refuse_inputs(twin, inputs)
        raise
    trained_entries(patched)  # an error if nothing has been sampled
    install_gates(twin, patched, gates)
    expected_outputs, expected = training_step(twin, inputs)
    pairs = zip(outputs, expected_outputs, strict=True)
    forward = torch.stack([ratio((ours - theirs).abs().max(), theirs.abs().max()) for ours, theirs in pairs])
    errors = gradient_errors(gradients, expected)
    gradient, worst = torch.stack(list(errors.values())).max(0)  # a NaN counts as the largest
    return Check(float(forward.max()), float(gradient), list(errors)[int(worst)])


def refuse_inputs(model: nn.Module, inputs: Any) -> None:
    """Raise UsageError if the unpatched model does not run on these inputs either."""
    try:
        with torch.no_grad():
            model(*inputs)
    except Exception as error:
        found = [tuple(t.shape) if isinstance(t, Tensor) else shown(t) for t in tree_leaves(inputs)]
        raise UsageError(
            f"the model does not run on inputs={found}: {error}. Call check(model, *inputs) with what model(*inputs) "
            "takes"
        ) from error


def training_step(model: nn.Module, inputs: Any) -> Step:
    """Return outputs and gradients of a step. Random numbers, and cotangents of equal outputs, are always the same."""
    model.zero_grad()
    with torch.random.fork_rng():
        torch.manual_seed(0)
        outputs = [t for t in tree_leaves(model(*inputs)) if isinstance(t, Tensor) and t.requires_grad]
    found = [y.detach() for y in outputs]
    slopes = [torch.linspace(-1, 1, y.numel(), dtype=y.dtype, device=y.device).view_as(y) for y in found]
    torch.autograd.backward(outputs, [y + slope for y, slope in zip(found, slopes, strict=True)])
    return found, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def gradient_errors(found: dict[str, Tensor], expected: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the error of each parameter's gradient; a gradient that only one side has is compared with zeros."""
    floor = 1e-4 * max(g.norm() for g in expected.values())
    errors = {}
    for name, g in (found | expected).items():
        ours, theirs = (gradients.get(name, torch.zeros_like(g)) for gradients in (found, expected))
        errors[name] = ratio((ours - theirs).norm(), theirs.norm() + floor)
    return errors


def ratio(error: Tensor, size: Tensor) -> Tensor:
    """Return error / size, 0 where both are 0."""
    return error.double() / size.double().clamp(min=torch.finfo(torch.float64).tiny)


def record_gates(patched: nn.Module) -> Gates:
    """Return gates that are filled while the patched model runs: with what each sampled module keeps in each call."""
    gates: Gates = {}
    names = names_in(patched)
    for entry, module in patched_entries(patched):
        entry.masks.drawn = None
        for index, sampled in enumerate(entry.sampled):
            if sampled.module in names:
                its = gates[names[sampled.module]] = CallGates()
                record = partial(its.record, entry.masks, index, entry.step(module).device)
                last_of(sampled.module).register_forward_pre_hook(record)
    return gates


def names_in(model: nn.Module) -> dict[nn.Module, str]:
    """Return the current names of modules: since it was patched, a model may have been wrapped, or blocks removed."""
    return {module: name for name, module in model.named_modules()}


def install_gates(twin: nn.Module, patched: nn.Module, gates: Gates | None = None) -> None:
    """Gate the sampled modules of the unpatched model at the positions that the patched one has kept: as ``gates``
    recorded them call by call, or (None) as in its last call."""
    names = names_in(patched)
    for entry, module in patched_entries(patched):
        for index, sampled in enumerate(entry.sampled):
            if sampled.module not in names:
                continue
            name = names[sampled.module]
            block = twin.get_submodule(name)
            if gates is not None:
                last_of(block).register_forward_pre_hook(gates[name].begin)
            gate = gates[name] if gates is not None else Gate.of(entry.masks, index, entry.step(module).device)
            install_gate(block, gate, sampled.description, entry.config)


def last_of(block: nn.Module) -> nn.Module:
    """Return the module whose call ends the block: of a list, which has no forward of its own, the last member."""
    return block[-1] if isinstance(block, nn.ModuleList) else block


def install_gate(block: nn.Module, gate: GateLike, description: Any, config: SBPConfig) -> None:
    """Gate a block's output, by hooks. The residual path begins at the block's input; if that has another size than the
    output, there is none.

    A description may name modules: ``shortcut``, at whose output the residual path begins instead; ``last``, a norm
    behind the block's sum, so that the gate stands before it; ``response``, a norm over positions, whose statistic gets
    gradients from kept rows only.
    """
    shortcut, last, response = (
        find(block, getattr(description, name, "")) for name in ("shortcut", "last", "response")
    )
    path: list[Tensor] = []

    def begin(module: nn.Module, args: Any, kwargs: Any) -> None:
        path[:] = [args[0] if args else kwargs[next(iter(signature(module.forward).parameters))]]

    def follow(module: nn.Module, args: Any, y: Tensor) -> None:
        path[:] = [y]

    def gated(y: Any) -> Any:
        if isinstance(y, tuple):
            return gated(y[0]), *y[1:]
        (past,) = path
        goes_past = config.scope == "branch" and past.numel() == y.numel()
        return gate(y, past.reshape(y.shape) if goes_past else None, config.scale == "rows")

    end = last_of(block)
    end.register_forward_pre_hook(begin, with_kwargs=True)
    if shortcut is not None:
        shortcut.register_forward_hook(follow)
    if response is not None:
        response.register_forward_pre_hook(lambda module, args: gate(args[0]))
    if last is not None:
        last.register_forward_pre_hook(lambda module, args: gated(args[0]))
    else:
        end.register_forward_hook(lambda module, args, y: gated(y), prepend=True)  # other hooks see it gated


class CallGates:
    """The gates of a module, one for each of its calls; None for one that samples nothing (eval, no gradients)."""

    def __init__(self) -> None:
        self.calls: deque[Gate | None] = deque()
        self.now: Gate | None = None

    def record(self, masks: Masks, site: int, device: torch.device, module: nn.Module, args: Any) -> None:
        trains = module.training and torch.is_grad_enabled()
        self.calls.append(Gate.of(masks, site, device) if trains else None)

    def begin(self, module: nn.Module, args: Any) -> None:
        self.now = self.calls.popleft()

    def __call__(self, y: Tensor, past: Tensor | None = None, weighted: bool = False) -> Tensor:
        return y if self.now is None else self.now(y, past, weighted)


@dataclass(frozen=True)
class Gate:
    """A gate at kept ``positions [B, k]``: indices of the ``prefix`` tokens and, behind them, the flattened grid."""

    positions: Tensor
    grid: tuple[int, ...]
    prefix: int

    @classmethod
    def of(cls, masks: Masks, site: int, device: torch.device) -> "Gate":
        """Return the gate for what a site keeps in the call that runs now."""
        drawn = masks.of_this_call()
        grid, marks = drawn.grids[masks.sites[site].stage], drawn.sites[site].marks
        if marks is not None:
            return ChoosingGate(marks, grid, masks.prefix)
        return cls(masks.positions_kept(drawn, site, device), grid, masks.prefix)

    def __call__(self, y: Tensor, past: Tensor | None = None, weighted: bool = False) -> Tensor:
        """Return y. At dropped positions its gradient goes to ``past``, or nowhere if that is None. ``weighted``: at
        kept ones y gets it times ``counts``, and ``past`` the rest: if y contains ``past``, that has it once in all."""
        dropped = y.detach() if past is None else y.detach() + (past - past.detach())
        kept = dropped + self.counts(y) * (y - dropped) if weighted else y
        return torch.where(self.mask(y), kept, dropped)

    def mask(self, y: Tensor) -> Tensor:
        """Return True where y is kept."""
        kept = torch.zeros(y.shape[0], self.n, dtype=torch.bool, device=y.device)
        return self.map(kept.scatter(1, self.positions, True), y)

    def counts(self, y: Tensor) -> Tensor:
        """Return how often a position of y counts if kept: one over its probability, which is 1 for prefix tokens."""
        share = (self.positions.shape[1] - self.prefix) / (self.n - self.prefix)
        counts = torch.full((y.shape[0], self.n), 1 / share, dtype=y.dtype, device=y.device)
        return self.map(counts.index_fill(1, torch.arange(self.prefix, device=y.device), 1), y)

    @property
    def n(self) -> int:
        return self.prefix + math.prod(self.grid)

    def map(self, flat: Tensor, y: Tensor) -> Tensor:
        """Return values ``[B, N]`` in the layout of y, ``[B, N, C]``, ``[B, *grid, C]`` or ``[B, C, *grid]``."""
        return flat.view(-1, *self.layout(y))

    def layout(self, y: Tensor) -> tuple[int, ...]:
        """Return the shape of one channel of one sample of y."""
        n = self.n
        shapes = [
            shape
            for shape in ((n, 1), (*self.grid, 1), (1, *self.grid))
            if len(shape) == y.dim() - 1 and all(a in (1, b) for a, b in zip(shape, y.shape[1:], strict=True))
        ]
        if len(shapes) != 1:
            why = "as channels first and last" if shapes else "as neither tokens nor a feature map"
            raise UsageError(
                f"a block's output of shape {tuple(y.shape)} fits the grid {self.grid} {why}; "
                "check with images of another size, whose height and width differ"
            )
        return shapes[0]


@dataclass(frozen=True)
class ChoosingGate(Gate):
    """A gate whose positions are chosen in backward; ``positions`` holds their marks instead."""

    def __call__(self, y: Tensor, past: Tensor | None = None, weighted: bool = False) -> Tensor:
        return _Choose.apply(y, past, self)

    def counts(self, dy: Tensor) -> Tensor:
        """Return how often each position counts, 0 where it is dropped."""
        rows = dy.movedim(1, -1) if self.layout(dy)[-1] != 1 else dy
        options = BackwardOptions(row_weight=RowWeight(1.0, self.prefix))
        kept, _, counts = device_of(dy).choose(rows.reshape(-1, rows.shape[-1]), self.positions, options)
        return self.map(dy.new_zeros(dy.shape[0] * self.n).index_put((kept,), counts).view(-1, self.n), dy)


class _Choose(torch.autograd.Function):
    """Return y. In backward, y gets the cotangent times ``counts``, and ``past`` the rest of it."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, past: Tensor | None, gate: ChoosingGate) -> Tensor:
        ctx.gate, ctx.has_past = gate, past is not None
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor | None, None]:
        counts = ctx.gate.counts(dy)
        return counts * dy, (1 - counts) * dy if ctx.has_past else None, None
