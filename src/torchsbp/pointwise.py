"""The sites of convolutions whose rows are run again on their own: ConvNeXt blocks and down-sampling of any make."""

from typing import Any

import torch
from torch import Tensor

from .adapters import parts as P
from .adapters.residual import Patches, PointwiseBlock
from .masks import Kept
from .ops import rows as R
from .ops.downsample import patch_rows
from .ops.layers import BackwardOptions
from .residual import RerunSite, ResidualBinding, Run, tokens
from .sites import ConvSite, Site, output_size, through


class PointwiseSite(RerunSite, ConvSite):
    """A ConvNeXt block whose pointwise part runs again on kept rows of the convolution's output, which are saved."""

    def branch(self, u: Tensor, kept: Kept, options: BackwardOptions) -> Tensor:
        b: ResidualBinding = self.sbp
        parts: PointwiseBlock = b.parts
        dim = parts.dim(self)
        u = u if dim == 2 else u.permute(0, 2, 3, 1)
        first = Run(u, b.positions(R.count(u, dim), dim))
        seen = u if kept.rows is None else R.take_map(u, kept.rows, dim)
        y = self.twice(first, seen, None, kept.rows, options)
        return through(self, parts.drop, y if dim == 2 else y.permute(0, 3, 1, 2))

    def own(self, x: Tensor, rows: R.Rows, *args: Any, **kwargs: Any) -> Tensor:
        parts: PointwiseBlock = self.sbp.parts
        dim = parts.dim(self)
        for name in parts.pointwise:
            x = P.find(self, name)(x)
        scale = P.find(self, parts.scale)
        if scale is not None:
            x = x * (scale.view(-1, 1, 1) if dim == 2 else scale)
        return x if rows is None else tokens(x, dim)


class ResponseSite(Site):
    """A global response norm: in a run on kept rows, one constant row with the norm of all others stands for these.

    So its statistic has the value of all rows, and a gradient for kept ones.
    """

    def forward(self, h: Tensor) -> Tensor:
        run: Run | None = self.sbp.run
        if run is None or (run.again and run.rows is None):
            return super().forward(h)
        name, dim = self.sbp.part, run.where.dim
        wide = torch.promote_types(h.dtype, torch.float32)
        norm = torch.linalg.vector_norm(h.detach(), dim=(dim, dim + 1), keepdim=True, dtype=wide)
        if not run.again:
            run.draws[name] = [norm]
            return super().forward(h)
        rest = (run.draws[name][0].square() - norm.square()).clamp(min=0).sqrt().to(h.dtype)
        return super().forward(torch.cat([h, rest], dim)).narrow(dim, 0, h.shape[dim])


class PatchSite(RerunSite):
    """Down-sampling with stride ≥ kernel: the layer's own forward runs again on the patches of kept outputs."""

    def run(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        b: ResidualBinding = self.sbp
        parts: Patches = b.parts
        conv = P.find(self, parts.down)
        out = output_size(conv, x)
        batch, n = x.shape[0], out[0] * out[1]
        rows = b.kept(batch, n).rows
        seen = x
        if rows is not None:
            inputs = patch_rows(rows, x.shape[2:], out, conv.kernel_size, conv.stride)
            patches = R.take(R.channels_last(x, 2), inputs).view(-1, *conv.kernel_size, x.shape[1])
            seen = patches.permute(0, 3, 1, 2)
        return self.twice(Run(x, b.positions(n, 2)), seen, None, rows, b.options(rows, batch, n))

    def own(self, x: Tensor, rows: R.Rows, *args: Any, **kwargs: Any) -> Tensor:
        y = super(Site, self).forward(x)
        return y if rows is None else y.flatten(1)
