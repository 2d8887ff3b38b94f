"""The modules that ``apply`` puts in place of a model's own: subclasses of their classes that run the ops in training.

Each is a mixin that stands before the module's own class, so that eval mode, ``no_grad`` and everything it does not
override are the module's own. Parameters are read from the module at every call, so copies and sharding are seen; that
its parts are still those the ops know is checked whenever the model enters training mode.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from .adapters import lora
from .adapters import parts as P
from .adapters.base import Adapter
from .masks import Kept, Masks
from .ops.activations import activation_of
from .ops.attention import attention_branch
from .ops.block import transformer_block
from .ops.downsample import DownsampleParams, DownsampleSpec, downsample
from .ops.gate import gate
from .ops.heads import AttentionParams, AttentionSpec
from .ops.layers import BackwardOptions, autocast_dtype
from .ops.mlp import MLPParams, MLPSpec, mlp_branch
from .ops.rules import RULES

if TYPE_CHECKING:
    from typing_extensions import Self

STEP = "sbp_step"


@dataclass
class Binding:
    """What a site knows besides its own parameters: the masks, its place among them (None: exact), its parts, and
    whether its backward recomputes."""

    masks: Masks
    site: int | None
    parts: Any
    recompute: bool

    def kept(self, batch: int, positions: int) -> Kept:
        return Kept() if self.site is None else self.masks.rows_of(self.site, batch, positions)

    def options(self, rows: Tensor | None, batch: int, positions: int) -> BackwardOptions:
        config = self.masks.config
        scale = 1.0 if rows is None or config.scale == "none" else batch * positions / rows.shape[0]
        return BackwardOptions(config.scope, self.recompute, scale)


class Site(nn.Module):
    """A patched module. ``sbp`` is its binding."""

    sbp: Any

    def __reduce_ex__(self, protocol: Any) -> Any:
        # The class is made at run time: pickle and deepcopy make it again instead of looking it up by name.
        if "sbp_origin" not in type(self).__dict__:
            return super().__reduce_ex__(protocol)
        return _rebuild, type(self).__dict__["sbp_origin"], self.__dict__.copy()


_CLASSES: dict[tuple[type[Site], type[nn.Module]], type[nn.Module]] = {}


def bound_class(mixin: type[Site], base: type[nn.Module]) -> type[nn.Module]:
    """The class of a patched module: the mixin's training forward, everything else from the module's own class."""
    if (mixin, base) not in _CLASSES:
        body = {"sbp_origin": (mixin, base), "__module__": base.__module__, "__doc__": base.__doc__}
        _CLASSES[mixin, base] = type(f"SBP{base.__name__}", (mixin, base), body)
    return _CLASSES[mixin, base]


def _rebuild(mixin: type[Site], base: type[nn.Module]) -> nn.Module:
    cls = bound_class(mixin, base)
    return cls.__new__(cls)


def bind(module: nn.Module, mixin: type[Site], binding: Any) -> None:
    module.__class__ = bound_class(mixin, type(module))
    module.sbp = binding
    if isinstance(binding, EntryBinding):
        device = next(module.parameters()).device
        module.register_buffer(STEP, torch.zeros((), dtype=torch.int64, device=device), persistent=False)


def unbind(module: nn.Module) -> None:
    module.__class__ = type(module).__dict__["sbp_origin"][1]
    del module.sbp
    module._buffers.pop(STEP, None)
    module._non_persistent_buffers_set.discard(STEP)


@dataclass
class EntryBinding:
    """What the entry knows: the sampled modules, their places over depth, and the prefix of their names."""

    masks: Masks
    adapter: Adapter
    sites: list[nn.Module]
    depths: tuple[int, ...]
    prefix: str


class EntrySite(Site):
    """The patch embedding or stem: every forward begins here."""

    def _apply(self, fn: Any, recurse: bool = True) -> "Self":
        """Moves and casts; a step counter that comes from the meta device (``to_empty``) begins at 0."""
        was_meta = self.get_buffer(STEP).is_meta
        super()._apply(fn, recurse)
        step = self.get_buffer(STEP)
        if was_meta and not step.is_meta:
            step.zero_()
        return self

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        y = super().forward(x, *args, **kwargs)
        if getattr(self, "_is_replica", False):
            raise RuntimeError("nn.DataParallel shares one mask between threads; use DistributedDataParallel")
        entry: EntryBinding = self.sbp
        if any(site.training for site in entry.sites) and not recomputing():
            entry.masks.begin(x.shape[0], entry.adapter.grid(self, x, y), self.get_buffer(STEP))
        return y


def recomputing() -> bool:
    """Inside a backward pass, where activation checkpointing repeats a forward: its masks are the ones drawn then."""
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1


class SampledSite(Site):
    """A module whose training forward runs one of the ops.

    A name defined here hides a part of that name in the module's own class, so there are few.
    """

    binding: type[Binding] = Binding
    takes_arguments = False

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        if not (self.training and torch.is_grad_enabled()):
            return super().forward(x, *args, **kwargs)
        if self.takes_arguments:
            return self.run(x, *args, **kwargs)
        extra = [value for name, value in kwargs.items() if name not in self.sbp.parts.ignored]
        for value in (*args, *extra):
            if value is not None and value is not False:
                raise ValueError(
                    f"{type(self).__name__} was called with extra arguments in training ({args or kwargs}); SBP "
                    "supports the plain call only. Call torchsbp.remove(model) to train with them."
                )
        return self.run(x)

    def run(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        raise NotImplementedError

    def train(self, mode: bool = True) -> "Self":
        """Entering training mode, a block that was changed since ``apply`` is refused instead of misread."""
        if mode:
            refuse(self, list(self.sbp.parts.problems(self)))
        return super().train(mode)


def refuse(block: nn.Module, problems: list[str]) -> None:
    """An error if there are any."""
    if problems:
        raise ValueError(
            f"{type(block).__name__} was changed after torchsbp.apply: {'; '.join(problems)}. Call "
            "torchsbp.remove(model) before such changes."
        )


class TransformerSite(SampledSite):
    def run(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        b: Binding = self.sbp
        parts: P.TransformerBlock = b.parts
        batch, positions = x.shape[:2]
        rows, inverse, heads = b.kept(batch, positions)
        options = b.options(rows, batch, positions)
        attention, attention_spec = attention_of(self, parts, "query" if b.site is None else b.masks.config.attention)
        mlp, mlp_spec = mlp_of(self, parts.norm2, parts)
        mlp = mlp._replace(scale=P.find(self, parts.scale2))
        factors = (
            drop_factor(P.find(self, parts.drop1), x, attention.scale),
            drop_factor(P.find(self, parts.drop2), x, mlp.scale),
        )
        if not attention_spec.rule.heads:
            return transformer_block(
                x, rows, attention, attention_spec, mlp, mlp_spec, inverse=inverse, factors=factors, options=options
            )
        x = attention_branch(x, None, attention, attention_spec, heads=heads, factor=factors[0], options=options)
        return mlp_branch(x, rows, mlp, mlp_spec, inverse=inverse, factor=factors[1], options=options)


class ConvSite(SampledSite):
    def run(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        b: Binding = self.sbp
        u = P.find(self, b.parts.conv)(through(self, b.parts.pool, x))
        batch, positions = u.shape[0], u.shape[2] * u.shape[3]
        kept = b.kept(batch, positions)
        options = b.options(kept.rows, batch, positions)
        y = self.branch(u, kept, options) + through(self, b.parts.shortcut, x)
        if options.scope == "branch":
            return y
        return gate(y.permute(0, 2, 3, 1), kept.rows).permute(0, 3, 1, 2)

    def branch(self, u: Tensor, kept: Kept, options: BackwardOptions) -> Tensor:
        """What the block adds to its shortcut, from the output of its convolution ``[B, C, H, W]``."""
        parts: P.ConvBlock = self.sbp.parts
        mlp, spec = mlp_of(self, parts.norm, parts)
        scale = P.find(self, parts.scale)
        mlp = mlp._replace(scale=None if scale is None else scale.flatten())
        factor = drop_factor(P.find(self, parts.drop), u, scale)
        u = u.permute(0, 2, 3, 1)
        y = mlp_branch(u, kept.rows, mlp, spec, inverse=kept.inverse, factor=factor, residual=False, options=options)
        return y.permute(0, 3, 1, 2)


class DownsampleSite(SampledSite):
    def run(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        b: Binding = self.sbp
        norm, conv = P.find(self, b.parts.norm), P.find(self, b.parts.down)
        batch, positions = x.shape[0], math.prod(output_size(conv, x))
        rows = b.kept(batch, positions).rows
        static = P.norm_of(norm)
        assert static is not None
        params = DownsampleParams(*affine(norm), *affine(conv))
        return downsample(x, rows, params, DownsampleSpec(conv.stride, static), b.options(rows, batch, positions))


class DownsampleListSite(DownsampleSite):
    """A ``ModuleList``: what the stage finds in it and calls is, in training, this module alone."""

    def __iter__(self) -> Iterator[nn.Module]:
        lean = self.training and torch.is_grad_enabled()
        return iter((self,)) if lean else super().__iter__()  # type: ignore[misc]


def output_size(conv: nn.Conv2d, x: Tensor) -> list[int]:
    """The grid behind a convolution without padding."""
    return [(n - k) // s + 1 for n, k, s in zip(x.shape[2:], conv.kernel_size, conv.stride, strict=True)]


def through(block: nn.Module, name: str, x: Tensor) -> Tensor:
    """x behind a part that a block may have."""
    part = P.find(block, name)
    return x if part is None else part(x)


def affine(module: nn.Module | None) -> tuple[Any, Any]:
    """Weight and bias of a norm or convolution; None where it has none."""
    return getattr(module, "weight", None), getattr(module, "bias", None)


def stack(layers: list[tuple[Tensor, Tensor | None]]) -> tuple[Tensor, Tensor | None]:
    """Weights and biases of layers on one input as those of one layer, through which each gets its gradient.

    Where some have no bias, theirs is zero.
    """
    weight = torch.cat([w for w, _ in layers])
    if all(b is None for _, b in layers):
        return weight, None
    return weight, torch.cat([w.new_zeros(w.shape[0]) if b is None else b for w, b in layers])


def matrix(block: nn.Module, name: str) -> tuple[Tensor, Tensor | None]:
    """Weight and bias of a block's linear layer or 1×1 convolution, as a matrix; adapters may be put on it any time."""
    layer = P.find(block, name)
    if isinstance(layer, (nn.Linear, nn.Conv2d)):
        return layer.weight.flatten(1), layer.bias
    refuse(block, list(P.check_linear(name, layer)))
    return lora.weight(layer), layer.base_layer.bias


