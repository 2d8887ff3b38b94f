"""estimate: the memory of a training step, predicted on fake tensors at full size."""

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from ..adapters.blocks import blocks_of
from ..config import SBPConfig, differing, one_of
from ..errors import UsageError, UsageTypeError, expect, shown
from ..ops.layers import wide
from ..patching.apply import apply, remove
from ..patching.site import patched_modules
from ..patching.survey import resolved_for
from . import simulated
from .checks import PRECISIONS, check_config, check_loss, checked_shape, precision_name
from .live import Live, no_workspace
from .saved import Saved, SavedByPart, by_block
from .sizes import mib

OPTIMIZERS = {"adamw": 2, "adam": 2, "momentum": 1, "sgd": 0}  # states per parameter
DEVICES = ("cuda", "cpu")

Config = SBPConfig | str | None
Model = nn.Module | Callable[[], nn.Module]
Loss = Callable[[Any], Tensor]


class RefusedError(UsageError):
    """The model does not run on the given input."""


@dataclass(frozen=True)
class Estimate:
    """The memory of one training step, in bytes.

    - ``saved``: what each block saves for backward. ``parts``: the same by parts of the block ("" is the block's own
      function). ``saved_elsewhere``: what other layers save.
    - ``saved_at_peak``, ``gradients_at_peak``, ``short_lived``: saved activations, gradients, and what else is alive at
      the peak, when some activations are freed already and some gradients don't exist yet.
    - ``graphs``: what the CUDA graphs of small passes hold. ``libraries``: workspace that cuBLAS holds.
    - ``covers``: the part of the model that was traced, "" for the whole model.
    """

    config: str
    input_shape: tuple[int, ...]
    precision: str
    device: str
    parameters: int
    gradients: int
    optimizer: int
    input: int
    graphs: int
    libraries: int
    saved: dict[str, int]
    parts: SavedByPart
    saved_elsewhere: int
    saved_at_peak: int
    gradients_at_peak: int
    short_lived: int
    peak: int
    peak_at: str
    covers: str = ""

    @property
    def saved_bytes(self) -> int:
        """Everything that is saved for backward."""
        return sum(self.saved.values()) + self.saved_elsewhere

    def to_dict(self) -> dict[str, Any]:
        """Return the fields for JSON."""
        return {**asdict(self), "saved_bytes": self.saved_bytes}

    def rows(self) -> list[tuple[str, int | None, int]]:
        """Return (what, total bytes, bytes at the peak); the latter add up to the peak. Short-lived has no total."""
        return [
            ("parameters", self.parameters, self.parameters),
            ("gradients", self.gradients, self.gradients_at_peak),
            ("optimizer state", self.optimizer, self.optimizer),
            ("input", self.input, self.input),
            ("saved activations", self.saved_bytes, self.saved_at_peak),
            ("short-lived", None, self.short_lived),
            ("CUDA graphs", self.graphs, self.graphs),
            ("libraries", self.libraries, self.libraries),
        ]

    def __str__(self) -> str:
        shape = "×".join(str(n) for n in self.input_shape)
        lines = [f"{self.config}, input {shape}, {self.precision}: predicted for {self.device}"]
        if self.covers:
            lines.append(f"activations of {self.covers} alone: the rest depends on data and is not covered")
        lines.append(f"{'':<20}{'':>12}   at the peak")
        for name, size, at_peak in self.rows():
            lines.append(f"{name:<20}{'' if size is None else mib(size):>12}  {mib(at_peak):>12}")
        lines.append(f"{'peak':<20}{'':>12}  {mib(self.peak):>12}   {self.peak_at}")
        return "\n".join([*lines, *saved_lines(self.saved, self.saved_elsewhere)])


def saved_lines(saved: dict[str, int], elsewhere: int) -> list[str]:
    """Return lines with the saved bytes of each block; neighbours that save the same share a line."""
    lines = ["saved by"]
    for size, group in groupby(saved.items(), key=lambda item: item[1]):
        names = [name for name, _ in group]
        title = names[0] if len(names) == 1 else f"{names[0]} … {names[-1]}"
        lines.append(f"  {title:<36}{f'{len(names)} × ' if len(names) > 1 else '':>6}{mib(size):>12}")
    lines.append(f"  {'other layers':<42}{mib(elsewhere):>12}")
    return lines


