"""Strategies of blocks known part by part: they call the lean ops with the block's parameters, read at every call."""

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..adapters import lean as L
from ..adapters.base import untouched
from ..adapters.names import find
from ..errors import UsageError
from ..ops import rows as R
from ..ops.attention import attention_branch
from ..ops.block import transformer_block
from ..ops.constants import constant
from ..ops.conv_block import ConvParams, ConvSpec, conv_block
from ..ops.downsample import DownsampleParams, DownsampleSpec, downsample
from ..ops.gate import gate
from ..ops.heads import AttentionParams, AttentionSpec
from ..ops.layers import BackwardOptions, autocast_dtype
from ..ops.mlp import MLPParams, MLPSpec, mlp_branch
from ..ops.window_attention import NO_WINDOWS, Cut, one_window
from ..sampling.masks import Kept
from .parameters import affine, attention_of, mlp_of, scale_of
from .sampled import SampledBlock, Sampling, runs
from .site import Strategy, original


class BlockParts(NamedTuple):
    """A block's parameters as its op takes them, and the factors of stochastic depth for its two branches."""

    attention: AttentionParams
    attention_spec: AttentionSpec
    mlp: MLPParams
    mlp_spec: MLPSpec
    factors: tuple[Tensor | None, Tensor | None]


@runs(L.TransformerBlock)
class TransformerBlock(SampledBlock):
    chooses = True

    def run(self, module: nn.Module, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        return self.returned(self.block(x, self.parts(module, x)))

    def returned(self, y: Tensor) -> Any:
        """Return y in the form that the block's caller expects."""
        return (y, None) if self.description.pair else y

    def block(self, x: Tensor, parts: BlockParts, cut: Cut = NO_WINDOWS) -> Tensor:
        """Run the op on ``x [B, ..., C]``; ``cut`` says how its attention is cut into windows."""
        attention, attention_spec, mlp, mlp_spec, factors = parts
        kept, options = self.sampling.kept_and_options(x.shape[0], R.count(x))
        if not attention_spec.rule.heads:
            return transformer_block(
                x, kept.rows, attention, attention_spec, mlp, mlp_spec,
                inverse=kept.inverse, marks=kept.marks, factors=factors, options=options, cut=cut,
            )  # fmt: skip
        x = attention_branch(
            x.flatten(1, -2), None, attention, attention_spec,
            heads=kept.heads, factor=factors[0], options=options, cut=cut,
        ).view(x.shape)  # fmt: skip
        return mlp_branch(x, kept.rows, mlp, mlp_spec, inverse=kept.inverse, factor=factors[1], options=options)

    def parts(self, module: nn.Module, x: Tensor) -> BlockParts:
        """Read the parts from the module, and draw stochastic depth for x."""
        names: L.TransformerBlock = self.description
        attention, attention_spec = attention_of(module, names, self.sampling.rule)
        mlp, mlp_spec = mlp_of(module, names.norm2, names)
        mlp, post = mlp._replace(scale=scale_of(module, names.scale2)), bool(names.post_norm1)
        factors = (
            drop_factor(find(module, names.drop1), x, attention.post_norm_weight if post else attention.scale),
            drop_factor(find(module, names.drop2), x, mlp.post_norm_weight if post else mlp.scale),
        )
        return BlockParts(attention, attention_spec, mlp, mlp_spec, factors)


@runs(L.RotaryBlock)
class RotaryBlock(TransformerBlock):
    takes_arguments = True

    def run(self, module: nn.Module, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        names: L.RotaryBlock = self.description
        given = kwargs.pop(names.rope, None)
        self.refuse_arguments(module, args, kwargs)
        parts = self.parts(module, x)
        if names.own_rope is not None:
            given = names.own_rope(module, x.shape[1], autocast_dtype(x) or x.dtype, x.device)
        if given is not None:
            half = names.rotate_half if isinstance(names.rotate_half, bool) else find(module, names.rotate_half)
            attention = parts.attention._replace(rope=rope_of(given, x.shape[1]))
            parts = parts._replace(
                attention=attention, attention_spec=parts.attention_spec._replace(rotate_half=bool(half))
            )
        return self.returned(self.block(x, parts))


@runs(L.BiasedBlock)
class BiasedBlock(TransformerBlock):
    takes_arguments = True

    def run(self, module: nn.Module, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        names: L.BiasedBlock = self.description
        given = {name: kwargs.pop(name) for name in names.arguments if name in kwargs}
        self.refuse_arguments(module, args, kwargs)
        given_map, x = x, R.channels_last(x, names.dim)
        batch, n = x.shape[0], R.count(x)
        # Before stochastic depth is drawn, as in the block's own forward: the bias may be random.
        bias, parts = names.score_bias(module, n, **given), self.parts(module, x)
        cut = NO_WINDOWS
        if bias is not None:
            self.check_bias(module, bias, parts.attention_spec.heads, n)
            parts = parts._replace(attention=parts.attention._replace(score_bias=bias.flatten(0, -3)))
            cut = one_window(n, self.sampling.kept(batch, n).rows, batch, x.device)
        return self.returned(R.channels_back(self.block(x, parts, cut), names.dim, given_map))

    def check_bias(self, module: nn.Module, bias: Tensor, heads: int, n: int) -> None:
        if tuple(bias.shape) not in ((heads, n, n), (1, heads, n, n)) or not bias.is_floating_point():
            raise UsageError(
                f"{type(module).__name__} was called with a mask: {bias.dtype} {tuple(bias.shape)} is added to its "
                f"scores. SBP supports what is the same for all samples, {(1, heads, n, n)}. Call without a mask, or "
                "torchsbp.remove(model) to train with it."
            )


def rope_of(given: Any, n: int) -> Tensor:
    """Return sine and cosine of all n rows, side by side. The first rows, for which none are given, are not turned."""
    cos, sin = given if isinstance(given, tuple) else given.chunk(2, -1)[::-1]
    first = n - cos.shape[-2]
    return torch.cat([F.pad(sin, (0, 0, first, 0)), F.pad(cos, (0, 0, first, 0), value=1.0)], -1)


@runs(L.ConvBlock)
class ConvBlock(SampledBlock):
    chooses = True

    def run(self, module: nn.Module, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        parts = self.description
        if self.is_one_function(module):
            return self.block(module, x)
        u = find(module, parts.conv)(through(module, parts.pool, x))
        kept, options = self.sampling.kept_and_options(u.shape[0], R.count(u, 2))
        y = self.branch(module, u, kept, options) + through(module, parts.shortcut, x)
        if options.scope == "branch":
            return y
        return gate(y.permute(0, 2, 3, 1), kept.rows).permute(0, 3, 1, 2)

    def is_one_function(self, module: nn.Module) -> bool:
        """Whether ``conv_block`` computes the whole block: scope is "branch", the convolution keeps the size, no pool
        comes before it, and no layer is on the shortcut."""
        parts: L.ConvBlock = self.description
        shortcut = find(module, parts.shortcut)
        if parts.pool or self.sampling.scope != "branch":
            return False
        return (shortcut is None or type(shortcut) is nn.Identity) and keeps_size(find(module, parts.conv))

    def block(self, module: nn.Module, x: Tensor) -> Tensor:
        conv = find(module, self.description.conv)
        kept, options = self.sampling.kept_and_options(x.shape[0], R.count(x, 2))
        mlp, spec, factor = self.parts(module, x)
        return conv_block(
            x, kept.rows, ConvParams(*affine(conv)), ConvSpec(conv.padding, conv.dilation, conv.groups), mlp, spec,
            inverse=kept.inverse, marks=kept.marks, factor=factor, options=options,
        )  # fmt: skip

    def branch(self, module: nn.Module, u: Tensor, kept: Kept, options: BackwardOptions) -> Tensor:
        """Return what the block adds to its shortcut, from the output of its convolution ``[B, C, H, W]``."""
        mlp, spec, factor = self.parts(module, u)
        u = u.permute(0, 2, 3, 1)
        y = mlp_branch(
            u, kept.rows, mlp, spec,
            inverse=kept.inverse, marks=kept.marks, factor=factor, residual=False, options=options,
        )  # fmt: skip
        return y.permute(0, 3, 1, 2)

    def parts(self, module: nn.Module, u: Tensor) -> tuple[MLPParams, MLPSpec, Tensor | None]:
        """Read the parts from the module, and draw stochastic depth for u."""
        parts: L.ConvBlock = self.description
        mlp, spec = mlp_of(module, parts.norm, parts)
        scale = find(module, parts.scale)
        mlp = mlp._replace(scale=None if scale is None else scale.flatten())
        return mlp, spec, drop_factor(find(module, parts.drop), u, scale)


@runs(L.Downsample)
class Downsample(SampledBlock):
    def run(self, module: nn.Module, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        norm, conv = find(module, self.description.norm), find(module, self.description.down)
        kept, options = self.sampling.kept_and_options(x.shape[0], math.prod(output_size(conv, x)))
        static = L.norm_of(norm)
        assert static is not None
        params = DownsampleParams(*affine(norm), *affine(conv))
        spec = DownsampleSpec(conv.stride, static)
        return downsample(x, kept.rows, params, spec, options)


@runs(L.LastOfList)
@dataclass
class LastOfList(Downsample):
    """``Downsample`` of a ``ModuleList``, run in the place of its last module; ``block`` is the list."""

    block: nn.Module

    @classmethod
    def of(cls, part: L.LastOfList, block: nn.Module, sampling: Sampling) -> "LastOfList":
        return cls(part.description, sampling, part.block)

    def run(self, module: nn.Module, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return super().run(self.block, x)

    def check(self, module: nn.Module) -> None:
        super().check(self.block)


@runs(L.Skipped)
@dataclass
class Skipped(Strategy):
    """A module that returns its input in training: ``worker`` does its work too."""

    worker: nn.Module

    @classmethod
    def of(cls, part: L.Skipped, block: nn.Module, sampling: Sampling) -> "Skipped":
        return cls(part.worker)

    def forward(self, module: nn.Module, x: Tensor) -> Tensor:
        return x if self.worker.training and torch.is_grad_enabled() else original(module)(x)


def output_size(conv: nn.Conv2d, x: Tensor) -> list[int]:
    """Return the size of a convolution's output, without padding and dilation."""
    return [(n - k) // s + 1 for n, k, s in zip(x.shape[2:], conv.kernel_size, conv.stride, strict=True)]


def keeps_size(conv: nn.Module) -> bool:
    """Whether this is a plain ``nn.Conv2d``, without hooks, whose output has the size of its input."""
    if type(conv) is not nn.Conv2d or not untouched(conv):
        return False
    if conv.padding_mode != "zeros" or conv.stride != (1, 1) or isinstance(conv.padding, str):
        return False
    return all(2 * p == d * (k - 1) for p, d, k in zip(conv.padding, conv.dilation, conv.kernel_size, strict=True))


def through(block: nn.Module, name: str, x: Tensor) -> Tensor:
    """Apply a part of the block to x; if the block has no such part, return x."""
    part = find(block, name)
    return x if part is None else part(x)


def drop_factor(drop_path: nn.Module | None, x: Tensor, scale: Tensor | None) -> Tensor | None:
    """Return stochastic depth's factor per sample. The model's own module draws it, with the same random numbers."""
    if drop_path is None or isinstance(drop_path, nn.Identity) or getattr(drop_path, "p", 1) == 0:
        return None
    dtype = autocast_dtype(x) or x.dtype
    dtype = dtype if scale is None else torch.promote_types(dtype, scale.dtype)
    return drop_path(ones((x.shape[0], *[1] * (x.dim() - 1)), dtype, x.device)).flatten()


@constant
def ones(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.ones(shape, dtype=dtype, device=device)