def attention_of(block: nn.Module, parts: P.TransformerBlock, rule: str) -> tuple[AttentionParams, AttentionSpec]:
    norm, scale = P.find(block, parts.norm1), P.find(block, parts.scale1)
    q_norm, k_norm = P.find(block, parts.q_norm), P.find(block, parts.k_norm)
    qkv, proj = projection_of(block, parts.qkv), matrix(block, parts.proj)
    params = AttentionParams(*affine(norm), *qkv, *affine(q_norm), *affine(k_norm), *proj, scale)
    static = P.norm_of(norm)
    assert static is not None
    heads, softmax_scale = P.find(block, parts.heads), P.find(block, parts.softmax_scale)
    if softmax_scale is None:
        softmax_scale = (params.qkv_weight.shape[0] // (3 * heads)) ** -0.5
    fused = P.FUSED[P.find(block, parts.fused)]
    return params, AttentionSpec(heads, softmax_scale, static, P.norm_of(q_norm), fused, RULES[rule])


def projection_of(block: nn.Module, name: str | tuple[str, ...]) -> tuple[Any, Any]:
    """Weight and bias of a layer, or of that weight's own name, or of three layers as one."""
    if not isinstance(name, str):
        return stack([matrix(block, each) for each in name])
    part = P.find(block, name)
    return (part, P.find(block, name.replace("weight", "bias"))) if isinstance(part, Tensor) else matrix(block, name)


def mlp_of(block: nn.Module, norm_name: str, parts: Any) -> tuple[MLPParams, MLPSpec]:
    norm = P.find(block, norm_name)
    static = P.norm_of(norm)
    assert static is not None
    params = MLPParams(*affine(norm), *matrix(block, parts.fc1), *matrix(block, parts.fc2))
    act = activation_of(P.find(block, parts.act))
    assert act is not None
    return params, MLPSpec(static, act)


def drop_factor(drop_path: nn.Module | None, x: Tensor, scale: Tensor | None) -> Tensor | None:
    """Stochastic depth's factor per sample, drawn by the model's own module: the same randomness is consumed."""
    if drop_path is None or isinstance(drop_path, nn.Identity):
        return None
    dtype = autocast_dtype(x) or x.dtype
    dtype = dtype if scale is None else torch.promote_types(dtype, scale.dtype)
    return drop_path(torch.ones(x.shape[0], *[1] * (x.dim() - 1), dtype=dtype, device=x.device)).flatten()