def estimate(
    model: Model,
    input_shape: Sequence[int],
    config: Config = None,
    precision: str = "bf16",
    optimizer: str = "adamw",
    *,
    device: str = "cuda",
    loss: Loss | None = None,
) -> Estimate:
    """Predict the memory of a training step (forward, backward and optimizer, in eager mode) without running it.

    - ``model``: a module, with real weights or on the meta device; or a function that builds one, which is called on
      the meta device. The module is not changed, and its weights are not copied.
    - ``input_shape``: batch first: ``[B, C, H, W]``, or whatever the model takes.
    - ``config``: None takes the model as it is, patched or not; "full" is plain training; "checkpoint" is activation
      checkpointing of every block; an ``SBPConfig`` is ``apply(model, config=config)``.
    - ``precision``: "bf16" ("bfloat16") or "fp16" ("float16") is autocast; "float32" ("fp32") is the precision of the
      model's own parameters.
    - ``optimizer``: "adamw", "adam", "momentum" or "sgd".
    - ``device``: "cuda" predicts for a GPU, whether or not there is one; "cpu" predicts for this machine's CPU.
    - ``loss``: a function of the model's output; None is cross-entropy for scores ``[B, classes]``, else a sum.

    A detector, whose later parts depend on data, is estimated up to its ``backbone``; the result's ``covers`` says so.
    """
    precision = precision_name(precision)
    one_of("optimizer", optimizer, OPTIMIZERS)
    one_of("device", device, DEVICES)
    check_config(config)
    shape = checked_shape(input_shape)
    if loss is not None and not callable(loss):
        raise UsageTypeError(f"loss={shown(loss)} can't be called; allowed: None, a function of the model's output")
    model = build(model)
    try:
        found = trace(model, shape, config, precision, device, loss)
    except RefusedError:
        if not isinstance(getattr(model, "backbone", None), nn.Module):
            raise
        found = trace(model, shape, config, precision, device, loss, "backbone")
    state = OPTIMIZERS[optimizer] * found.gradients
    return replace(found, optimizer=state, peak=found.peak + state)


def build(model: Model) -> nn.Module:
    """Return the model itself, or what the function builds on the meta device."""
    if isinstance(model, nn.Module):
        return model
    if not callable(model):
        raise UsageTypeError(
            f"model must be a torch.nn.Module or a function that builds one, got {type(model).__name__}"
        )
    with torch.device("meta"):
        built = model()
    expect("model()", built, nn.Module, "a torch.nn.Module, which the function must return")
    return built


def describe(config: Config, model: nn.Module | None = None) -> str:
    """Return a config in a few words; with a model, as it is resolved for that model."""
    config = config if model is None else resolved_for(model, config)
    if isinstance(config, str):
        return config
    if config is None:
        patched = model is not None and any(patched_modules(model))
        return "patched as it is" if patched else "full"
    share = {1.0: "recomputed", 0.0: "saved"}.get(config.recompute, f"{config.recompute:.0%} recomputed")
    if config.keep_ratio == 1:
        return ", ".join(["exact lean", share, *others(config, "keep_ratio", "recompute")])
    blocks = "" if config.blocks is None else ", all blocks" if config.blocks == 1 else f", blocks {config.blocks}"
    more = others(config, "keep_ratio", "recompute", "attention", "blocks")
    return ", ".join([f"sbp {config.attention} r={config.keep_ratio}{blocks}", share, *more])


def others(config: SBPConfig, *told: str) -> list[str]:
    """Return the fields that differ from their default, as "name=value", except for those in ``told``."""
    values = {name: value for name, value in differing(config).items() if name not in told}
    return [f"{name}={getattr(value, '__name__', value)}" for name, value in values.items()]


def trace(
    model: nn.Module, shape: tuple[int, ...], config: Config, precision: str, device: str, loss: Loss | None,
    covers: str = "",
) -> Estimate:  # fmt: skip
    """Run one step on fake tensors and return its memory, without the optimizer's state."""
    from torch._subclasses import FakeTensorMode

    title, mode = describe(config, model), FakeTensorMode(allow_non_fake_inputs=True)
    model = fake_copy(model, mode)
    with mode, simulated.gpu() if device == "cuda" else nullcontext():
        model = prepared(model, config)
        blocks = blocks_of(model)
        x = input_for(model, shape)
        static = [*model.parameters(), *model.buffers(), x]
        saved, gradients = Saved(model, *static), Gradients(model)
        forward = True

        def moment() -> tuple[bool, str, int, int]:
            return forward, saved.where, saved.alive, gradients.bytes

        live = Live(simulated.workspace if device == "cuda" else no_workspace, moment)
        live.ignore(*static)
        autocast = torch.autocast("cpu", PRECISIONS[precision] or torch.bfloat16, enabled=precision != "float32")
        with live:
            with autocast, saved, refusals(saved, shape):
                value = (loss or default_loss)(model.get_submodule(covers)(x))
            check_loss(value)
            forward = False
            value.backward()
    in_forward, where, saved_at_peak, gradients_at_peak = live.at_peak
    gradients_bytes = sum(p.nbytes for p in model.parameters() if p.requires_grad)
    peak, peak_at = live.peak, f"in {'forward' if in_forward else 'backward'} of {where or 'the model'}"
    if gradients_bytes > peak:  # the gradients of all, traced or not, need more than the step
        peak, saved_at_peak, gradients_at_peak, peak_at = gradients_bytes, 0, gradients_bytes, "in the update"
    parameters = sum(t.nbytes for t in static[:-1])
    graphs = simulated.held(live.pools)
    libraries = simulated.CUBLAS if device == "cuda" else 0
    parts, elsewhere = by_block(saved.by_module, blocks)
    return Estimate(
        config=title,
        input_shape=shape,
        precision=precision,
        device=device,
        parameters=parameters,
        gradients=gradients_bytes,
        optimizer=0,
        input=x.nbytes,
        graphs=graphs,
        libraries=libraries,
        saved={name: sum(part.values()) for name, part in parts.items()},
        parts=parts,
        saved_elsewhere=elsewhere,
        saved_at_peak=saved_at_peak,
        gradients_at_peak=gradients_at_peak,
        short_lived=peak - saved_at_peak - gradients_at_peak,
        peak=peak + parameters + x.nbytes + graphs + libraries,
        peak_at=peak_at,
        covers=covers,
    )


