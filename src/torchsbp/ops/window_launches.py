"""Attention in windows on a GPU: what each pass allocates, and which kernels of ``window_kernels.py`` it launches."""

from typing import Any

import torch
from torch import Tensor

from .launch import launch
from .rows import by_rows
from .window_attention import Cut, Padding, WindowAttention, WindowGradients

TILE = 64
WARPS = {"num_warps": 4, "num_stages": 2}
PROGRAMS, SAMPLES = 2048, 16  # programs that fill a GPU; the most samples that one takes in turn


class KernelWindowAttention(WindowAttention):
    def launch(self, kernel: str, programs: int, **arguments: Any) -> None:
        """Every kernel is launched here, and only here."""
        launch(kernel, (programs,), **WARPS | arguments)

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor, padding: Padding | None, cut: Cut, scale: float
    ) -> tuple[Tensor, Tensor]:
        batch, heads, n, width = q.shape
        assert cut.places is not None
        windows, area = cut.places.shape
        padding = padding if windows * area > n else None
        q, k, v = by_rows(q), by_rows(k), by_rows(v)
        o = torch.empty(batch, n, heads, width, dtype=q.dtype, device=q.device)
        lse = torch.empty(batch, n, heads, dtype=torch.float32, device=q.device)
        whole = area <= TILE
        samples = samples_of(batch, windows * heads) if whole else 1
        self.launch(
            "window_forward", -(-batch // samples) * windows * heads * -(-area // tile(area)),
            q=q, k=k, v=v, bias=bias.contiguous(), **padding_arguments(padding),
            table=cut.places, regions=cut.regions, o=o, lse=lse,
            q_row=q.stride(2), k_row=k.stride(2), v_row=v.stride(2), n=n,
            heads=heads, windows=windows, batch=batch, samples=samples, scale=scale, AREA=area, D=width,
            HAS_REGIONS=cut.regions is not None, WHOLE=whole, PRECISION=precision(q),
            QUERIES=tile(area), KEYS=tile(area), WIDTH=power(width),
        )  # fmt: skip
        return o.transpose(1, 2), lse.transpose(1, 2)

    def backward(
        self, do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor,
        bias: Tensor, padding: Padding | None, cut: Cut, scale: float, kept_keys: bool, needs_bias: bool,
    ) -> WindowGradients:  # fmt: skip
        assert cut.places is not None
        batch, heads, rows, width = q.shape
        columns, device = k.shape[2], q.device
        windows, area = cut.places.shape
        kept_keys = kept_keys and cut.slots is not None
        padding = None if kept_keys or windows * area == columns else padding
        count_q = area if cut.slots is None else cut.slots.shape[2]
        count_k = count_q if kept_keys else area
        shared = cut.slots is None or cut.slots.shape[0] == 1
        whole = count_q <= TILE and count_k <= TILE
        samples = samples_of(batch, windows * heads) if shared and whole else 1
        beyond = 0 if padding is None else area * windows - columns
        do, q, k, v, o = (by_rows(t) for t in (do, q, k, v, o))

        def empty(*shape: int, dtype: torch.dtype = q.dtype) -> Tensor:
            return torch.empty(*shape, dtype=dtype, device=device)

        dq, dk, dv = (empty(batch, count, heads, width) for count in (rows, columns, columns))
        d_pad_k, d_pad_v = (empty(batch * beyond, heads, width, dtype=torch.float32) if beyond else None for _ in "kv")
        d_bias = torch.zeros(bias.shape, dtype=torch.float32, device=device) if needs_bias else None
        arguments = dict(
            do=do, q=q, k=k, v=v, o=o, lse=lse.transpose(1, 2).contiguous(), bias=bias.contiguous(),
            **padding_arguments(padding),
            table_q=cut.places if cut.kept is None else cut.kept, table_k=cut.kept if kept_keys else cut.places,
            slots=cut.slots, regions=cut.regions, dq=dq, d_bias=d_bias,
            do_row=do.stride(2), q_row=q.stride(2), k_row=k.stride(2), v_row=v.stride(2), o_row=o.stride(2),
            rows=rows, columns=columns, heads=heads, windows=windows, scale=scale,
            AREA=area, COUNT_Q=count_q, COUNT_K=count_k, D=width,
            HAS_REGIONS=cut.regions is not None, KEPT_Q=cut.slots is not None, KEPT_K=kept_keys,
            SHARED=shared, NEEDS_BIAS=needs_bias, PRECISION=precision(q),
            QUERIES=tile(count_q), KEYS=tile(count_k), WIDTH=power(width),
        )  # fmt: skip
        self.launch(
            "window_backward", -(-batch // samples) * windows * heads * -(-count_k // tile(count_k)), **arguments,
            dk=dk, dv=dv, d_pad_k=d_pad_k, d_pad_v=d_pad_v, batch=batch, samples=samples, WHOLE=whole,
        )  # fmt: skip
        if not whole:
            self.launch("window_backward_queries", batch * windows * heads * -(-count_q // tile(count_q)), **arguments)
        pads = None if d_pad_k is None or d_pad_v is None else Padding(d_pad_k.sum(0), d_pad_v.sum(0))
        return WindowGradients(dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2), d_bias, pads)


def padding_arguments(padding: Padding | None) -> dict[str, Any]:
    k, v = (None, None) if padding is None else padding
    return {"pad_k": k, "pad_v": v, "PADDED": padding is not None}


def samples_of(batch: int, programs: int) -> int:
    """How many samples one program takes in turn, if there are ``programs`` for each: enough programs must remain."""
    return max(1, min(SAMPLES, batch * programs // PROGRAMS))


def power(size: int) -> int:
    """The smallest side of a tile that holds so many: a power of two, at least 16."""
    return max(16, 1 << (size - 1).bit_length())


def tile(count: int) -> int:
    return min(TILE, power(count))


def precision(x: Tensor) -> str:
    """The precision of products: float32 ones are exact, as PyTorch's are by default."""
    return "ieee" if x.dtype == torch.float32 else "tf32"
