"""The steps of ``steps.py`` on a GPU: what each one allocates, and the kernel of ``kernels.py`` that it launches.

Sums over rows go to a buffer that all steps of a backward pass share: each program of a kernel writes to its own row of
the buffer, whose rows are summed once, at the end.
"""

from collections.abc import Callable, Sequence
from copy import copy
from typing import Any

import torch
from torch import Tensor

from . import rows as R
from .activations import GATED, activation_named
from .chosen import Chosen
from .compiling import compiling
from .launch import launch
from .layers import Grad, LastLayer, Normed
from .steps import Affine, Cotangent, Steps

PROGRAMS_PER_PROCESSOR = 4
ACTIVATION_TILE = {"ROWS": 8, "BLOCK": 128, "num_warps": 4}  # some columns, not whole rows
ACTIVATION_CODES = {"gelu": 0, "gelu_tanh": 1, "quick_gelu": 2, "silu": 3, "relu": 4}
"""The activations that the kernel knows."""
Launch = Callable[..., None]


_PROCESSORS: dict[torch.device, int] = {}


def processors(device: torch.device) -> int:
    if device.type != "cuda":
        return 1
    if compiling():
        return torch.cuda.get_device_properties(device).multi_processor_count
    if device not in _PROCESSORS:
        _PROCESSORS[device] = torch.cuda.get_device_properties(device).multi_processor_count
    return _PROCESSORS[device]


