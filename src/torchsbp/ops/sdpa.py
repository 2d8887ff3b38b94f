"""Softmax attention with its log-sum-exp, and its backward from any subset of query rows or key rows.

Flash attention's backward takes (dO, Q, K, V, O, L) with L = logsumexp(Q Kᵀ · scale) and recomputes
``P = exp(Q Kᵀ · scale − L)``, ``D = rowsum(dO ∘ O)``. A query takes part only through its own rows of (dO, Q, O, L), a
key only through its own rows of (K, V). So kept rows of (dO, Q, O, L) with all of K and V give rule "query"; with kept
rows of K and V as well they give rule "qkv". The probabilities stay those of the full softmax, because L does.
Shapes: Q ``[B, H, k, D]``, K and V ``[B, H, m, D]``, L ``[B, H, k]``.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .compiling import compiling
from .device import device_of
from .layers import wide
from .operators import laid_out, order_of

aten = torch.ops.aten
Forward = Callable[[Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]]
Backward = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor, Tensor]]


def attend(q: Tensor, k: Tensor, v: Tensor, scale: float, fused: bool = True) -> tuple[Tensor, Tensor]:
    """Return ``O = softmax(Q Kᵀ · scale) V`` and its log-sum-exp L."""
    return KERNELS[device_of(q).attention_kernel(q, fused)].forward(q, k, v, scale)


def attend_backward(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, scale: float, fused: bool = True
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (dQ, dK, dV), summed over the given query and key rows."""
    device = device_of(q)
    if compiling() and device.attention_kernel(k, fused) != "plain":
        return torch.ops.torchsbp.attend_backward(do, q, k, v, o, lse, scale)
    return KERNELS[device.attention_backward_kernel(q, k, fused)].backward(do, q, k, v, o, lse, scale)


# Not torch.library.custom_op: its checks at every call take longer than the launch of a kernel.
torch.library.define(
    "torchsbp::attend_backward",
    "(Tensor do, Tensor q, Tensor k, Tensor v, Tensor o, Tensor lse, float scale) -> (Tensor, Tensor, Tensor)",
)


@torch.library.impl("torchsbp::attend_backward", ("cpu", "cuda"))
def _operator(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """``attend_backward`` for compiled graphs: the layouts that the kernels ask for are made here, not by the compiler
    (which gives cuDNN a log-sum-exp with strides that it refuses)."""
    kernel = KERNELS[device_of(q).attention_backward_kernel(q, k, fused=True)]
    dq, dk, dv = kernel.backward(do, q, k, v, o, lse, scale)
    return rows_first(dq), rows_first(dk), rows_first(dv)


@torch.library.register_fake("torchsbp::attend_backward")
def _shapes(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    return rows_first(torch.empty_like(q)), rows_first(torch.empty_like(k)), rows_first(torch.empty_like(v))


def rows_first(x: Tensor) -> Tensor:
    """Return ``x [B, H, N, D]`` with the memory layout ``[B, N, H, D]``: rows with their heads side by side."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


class Kernel(NamedTuple):
    """``forward(q, k, v, scale) -> (o, lse)`` and ``backward(do, q, k, v, o, lse, scale) -> (dq, dk, dv)``."""

    forward: Forward
    backward: Backward


def _cpu(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    return aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, scale=scale)


def _cpu_backward(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    return aten._scaled_dot_product_flash_attention_for_cpu_backward(do, q, k, v, o, lse, 0.0, False, scale=scale)


def _flash(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    o, lse, *_ = aten._scaled_dot_product_flash_attention(q, k, v, scale=scale)
    return o, lse


def _flash_backward(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    seed = torch.empty((2,), dtype=torch.uint64, device=q.device)  # of dropout, which is not used
    unused = torch.empty((), dtype=torch.uint64, device=q.device)
    rows, keys = q.shape[-2], k.shape[-2]
    return aten._scaled_dot_product_flash_attention_backward(
        do, q, k, v, o, lse.contiguous(), None, None, rows, keys, 0.0, False, seed, unused, scale=scale
    )


def _cudnn(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    o, lse, *_ = aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, scale=scale)
    return o, lse.squeeze(-1)


def _cudnn_backward(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """PyTorch caches cuDNN's graphs by the strides of q, k and v alone, since in its own forward the strides of o
    follow from q's. With other strides, o would be misread by a graph that plain training has cached, so it is laid
    out as q (which does not lie row by row if it was normalised)."""
    seed = torch.empty((), dtype=torch.int64, device=q.device)
    rows, keys, lse = q.shape[-2], k.shape[-2], lse.contiguous().unsqueeze(-1)
    return aten._scaled_dot_product_cudnn_attention_backward(
        do, q, k, v, laid_out(o, order_of(q)), lse, seed, seed, None, None, None, rows, keys, 0.0, False, scale=scale
    )


def _efficient(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    o, lse, *_ = aten._scaled_dot_product_efficient_attention(q, k, v, None, True, scale=scale)
    return o, lse[..., : q.shape[-2]]


def _efficient_backward(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    seed = torch.empty((), dtype=torch.int64, device=q.device)
    padded = F.pad(lse, (0, -lse.shape[-1] % 32), value=torch.inf)  # the kernel reads L in steps of 32 rows
    mask = [True, True, True, False]
    dq, dk, dv, _ = aten._scaled_dot_product_efficient_attention_backward(
        do, q, k, v, None, o, padded, seed, seed, 0.0, mask, False, scale=scale
    )
    return dq, dk, dv


def _plain(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    scores = (q * scale) @ k.transpose(-2, -1)
    return scores.softmax(-1) @ v, wide(scores).logsumexp(-1)


def _plain_backward(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    p = torch.exp(wide((q * scale) @ k.transpose(-2, -1)) - lse.unsqueeze(-1)).to(q.dtype)
    dv = p.transpose(-2, -1) @ do
    ds = p * (do @ v.transpose(-2, -1) - (do * o).sum(-1, keepdim=True)) * scale
    return ds @ k, ds.transpose(-2, -1) @ q, dv


KERNELS = {
    "cpu": Kernel(_cpu, _cpu_backward),
    "flash": Kernel(_flash, _flash_backward),
    "cudnn": Kernel(_cudnn, _cudnn_backward),
    "efficient": Kernel(_efficient, _efficient_backward),
    "plain": Kernel(_plain, _plain_backward),
}
