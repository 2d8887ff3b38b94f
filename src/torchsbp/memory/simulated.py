"""A CUDA device stood in for by fake CPU tensors: the same operators, buffers and precisions, nothing computed.

Fake tensors can't say "cuda" and run backward where there is no GPU. So a step is traced with CPU tensors, and here is
what a GPU would do otherwise: autocast keeps norms and softmax in float32, attention and dropout have kernels of their
own, SBP's backward passes run Triton kernels, and some operators need workspace while they run.
"""

import importlib.util
import math
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import cache, wraps
from types import ModuleType
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_map

from .. import masks
from ..ops import attention, block, downsample, mlp, sdpa, steps
from ..ops import rows as R

aten = torch.ops.aten
sdpa_of_torch = F.scaled_dot_product_attention

PROCESSORS = 132  # of an H100 or H200: the kernels' buffers for sums are that many times four rows
CUBLAS = 2 * 32 * 2**20  # fitted on ViT-B on an H200; presumably cuBLAS workspace, forward's and backward's thread
HALF = (torch.float16, torch.bfloat16)
TILE = 64
# What autocast gives in float32 on CUDA, but not on CPU (of its list, what models use).
WIDE = {
    *("layer_norm", "native_layer_norm", "rms_norm", "group_norm", "softmax", "log_softmax", "cross_entropy"),
    *("exp", "log", "pow", "rsqrt", "reciprocal", "softplus", "norm", "cumsum", "logsumexp", "interpolate"),
}


def wide(function: Any) -> Any:
    """The function as CUDA's autocast runs it: in float32."""

    @wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_autocast_enabled("cpu"):
            return function(*args, **kwargs)
        args, kwargs = tree_map(widened, (args, kwargs))
        with torch.autocast("cpu", enabled=False):
            return function(*args, **kwargs)

    return run


def widened(x: Any) -> Any:
    return x.float() if isinstance(x, Tensor) and x.dtype in HALF else x


def drop(x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    """CUDA keeps a mask of one byte, CPU one of the input's precision."""
    return aten.native_dropout(x, p, True)[0] if training and p > 0 else x


def attend(
    q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0, is_causal: bool = False,
    scale: float | None = None, enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    """The kernels that take masks want them whole, with columns in multiples of 16."""
    if torch.is_autocast_enabled("cpu"):
        half = torch.get_autocast_dtype("cpu")
        q, k, v = (x.to(half) for x in (q, k, v))
        attn_mask = attn_mask.to(half) if attn_mask is not None and attn_mask.dtype != torch.bool else attn_mask
    name = "efficient" if attn_mask is not None else kernel(q, True)
    if enable_gqa or name == "plain":
        return sdpa_of_torch(q, k, v, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    if attn_mask is not None:
        if attn_mask.dtype == torch.bool:
            attn_mask = torch.zeros_like(attn_mask, dtype=q.dtype)
        columns = attn_mask.shape[-1]
        attn_mask = F.pad(attn_mask, (0, -columns % 16))[..., :columns]
        attn_mask = attn_mask.expand(*q.shape[:-1], k.shape[-2])
    if name == "efficient":
        return aten._scaled_dot_product_efficient_attention(
            q, k, v, attn_mask, True, dropout_p, is_causal, scale=scale
        )[0]
    if name == "cudnn":
        return aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, dropout_p, is_causal, scale=scale)[0]
    return aten._scaled_dot_product_flash_attention(q, k, v, dropout_p, is_causal, scale=scale)[0]


def kernel(q: Tensor, fused: bool) -> str:
    """``ops.sdpa.kernel`` on a GPU that prefers cuDNN's attention (Hopper and later)."""
    width = q.shape[-1]
    if not fused:
        return "plain"
    if q.dtype in HALF and width % 8 == 0 and width <= 256:
        return "cudnn" if width <= 128 else "flash"
    return "efficient" if q.dtype == torch.float32 and width % 4 == 0 else "plain"


def workspace(func: Any, args: tuple[Any, ...], result: Any) -> int:
    """Bytes that an operator needs while it runs, where they matter: attention's backward sums dQ in float32, the
    kernel that takes masks in tiles of 64 × 64 for as many queries of a head."""
    if func in SUMMING_QUERIES:
        do = args[0]
        return 4 * do.numel()
    if func is aten._scaled_dot_product_efficient_attention_backward.default and args[0].dtype in HALF:
        *heads, queries, _ = args[0].shape
        return 4 * math.prod(heads) * -(-queries // TILE) * TILE * TILE
    return 0


SUMMING_QUERIES = (
    aten._scaled_dot_product_cudnn_attention_backward.default,
    aten._scaled_dot_product_flash_attention_backward.default,
)


class NoLaunch:
    """A kernel whose launch does nothing."""

    def __getitem__(self, grid: Any) -> Any:
        return lambda *args, **kwargs: None


@cache
def kernels() -> ModuleType:
    """A second copy of ``ops.kernels`` that allocates what the kernels need and launches none. Needs no Triton."""
    triton, language = ModuleType("triton"), ModuleType("triton.language")
    triton.jit, triton.language = lambda function: NoLaunch(), language  # type: ignore[attr-defined]
    language.constexpr = int  # type: ignore[attr-defined]
    found = importlib.util.find_spec("torchsbp.ops.kernels")
    assert found is not None
    assert found.origin is not None
    spec = importlib.util.spec_from_file_location("torchsbp.ops.kernels_not_launched", found.origin)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with patch.dict(sys.modules, {"triton": triton, "triton.language": language}):
        spec.loader.exec_module(module)
    module.processors = lambda device: PROCESSORS  # type: ignore[attr-defined]
    return module


def steps_for(x: Tensor, columns: int) -> steps.Steps:
    fits = x.dtype != torch.float64 and x.shape[-1] <= steps.WIDEST
    return kernels().TritonSteps(x, columns) if fits else steps.Steps(x, columns)


def weight_gradient(dy: Tensor, x: Tensor, weight: Tensor, need: bool = True) -> Tensor | None:
    """In the weight's precision at once."""
    return torch.empty(dy.shape[1], x.shape[1], dtype=weight.dtype) if need else None


def places(self: masks.Masks, rows: Tensor | None, stage: int) -> Tensor | None:
    return None if rows is None else R.places(rows, self.batch * self.positions(stage))


def replacements() -> Iterator[tuple[Any, str, Any]]:
    """(module or class, name, what stands there on a GPU)."""
    for owner in (F, torch, Tensor):
        for name in WIDE:
            if hasattr(owner, name):
                yield owner, name, wide(getattr(owner, name))
    yield F, "scaled_dot_product_attention", attend
    yield F, "dropout", drop
    for module in (attention, block, downsample, mlp):
        for function in (steps_for, weight_gradient):
            if hasattr(module, function.__name__):
                yield module, function.__name__, function
    yield sdpa, "kernel", kernel
    yield masks.Masks, "_places", places


@contextmanager
def pretend() -> Iterator[None]:
    """Inside, fake CPU tensors are treated as a GPU would."""
    with ExitStack() as stack:
        for owner, name, value in list(replacements()):
            stack.enter_context(patch.object(owner, name, value))
        yield