def fake_copy(model: nn.Module, mode: Any) -> nn.Module:
    """Return a copy of the model with fake parameters and buffers, in training mode."""
    memo: dict[int, Any] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        with mode:
            fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
            is_parameter = isinstance(tensor, nn.Parameter)
            memo[id(tensor)] = nn.Parameter(fake, tensor.requires_grad) if is_parameter else fake
    result = copy.deepcopy(model, memo)
    return result if result.training else result.train()


def prepared(model: nn.Module, config: Config) -> nn.Module:
    if config is None:
        return model
    if any(patched_modules(model)):
        remove(model)
    if isinstance(config, SBPConfig):
        return apply(model, config=config)
    if config == "checkpoint":
        checkpoint_blocks(model)
    return model


def checkpoint_blocks(model: nn.Module, chosen: Callable[[nn.Module], bool] = lambda block: True) -> nn.Module:
    """Put ``torch.utils.checkpoint`` around every chosen block, in place."""
    names = blocks_of(model)
    if not names:
        raise UsageError(f"{type(model).__name__} has no chain of blocks to checkpoint")
    for name in names:
        block = model.get_submodule(name)
        if chosen(block):
            block.forward = _checkpointed(block.forward)
    return model


def _checkpointed(forward: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args, **kwargs: checkpoint(forward, *args, use_reentrant=False, **kwargs)


def input_for(model: nn.Module, shape: Sequence[int]) -> Tensor:
    """Return zeros in the parameters' precision and on their device, in channels-last order if convolutions are."""
    first = next((p for p in model.parameters() if p.is_floating_point()), torch.empty(0))
    x = torch.zeros(shape, dtype=first.dtype, device=first.device)
    last = torch.channels_last
    images = [p for p in model.parameters() if p.dim() == 4 and not p.is_contiguous()]
    return x.to(memory_format=last) if x.dim() == 4 and any(p.is_contiguous(memory_format=last) for p in images) else x


def default_loss(output: Any) -> Tensor:
    if isinstance(output, Tensor) and output.dim() == 2 and output.is_floating_point():
        return F.cross_entropy(wide(output), torch.zeros(len(output), dtype=torch.long, device=output.device))
    leaves = [t for t in tree_leaves(output) if isinstance(t, Tensor) and t.requires_grad]
    if not leaves:
        raise UsageError("the model's output has no gradient: nothing would be trained")
    return torch.stack([leaf.float().sum() for leaf in leaves]).sum()


class Gradients:
    """Counts the bytes of the gradients that exist."""

    def __init__(self, model: nn.Module) -> None:
        self.bytes = 0
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self.count)

    def count(self, parameter: Tensor) -> None:
        assert parameter.grad is not None
        self.bytes += parameter.grad.nbytes


@contextmanager
def refusals(saved: Saved, shape: tuple[int, ...]) -> Iterator[None]:
    """Turn errors in the model's forward into ``RefusedError``, with the place where they occurred."""
    from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException

    try:
        yield
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        raise RefusedError(
            f"{saved.where or 'the model'} does what depends on data ({error}), which fake tensors do not have; "
            "estimate the part before it alone: estimate(model.<part>, …)"
        ) from error
    except Exception as error:
        first = str(error).strip().splitlines() or [type(error).__name__]
        where = f" (in {saved.where})" if saved.where else ""
        raise RefusedError(f"the model refuses an input of shape {list(shape)}{where}: {first[0]}") from error