def tile(width: int, elements: int = 2048) -> dict[str, int]:
    """A tile of whole rows of that width, a warp for 1024 elements: measured on an H200 for widths 96, 192 and 768."""
    block = 1 << (width - 1).bit_length()
    rows = max(1, elements // block)
    return {"ROWS": rows, "BLOCK": block, "num_warps": min(8, max(1, rows * block // 1024))}


def rotated(
    launch: Launch, x: Tensor, rope: Tensor, rows: R.Rows, half: bool, back: bool, overwrite: bool = False
) -> Tensor:
    """``rotary.rotate`` or its backward for ``x [B, H, m, D]``; in place of x if it may be overwritten."""
    batch, heads, m, width = x.shape
    x = R.by_rows(x)
    y = x if overwrite else torch.empty(batch, m, heads, width, dtype=x.dtype, device=x.device).transpose(1, 2)
    launch(
        "rotation", (8 * PROGRAMS_PER_PROCESSOR * processors(x.device),),
        x=x, rope=rope.contiguous(), rows=rows, y=y, x_row=x.stride(2), y_row=y.stride(2), n=rope.shape[-2],
        count=batch * m, HEADS=heads, D=width, HALF=half, BACK=back, HAS_ROWS=rows is not None,
        BY_HEAD=rope.dim() == 3, OVERWRITE=overwrite, **tile(heads * width, 1024),
    )  # fmt: skip
    return y


def take_rows(x: Tensor, rows: Tensor, dtype: torch.dtype) -> Tensor:
    """``x[rows]``."""
    count, C = rows.shape[0], x.shape[1]
    kept = torch.empty(count, C, dtype=dtype, device=x.device)
    grid = (8 * PROGRAMS_PER_PROCESSOR * processors(x.device),)
    launch("take", grid, x=x, rows=rows, kept=kept, count=count, C=C, **tile(C, 1024))
    return kept


def keep_rows(
    launch: Launch, x: Tensor, o: Tensor, lse: Tensor, rows: Tensor, dtype: torch.dtype, x_rows: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """All rows or (``x_rows``) the kept ones of ``x [B, N, C]``, in ``dtype``; and the kept ones of ``o [B, N, H * D]``
    and ``lse [B, H, N]``, as ``[R, H * D]`` and ``[B, H, k]``."""
    (batch, positions, width), heads, count, C = o.shape, lse.shape[1], rows.shape[0], x.shape[2]
    x, o = x.contiguous(), o.contiguous()
    has_x = x_rows or dtype != x.dtype
    kept_x = R.flat(x)
    if has_x:
        kept_x = torch.empty(count if x_rows else batch * positions, C, dtype=dtype, device=x.device)
    kept_o = torch.empty(count, width, dtype=o.dtype, device=x.device)
    kept_lse = torch.empty(batch, heads, count // batch, dtype=lse.dtype, device=x.device)
    launch(
        "keep", (8 * PROGRAMS_PER_PROCESSOR * processors(x.device),),
        x=x, o=o, lse=lse, rows=rows, kept_x=kept_x if has_x else None, kept_o=kept_o, kept_lse=kept_lse,
        count_x=kept_x.shape[0], count=count, per_sample=count // batch, positions=positions,
        lse_sample=lse.stride(0), lse_head=lse.stride(1), lse_row=lse.stride(2),
        C=C, WIDTH=width, HEADS=heads, HAS_X=has_x, X_ROWS=x_rows, BLOCK_HEADS=1 << (heads - 1).bit_length(),
        **tile(max(C, width), 1024),
    )  # fmt: skip
    return kept_x, kept_o, kept_lse


CHOSEN_AMONG = 4096
"""How many rows of a sample a program can hold."""


def choose_rows(launch: Launch, dy: Tensor, marks: Tensor, prefix: int) -> Chosen:
    """``chosen.choose`` in two kernels, with the inverse of the rows."""
    (samples, k), (size, C), dy = marks.shape, dy.shape, dy.contiguous()
    n, device = size // samples, dy.device
    lengths = torch.empty(size, dtype=torch.float32, device=device)
    launch(
        "lengths", (8 * PROGRAMS_PER_PROCESSOR * processors(device),),
        x=dy, lengths=lengths, count=size, C=C, **tile(C, 1024),
    )  # fmt: skip
    rows = torch.empty(samples * (prefix + k), dtype=torch.int64, device=device)
    counts = torch.empty(rows.shape[0], dtype=torch.float32, device=device)
    inverse = torch.empty(size, dtype=torch.int32, device=device)
    block = 1 << (n - 1).bit_length()
    launch(
        "choose", (samples,),
        lengths=lengths, marks=marks.contiguous(), rows=rows, counts=counts, inverse=inverse, n=n, k=k, prefix=prefix,
        BLOCK=block, num_warps=min(8, max(1, block // 128)),
    )  # fmt: skip
    return Chosen(rows, inverse, counts)


def scaled_last_layer(
    launch: Launch, product: Tensor, total: Tensor, weight: Tensor, bias: Grad, scale: Tensor
) -> LastLayer:
    """``layers.last_layer_gradients`` where there is a scale; the product becomes the weight's gradient."""
    rows, width = product.shape
    dbias, dscale = torch.empty_like(scale), torch.empty_like(scale)
    launch(
        "last_layer", (rows,),
        product=product, total=total, weight=weight.contiguous(), bias=bias, scale=scale, dbias=dbias, dscale=dscale,
        WIDTH=width, HAS_BIAS=bias is not None, BLOCK=min(1024, 1 << (width - 1).bit_length()), num_warps=4,
    )  # fmt: skip
    return LastLayer(product, dbias, dscale)


def given_inverse(rows: R.Rows, inverse: Grad, size: int) -> Grad:
    """The inverse of the rows, made unless it is given."""
    return R.inverse(rows, size) if inverse is None and rows is not None else inverse


def row_weight(weight: R.Weight) -> dict[str, Any]:
    """The arguments that tell a kernel how often rows count."""
    by_row = isinstance(weight, Tensor)
    value, prefix = weight if isinstance(weight, R.RowWeight) else R.RowWeight(1.0)
    weighted = {"WEIGHTED": weight is not None, "BY_ROW": by_row}
    return {"counts": weight if by_row else None, "row_weight": value, "prefix": prefix, **weighted}


class KernelSteps(Steps):
    def __init__(self, x: Tensor, columns: int) -> None:
        self.programs = PROGRAMS_PER_PROCESSOR * self.processors(x.device)
        self.sums = torch.empty(self.programs, columns, dtype=torch.float32, device=x.device)
        self.widths: dict[str, int] = {}
        self.used = 0

    def processors(self, device: torch.device) -> int:
        return processors(device)

    launch = staticmethod(launch)
    """Every kernel of a step is launched here, and only here."""

    def parts(self, count: int) -> list[Any]:
        """Each has a share of the programs, and writes to their rows of the buffer."""
        programs, found = self.programs // count, [copy(self) for _ in range(count)]
        assert programs * count == self.programs
        for part, sums in zip(found, self.sums.split(programs), strict=True):
            part.programs, part.sums, part.widths = programs, sums, dict(self.widths)
        return found

    def join(self, parts: Sequence[Any]) -> None:
        self.used, self.widths = parts[0].used, parts[0].widths

    def totals(self) -> dict[str, Tensor]:
        columns = self.sums.shape[1]
        assert self.used == columns, f"{self.used} columns were summed, {columns} announced"
        return dict(zip(self.widths, self.sums.sum(0).split_with_sizes(list(self.widths.values())), strict=True))

    def room(self, total: str, width: int) -> int:
        """Reserve columns of the buffer for a sum, and return the first of them."""
        assert total not in self.widths, f"{total} has a sum already"
        start, self.used, self.widths[total] = self.used, self.used + width, width
        return start

    def put(self, total: str, value: Tensor) -> None:
        """Put a sum into the buffer that no kernel has left there."""
        width = value.shape[0]
        columns = self.sums.narrow(1, self.room(total, width), width)
        columns.zero_()
        columns.select(0, 0).copy_(value)

    def buffer(self, total: str, width: int) -> dict[str, Any]:
        """The arguments that tell a kernel where its sum goes."""
        return {"sums": self.sums, "first": self.room(total, width), "columns": self.sums.shape[1]}

    def cotangent(
        self, dy: Tensor, rows: R.Rows, factor: Grad, scale: Grad, samples: int, dtype: torch.dtype, *,
        total: str, weight: R.Weight = None,
    ) -> Cotangent:  # fmt: skip
        dy = dy.contiguous()
        count, C = dy.shape[0] if rows is None else rows.shape[0], dy.shape[1]
        half = torch.empty(count, C, dtype=dtype, device=dy.device)
        scaled = None if scale is None else torch.empty_like(half)
        self.launch(
            "cotangent", (self.programs,),
            dy=dy, rows=rows, factor=factor, scale=scale, half=half, scaled=scaled, **self.buffer(total, C),
            count=count, per_sample=count // samples, C=C, **row_weight(weight),
            HAS_ROWS=rows is not None, HAS_FACTOR=factor is not None, HAS_SCALE=scale is not None, **tile(C),
        )  # fmt: skip
        return Cotangent(half, half if scaled is None else scaled)

    def _cotangent(self, kept: Tensor, factor: Grad, scale: Grad, dtype: torch.dtype, total: str) -> Cotangent:
        samples = 1 if factor is None else factor.shape[0]
        return self.cotangent(kept, None, factor, scale, samples, dtype, total=total)

    def normalise(
        self, x: Tensor, norm: Affine, dtype: torch.dtype | None, *,
        after: Tensor,
        rows: R.Rows = None, branch: Grad = None, scale: Grad = None, factor: Grad = None, samples: int = 1,
        kept: R.Rows = None, inverse: Grad = None,
    ) -> Normed:  # fmt: skip
        if norm.static.kind == "none":
            return super().normalise(
                x, norm, dtype, after=after, rows=rows, branch=branch, scale=scale, factor=factor, samples=samples,
                kept=kept,
            )  # fmt: skip
        x, (weight, bias, static) = x.contiguous(), norm
        count, C = x.shape[0] if rows is None else rows.shape[0], x.shape[1]
        wide = x.dtype if weight is None else weight.dtype
        keep = rows is not None or branch is not None
        middle = torch.empty(count, C, dtype=x.dtype, device=x.device) if keep else x
        y = torch.empty(count, C, dtype=dtype or wide, device=x.device)
        rstd = torch.empty(count, dtype=torch.float32, device=x.device)
        mean = None if static.kind == "rms" else torch.empty_like(rstd)
        eps = torch.finfo(x.dtype).eps if static.eps is None else static.eps
        y_kept = None if kept is None else torch.empty(kept.shape[0], C, dtype=y.dtype, device=x.device)
        self.launch(
            "normalise", (4 * self.programs,),
            after=after, x=x, rows=rows, branch=branch, scale=scale, factor=factor, weight=weight, bias=bias,
            middle=middle if keep else None, y=y, inverse=given_inverse(kept, inverse, count), y_kept=y_kept,
            mean=mean, rstd=rstd, count=count, per_sample=count // samples, eps=eps, C=C,
            HAS_ROWS=rows is not None, HAS_BRANCH=branch is not None, HAS_SCALE=scale is not None,
            HAS_FACTOR=factor is not None, HAS_WEIGHT=weight is not None, HAS_BIAS=bias is not None,
            CENTRE=mean is not None, KEEP=keep, HAS_KEPT=kept is not None, **tile(C, 1024),
        )  # fmt: skip
        return Normed(y, middle, mean, rstd, y if kept is None else y_kept)

    def activation(self, h: Tensor, dg: Tensor, name: str, overwrite: bool, *, total: str) -> tuple[Tensor, Tensor]:
        gated = name.removeprefix(GATED)
        if gated != name and gated in ACTIVATION_CODES:
            return self._gated_activation(h, dg, ACTIVATION_CODES[gated], overwrite, total)
        if name not in ACTIVATION_CODES:
            act = activation_named(name)
            g, dh = act.forward(h), act.backward(dg, h)
            self.put(total, dh.sum(0, dtype=torch.float32))
            return g, dh
        count, H = h.shape
        g = h if overwrite else torch.empty_like(h)
        self.launch(
            "activation", (-(-H // ACTIVATION_TILE["BLOCK"]), self.programs),
            h=h, dg=dg, g=g, **self.buffer(total, H), count=count, H=H, CODE=ACTIVATION_CODES[name], **ACTIVATION_TILE,
        )  # fmt: skip
        return g, dg

    def _gated_activation(self, h: Tensor, dg: Tensor, code: int, overwrite: bool, total: str) -> tuple[Tensor, Tensor]:
        count, H = dg.shape
        dh = h if overwrite else torch.empty_like(h)
        self.launch(
            "gated_activation", (-(-H // ACTIVATION_TILE["BLOCK"]), self.programs),
            h=h, dg=dg, dh=dh, **self.buffer(total, 2 * H), count=count, H=H, CODE=code, **ACTIVATION_TILE,
        )  # fmt: skip
        return dg, dh

    def stack(self, *parts: Tensor, apart: Grad = None, total: str) -> Tensor:
        count, C = parts[0].shape
        stacked = torch.empty(count, len(parts) * C, dtype=parts[0].dtype, device=parts[0].device)
        summed = parts if apart is None else (apart, *parts)
        a, b, c = (*summed, None, None)[:3]
        self.launch(
            "stack", (self.programs, len(summed)),
            a=a, b=b, c=c, stacked=stacked, **self.buffer(total, len(summed) * C),
            count_a=summed[0].shape[0], count=count, C=C, PARTS=len(summed), APART=len(summed) - len(parts), **tile(C),
        )  # fmt: skip
        return stacked

    def norm_backward_middle(
        self, dn: Tensor, n: Normed, norm: Affine, dy: Tensor, rows: R.Rows,
        factor: Grad, scale: Grad, samples: int, dtype: torch.dtype, *,
        norm_total: str, total: str, weight: R.Weight = None,
    ) -> tuple[Tensor, Cotangent]:  # fmt: skip
        if norm.static.kind == "none":
            return super().norm_backward_middle(
                dn, n, norm, dy, rows, factor, scale, samples, dtype, norm_total=norm_total, total=total, weight=weight
            )
        half = torch.empty(dn.shape, dtype=dtype, device=dn.device)
        scaled = None if scale is None else torch.empty_like(half)
        middle = self._norm_backward_rows(
            dn, n, norm, dy.dtype, dn.shape[0], norm_total, base=dy, base_rows=rows,
            half=half, scaled=scaled, factor=factor, scale=scale, samples=samples, half_total=total, row=weight,
        )  # fmt: skip
        return middle, Cotangent(half, half if scaled is None else scaled)

    def norm_backward_input(
        self, dn: Tensor, n: Normed, norm: Affine, dtype: torch.dtype, *,
        rows: R.Rows = None, inverse: Grad = None, size: int = 0,
        dn_kept: Grad = None, kept: Grad = None, base: Grad = None, gated: bool = False, norm_total: str,
        overwrite: bool = False,
    ) -> Tensor:  # fmt: skip
        if norm.static.kind == "none":
            return super().norm_backward_input(
                dn, n, norm, dtype, rows=rows, size=size,
                dn_kept=dn_kept, kept=kept, base=base, gated=gated, norm_total=norm_total,
            )  # fmt: skip
        if rows is None:
            base = base if kept is None else kept
            dx = dn if overwrite and dn.dtype == dtype and not compiling() else None
            return self._norm_backward_rows(dn, n, norm, dtype, dn.shape[0], norm_total, base=base, dx=dx)
        return self._norm_backward_rows(
            dn, n, norm, dtype, size, norm_total, inverse=given_inverse(rows, inverse, size),
            dn_kept=dn_kept, kept=kept, base=base, gated=gated,
        )  # fmt: skip

    def _norm_backward_rows(
        self, dn: Tensor, n: Normed, norm: Affine, dtype: torch.dtype, size: int, norm_total: str, *,
        inverse: Grad = None, dn_kept: Grad = None, kept: Grad = None,
        base: Grad = None, base_rows: Grad = None, gated: bool = False,
        half: Grad = None, scaled: Grad = None, factor: Grad = None, scale: Grad = None, samples: int = 1,
        half_total: str = "", row: R.Weight = None, dx: Grad = None,
    ) -> Tensor:  # fmt: skip
        """The kernel leaves sums side by side: of the norm's weight, of its bias, and of ``half`` if there is one.
        If ``dx`` is given, the result is written there; it may be dn."""
        C = dn.shape[1]
        buffer = self.buffer(f"{norm_total}_weight", C)
        self.room(f"{norm_total}_bias", C)
        if half is not None:
            self.room(half_total, C)
        dx = torch.empty(size, C, dtype=dtype, device=dn.device) if dx is None else dx
        self.launch(
            "norm_backward", (self.programs,),
            dn=dn.contiguous(), dn_kept=dn_kept, x=n.x, mean=n.mean, rstd=n.rstd, weight=norm.weight, kept=kept,
            base=None if base is None else base.contiguous(), base_rows=base_rows, inverse=inverse, dx=dx,
            half=half, scaled=scaled, factor=factor, scale=scale, **buffer,
            size=size, per_sample=size // samples, C=C, **row_weight(row),
            HAS_DN_KEPT=dn_kept is not None, HAS_WEIGHT=norm.weight is not None, CENTRE=n.mean is not None,
            HAS_KEPT=kept is not None, HAS_BASE=base is not None, HAS_BASE_ROWS=base_rows is not None,
            HAS_INVERSE=inverse is not None, DENSE=inverse is None or dn_kept is not None, GATED=gated,
            HAS_HALF=half is not None, HAS_FACTOR=factor is not None, HAS_SCALE=scale is not None, **tile(C),
        )  # fmt: skip
        return dx
