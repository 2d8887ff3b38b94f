"""Softmax attention with its log-sum-exp, and its backward from any subset of query rows or key rows.

Flash attention's backward takes (dO, Q, K, V, O, L) with L = logsumexp(Q Kᵀ · scale) and recomputes
``P = exp(Q Kᵀ · scale − L)``, ``D = rowsum(dO ∘ O)``. Every row of Q stands for itself, so kept rows of (dO, Q, O, L)
with all of K and V give rule "query"; with kept rows of K and V as well they give rule "qkv". The probabilities stay
those of the full softmax, because L does. Shapes: Q ``[B, H, k, D]``, K and V ``[B, H, m, D]``, L ``[B, H, k]``.
"""

import torch
import torch.nn.attention
import torch.nn.functional as F
from torch import Tensor

aten = torch.ops.aten
HALF = (torch.float16, torch.bfloat16)


def kernel(q: Tensor, fused: bool) -> str:
    """Which kernel ``F.scaled_dot_product_attention`` takes for such a query when no mask is given."""
    device, width = q.device.type, q.shape[-1]
    if not fused:
        return "plain"
    if device == "cpu":
        return "cpu"
    if device == "cuda" and q.dtype in HALF and width % 8 == 0 and width <= 256:
        return "cudnn" if width <= 128 and _prefers_cudnn(q.device.index or 0) else "flash"
    if device == "cuda" and q.dtype == torch.float32 and width % 4 == 0:
        return "efficient"
    return "plain"


_PREFERS_CUDNN: dict[int, bool] = {}


@torch.compiler.assume_constant_result
def _prefers_cudnn(device: int) -> bool:
    """Whether PyTorch prefers cuDNN's attention on this GPU (newer ones), asked once on a small query."""
    if device not in _PREFERS_CUDNN:
        q = torch.empty(1, 1, 64, 64, dtype=torch.bfloat16, device=f"cuda:{device}")
        choice = torch._fused_sdp_choice(q, q, q)
        _PREFERS_CUDNN[device] = choice == torch.nn.attention.SDPBackend.CUDNN_ATTENTION.value
    return _PREFERS_CUDNN[device]


def attend(q: Tensor, k: Tensor, v: Tensor, scale: float, fused: bool = True) -> tuple[Tensor, Tensor]:
    """``O = softmax(Q Kᵀ · scale) V`` and L."""
    name = kernel(q, fused)
    if name == "cpu":
        return aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, scale=scale)
    if name == "flash":
        out = aten._scaled_dot_product_flash_attention(q, k, v, scale=scale)
        return out[0], out[1]
    if name == "cudnn":
        out = aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, scale=scale)
        return out[0], out[1].squeeze(-1)
    if name == "efficient":
        out = aten._scaled_dot_product_efficient_attention(q, k, v, None, True, scale=scale)
        return out[0], out[1][..., : q.shape[-2]]
    scores = (q * scale) @ k.transpose(-2, -1)
    return scores.softmax(-1) @ v, _wide(scores).logsumexp(-1)


def attend_backward(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, scale: float, fused: bool = True
) -> tuple[Tensor, Tensor, Tensor]:
    """(dQ, dK, dV) from the given query and key rows."""
    if torch.compiler.is_compiling() and kernel(q, fused) != "plain":
        return torch.ops.torchsbp.attend_backward(do, q, k, v, o, lse, scale)
    return _attend_backward(do, q, k, v, o, lse, scale, fused)


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
    dq, dk, dv = _attend_backward(do, q, k, v, o, lse, scale, True)
    return rows_first(dq), rows_first(dk), rows_first(dv)


@torch.library.register_fake("torchsbp::attend_backward")
def _shapes(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    return rows_first(torch.empty_like(q)), rows_first(torch.empty_like(k)), rows_first(torch.empty_like(v))


def rows_first(x: Tensor) -> Tensor:
    """``[B, H, N, D]`` that lies in memory as ``[B, N, H, D]``: rows with their heads side by side."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def _attend_backward(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, scale: float, fused: bool
) -> tuple[Tensor, Tensor, Tensor]:
    name = kernel(q, fused)
    if name == "cpu":
        return aten._scaled_dot_product_flash_attention_for_cpu_backward(do, q, k, v, o, lse, 0.0, False, scale=scale)
    if name == "flash":
        seed = torch.empty((2,), dtype=torch.uint64, device=q.device)  # of dropout, which there is none
        unused = torch.empty((), dtype=torch.uint64, device=q.device)
        rows, keys = q.shape[-2], k.shape[-2]
        return aten._scaled_dot_product_flash_attention_backward(
            do, q, k, v, o, lse.contiguous(), None, None, rows, keys, 0.0, False, seed, unused, scale=scale
        )
    if name == "cudnn":
        seed = torch.empty((), dtype=torch.int64, device=q.device)
        rows, keys, lse = q.shape[-2], k.shape[-2], lse.contiguous().unsqueeze(-1)
        return aten._scaled_dot_product_cudnn_attention_backward(
            do, q, k, v, o, lse, seed, seed, None, None, None, rows, keys, 0.0, False, scale=scale
        )
    if name == "efficient":
        seed = torch.empty((), dtype=torch.int64, device=q.device)
        # The kernel reads L in steps of 32 rows.
        padded = F.pad(lse, (0, -lse.shape[-1] % 32), value=torch.inf)
        mask = [True, True, True, False]
        return aten._scaled_dot_product_efficient_attention_backward(
            do, q, k, v, None, o, padded, seed, seed, 0.0, mask, False, scale=scale
        )[:3]
    p = torch.exp(_wide((q * scale) @ k.transpose(-2, -1)) - lse.unsqueeze(-1)).to(q.dtype)
    dv = p.transpose(-2, -1) @ do
    ds = p * (do @ v.transpose(-2, -1) - (do * o).sum(-1, keepdim=True)) * scale
    return ds @ k, ds.transpose(-2, -1) @ q, dv


def _wide(x: Tensor) -> Tensor:
    return x.float() if x.dtype in HALF else x
