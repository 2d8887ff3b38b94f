"""Strategies of ConvNeXt blocks and down-sampling layers of any make, which are run again on kept rows."""

import math
from typing import Any

import torch
from torch import Tensor, nn

from ..adapters import rerun as A
from ..adapters.names import find
from ..ops import rows as R
from ..ops.downsample import patch_rows
from ..ops.layers import BackwardOptions
from ..sampling.masks import Kept
from .lean import ConvBlock, output_size, through
from .replay import Call, Inside, Replay, Replayed, tokens
from .sampled import runs
from .site import original


@runs(A.PointwiseBlock)
class PointwiseBlock(Replayed, ConvBlock):
    """A ConvNeXt block whose pointwise part runs again on kept rows of the convolution's output, which are saved."""

    chooses = False

    def is_one_function(self, module: nn.Module) -> bool:
        return False

    def branch(self, module: nn.Module, u: Tensor, kept: Kept, options: BackwardOptions) -> Tensor:
        parts: A.PointwiseBlock = self.description
        dim = parts.dim(module)
        u = u if dim == 2 else u.permute(0, 2, 3, 1)
        first = Replay(u, self.positions(R.count(u, dim), dim))
        seen = u if kept.rows is None else R.take_map(u, kept.rows, dim)
        y = self.execute(module, Call(first, seen, None, kept.rows, options, (), {}))
        return through(module, parts.drop, y if dim == 2 else y.permute(0, 3, 1, 2))

    def compute(self, module: nn.Module, x: Tensor, rows: R.Rows, *args: Any, **kwargs: Any) -> Tensor:
        parts: A.PointwiseBlock = self.description
        dim = parts.dim(module)
        for name in parts.pointwise:
            x = find(module, name)(x)
        scale = find(module, parts.scale)
        if scale is not None:
            x = x * (scale.view(-1, 1, 1) if dim == 2 else scale)
        return x if rows is None else tokens(x, dim)


@runs(A.Response)
class Response(Inside):
    """A global response norm. In a run on kept rows, one constant row with the norm of all dropped ones joins them.

    So the statistic keeps its value, that over all rows, and gets gradients from kept ones only.
    """

    def forward(self, module: nn.Module, h: Tensor) -> Tensor:
        replay, forward = self.replay, original(module)
        if replay is None or (replay.again and not replay.on_kept_rows):
            return forward(h)
        name, dim = self.part.name, replay.where.dim
        wide = torch.promote_types(h.dtype, torch.float32)
        norm = torch.linalg.vector_norm(h.detach(), dim=(dim, dim + 1), keepdim=True, dtype=wide)
        if not replay.again:
            replay.record(name, norm)
            return forward(h)
        rest = (replay.recall(name).square() - norm.square()).clamp(min=0).sqrt().to(h.dtype)
        return forward(torch.cat([h, rest], dim)).narrow(dim, 0, h.shape[dim])


@runs(A.Patches)
class Patches(Replayed):
    """Down-sampling with stride ≥ kernel: the layer's own forward runs again on the patches of kept outputs."""

    def run(self, module: nn.Module, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        conv = find(module, self.description.down)
        n, seen = math.prod(output_size(conv, x)), x
        kept, options = self.sampling.kept_and_options(x.shape[0], n)
        rows = kept.rows
        if rows is not None:
            inputs = patch_rows(rows, (x.shape[0], *x.shape[2:]), conv.kernel_size, conv.stride)
            patches = R.take(R.channels_last(x, 2), inputs).view(-1, *conv.kernel_size, x.shape[1])
            seen = patches.permute(0, 3, 1, 2)
        return self.execute(module, Call(Replay(x, self.positions(n, 2)), seen, None, rows, options, (), {}))

    def compute(self, module: nn.Module, x: Tensor, rows: R.Rows, *args: Any, **kwargs: Any) -> Tensor:
        y = original(module)(x)
        return y if rows is None else y.flatten(1)
