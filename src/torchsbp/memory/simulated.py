"""A CUDA device simulated with fake CPU tensors: the same operators, buffers and precisions, but nothing is computed.

Where there is no GPU, fake tensors on "cuda" can't run backward. So a step is traced with CPU tensors, and this module
does what a GPU does differently: autocast keeps norms and softmax in float32, attention and dropout have kernels of
their own, SBP's backward passes run Triton kernels, and some operators need workspace while they run.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _get_current_dispatch_mode
from torch.utils._pytree import tree_map

from ..ops.constants import holding
from ..ops.device import CUDA, Result, substituted
from ..ops.graphs import Pass, Tensors, empty, passed, room_for, with_passed
from ..ops.kernel_steps import KernelSteps
from ..ops.layers import HALF
from ..ops.window_launches import KernelWindowAttention
from ..sampling.captures import pack
from .live import Live, capturing, in_graph

aten = torch.ops.aten

PROCESSORS = 132  # multiprocessors of an H100 or H200: the kernels' buffers for sums have four rows for each
CUBLAS = 2 * 32 * 2**20  # fitted to ViT-B on an H200: presumably cuBLAS workspace, for forward's and backward's thread
TILE = 64
PASSES, APART = "passes", "apart"
"""The memory that captured passes share, and that of other graphs, which draw masks."""


class SimulatedSteps(KernelSteps):
    """Allocates what the kernels need and launches none. Needs no Triton."""

    def processors(self, device: torch.device) -> int:
        return PROCESSORS

    def launch(self, kernel: str, grid: tuple[int, ...], **arguments: Any) -> None:
        """Nothing."""


class SimulatedWindowAttention(KernelWindowAttention):
    """The same for attention in windows."""

    def launch(self, kernel: str, programs: int, **arguments: Any) -> None:
        """Nothing."""


class SimulatedDevice(CUDA):
    """A GPU that prefers cuDNN's attention (Hopper and later)."""

    has_triton = True
    kernel_steps = SimulatedSteps
    kernel_windows = SimulatedWindowAttention

    def launch(self, kernel: str, grid: tuple[int, ...], **arguments: Any) -> None:
        """Nothing."""

    def prefers_cudnn(self, q: Tensor) -> bool:
        return True

    def cudnn_overflows(self, q: Tensor, k: Tensor) -> bool:
        """Of no matter here: the kernels need the same memory."""
        return False

    def weight_gradient(self, weight: Tensor, *pairs: tuple[Tensor, Tensor]) -> Tensor:
        """Allocate the gradient in the weight's precision at once."""
        return weight.new_empty(sum(dy.shape[1] for dy, _ in pairs), pairs[0][1].shape[1])

    def capturing(self) -> bool:
        return capturing()

    def run_pass(self, run: Pass, static: Any, given: Tensors) -> tuple[Tensors, Any]:
        """Allocate what a CUDA graph needs: copies of what it is given, its results, and copies of these outside."""
        with in_graph(PASSES):
            places = [empty(t) for t in given]
            results, extra = run(static, places)
        same = passed(results, places)
        found = [None if number in same else empty(t) for number, t in enumerate(results)]
        return with_passed(found, same, given), extra

    def run_apart(self, run: Callable[[], Result]) -> Result:
        """Allocate what the graph needs, and its results packed; what follows has a copy of these."""
        if isinstance(_get_current_dispatch_mode(), Live):
            with in_graph(APART), holding() as constants:
                pack(run(), constants, torch.device("cpu"))
        return run()


DEVICE = SimulatedDevice()


@contextmanager
def gpu() -> Iterator[None]:
    """Treat fake CPU tensors inside as a GPU would."""
    with substituted(DEVICE), SimulatedFunctions():
        yield


class SimulatedFunctions(TorchFunctionMode):
    """Runs PyTorch's own functions as a GPU does, in forward, backward and what is checkpointed."""

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in REPLACED:
            return REPLACED[func](*args, **kwargs)
        if func in WIDE and torch.is_autocast_enabled("cpu"):
            return wide(func, args, kwargs)
        if asks_for_overrides(func):
            with self:  # a mode is off while it handles a function
                return inside(func)(*args, **kwargs)
        return func(*args, **kwargs)


QUESTIONS = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")


def asks_for_overrides(func: Any) -> bool:
    """Return whether a function, such as attention or backward, is written in Python, asks for overrides and then calls
    others.

    A method that calls ``super`` is left out: it calls itself, in C.
    """
    if not isinstance(func, FunctionType) or "super" in func.__code__.co_names:
        return False
    return any(name in func.__code__.co_names and name in func.__globals__ for name in QUESTIONS)


@cache
def inside(func: FunctionType) -> FunctionType:
    """Return the function without its question for overrides, which has been answered; what it calls asks again."""
    names = func.__globals__ | {name: lambda *args: False for name in QUESTIONS}
    result = FunctionType(func.__code__, names, func.__name__, func.__defaults__, func.__closure__)
    result.__kwdefaults__ = func.__kwdefaults__
    return result


def wide(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a function in float32, as CUDA's autocast does."""
    args, kwargs = tree_map(widened, (args, kwargs))
    with torch.autocast("cpu", enabled=False):
        return func(*args, **kwargs)


def widened(x: Any) -> Any:
    return x.float() if isinstance(x, Tensor) and x.dtype in HALF else x


def drop(x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    """Drop elements as CUDA does, which saves a mask of bytes. The CPU saves one in the input's precision."""
    return aten.native_dropout(x, p, True)[0] if training and p > 0 else x


def attend(
    q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0, is_causal: bool = False,
    scale: float | None = None, enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    """Run attention as a GPU does. Kernels that take masks need them expanded, with columns padded to multiples of 16.
    All kernels need ``[B, H, N, D]``, which PyTorch makes of three dimensions, but not of five."""
    if q.dim() == 3:
        q, k, v, attn_mask = (None if x is None else x.unsqueeze(0) for x in (q, k, v, attn_mask))  # type: ignore[assignment]
        return attend(q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa).squeeze(0)
    if torch.is_autocast_enabled("cpu"):
        half = torch.get_autocast_dtype("cpu")
        q, k, v = (x.to(half) for x in (q, k, v))
        attn_mask = attn_mask.to(half) if attn_mask is not None and attn_mask.dtype != torch.bool else attn_mask
    name = "efficient" if attn_mask is not None else DEVICE.attention_kernel(q, fused=True)
    if enable_gqa or name == "plain" or q.dim() != 4:
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
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


REPLACED: dict[Any, Callable[..., Tensor]] = {F.scaled_dot_product_attention: attend, F.dropout: drop}
# What autocast runs in float32 on CUDA, but not on CPU (of its list, what models use).
WIDE_NAMES = (
    *("layer_norm", "native_layer_norm", "rms_norm", "group_norm", "softmax", "log_softmax", "cross_entropy"),
    *("exp", "log", "pow", "rsqrt", "reciprocal", "softplus", "norm", "cumsum", "logsumexp", "interpolate"),
)
WIDE = {getattr(owner, name) for owner in (F, torch, Tensor) for name in WIDE_NAMES if hasattr(owner, name)}


def held(pools: Mapping[str, int]) -> int:
    """Return the bytes that CUDA graphs hold if so many are alive at once in the memory that some of them share."""
    passes = pools[PASSES]
    return (room_for(passes) if passes else 0) + pools[APART]


def workspace(func: Any, args: tuple[Any, ...], result: Any) -> int:
    """Return the bytes that an operator needs while it runs, if they matter. Attention's backward sums dQ in float32;
    the kernel that takes masks does so in tiles of 64 × 64, one per 64 queries of a head."""
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
