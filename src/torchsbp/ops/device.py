"""Devices: which attention kernel, steps and precision an op uses. Every op asks the device of its tensors.

``substituted`` makes another device stand in for all of them: that is how memory is predicted for a GPU without one.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.attention
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from . import rows as R
from .chosen import Chosen, choose, prefix_of
from .compiling import compiling, constant_for_dynamo, read_to_be_captured
from .graphs import LARGEST, Pass, Result, Tensors, measuring, run_pass
from .kernel_steps import CHOSEN_AMONG, KernelSteps, choose_rows, keep_rows, rotated, scaled_last_layer, take_rows
from .launch import launch
from .layers import HALF, BackwardOptions, Grad, LastLayer, cast, last_layer_gradients, stacked
from .operators import named_pass
from .rotary import rotate, rotate_backward
from .steps import Steps
from .window_attention import WindowAttention
from .window_launches import KernelWindowAttention

Size = tuple[int, int]
WIDEST = 8192  # channels: a program of a kernel holds whole rows


class Device:
    """Any device: everything in plain PyTorch."""

    def attention_kernel(self, q: Tensor, fused: bool) -> str:
        """The name in ``sdpa.KERNELS`` of the kernel for queries like q: in a ``fused`` model, the one that
        ``F.scaled_dot_product_attention`` takes when no mask is given."""
        return "plain"

    def attention_backward_kernel(self, q: Tensor, k: Tensor, fused: bool) -> str:
        """The name of the kernel for the backward pass from queries like q to keys like k. It may be another one than
        forward's, since all of them mean the same by O and L."""
        return self.attention_kernel(k, fused)

    def windows(self, q: Tensor) -> WindowAttention:
        """The implementation of attention in windows for queries like q."""
        return WindowAttention()

    def rotate(
        self, x: Tensor, rope: Tensor, rows: R.Rows, half: bool, back: bool = False, overwrite: bool = False
    ) -> Tensor:
        """Rotate queries or keys by rotary embeddings, or rotate their gradients ``back``. With ``overwrite``, x may be
        overwritten."""
        return (rotate_backward if back else rotate)(x, rope, rows, half)

    def steps(self, x: Tensor, columns: int) -> Steps:
        """The steps of a backward pass over rows like x's; their totals have ``columns`` columns together."""
        return Steps(x, columns)

    def cast(self, dtype: torch.dtype | None, *tensors: Grad | tuple[Tensor, ...], after: Grad = None) -> list[Any]:
        """Cast tensors to ``dtype`` (None: keep theirs). A tuple becomes one tensor, its parts concatenated by rows.

        In backward, ``after`` is a cotangent, on which the casts depend when compiled: else the compiler would save
        what forward has cast, although to cast a matrix again costs little."""
        zero = R.zero_of(after) if after is not None and compiling() else None

        def again(t: Tensor) -> Tensor:
            return t if zero is None or t.dim() == 1 or dtype in (None, t.dtype) else t + zero.to(t.dtype)

        found = (stacked([cast(again(part), dtype) for part in t]) if isinstance(t, tuple) else t for t in tensors)
        return [t if t is None else cast(again(t), dtype) for t in found]

    def weight_gradient(self, weight: Tensor, *pairs: tuple[Tensor, Tensor]) -> Tensor:
        """``dW = dyᵀ x`` (Eq. 3) for 2-D dy and x, in the precision of the weight; the products of several
        pairs are concatenated by rows."""
        products = [cast(dy.t() @ x, weight.dtype) for dy, x in pairs]
        return products[0] if len(products) == 1 else torch.cat(products)

    def convolution_backward(
        self, dy: Tensor, x: Tensor, weight: Tensor, padding: Size, dilation: Size, groups: int, needs: Sequence[bool]
    ) -> tuple[Any, Grad, Grad]:
        """Gradients of x, weight and bias, where needed, of a convolution that keeps the size of x."""
        return torch.ops.aten.convolution_backward(
            dy, x, weight, [weight.shape[0]], [1, 1], padding, dilation, False, [0, 0], groups, needs
        )

    def last_layer(self, product: Grad, total: Tensor, weight: Tensor, bias: Grad, scale: Grad) -> LastLayer:
        """Gradients of a branch's last layer; the product may be overwritten."""
        return last_layer_gradients(product, total, weight, bias, scale)

    def save_rows(self, x: Tensor, rows: R.Rows, dtype: torch.dtype | None = None) -> Tensor:
        """The given rows of x, ``[R, C]``, to be saved for backward in ``dtype``."""
        return cast(R.take(x, rows), dtype)

    def save_attention(
        self, x: Tensor, o: Tensor, lse: Tensor, rows: R.Rows, dtype: torch.dtype, x_rows: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        """What to save of an attention on ``x [B, N, C]``: x in ``dtype``, all rows or (``x_rows``) the given ones; and
        the given rows of its output ``o [B, N, H * D]``, ``[R, H * D]``, and of ``lse [B, H, N]``, ``[B, H, k]``."""
        kept_x = self.save_rows(x, rows if x_rows else None, dtype)
        if rows is not None:
            samples, heads, _ = lse.shape
            lse = R.take(lse.transpose(1, 2), rows).view(samples, -1, heads).transpose(1, 2)
        return kept_x, self.save_rows(o, rows), lse

    def run_pass(self, run: Pass, static: Any, given: Tensors) -> tuple[Tensors, Any]:
        """Run a forward or backward pass of an op."""
        return run(static, given)

    def run_apart(self, run: Callable[[], Result]) -> Result:
        """Run what a GPU replays from a CUDA graph that has memory of its own; here simply run it."""
        return run()

    def capturing(self) -> bool:
        """Whether this pass is captured in a CUDA graph, or will be: launches are cheap there, but memory is held."""
        return False

    def inverse(self, rows: Tensor, size: int) -> Grad:
        """The inverse of kept rows among ``size`` rows, made once for all ops; None if the steps don't read it."""
        return None

    def choose(self, dy: Tensor, marks: Tensor, options: BackwardOptions) -> Chosen:
        """Choose the rows of ``dy [B * N, C]`` on which the marks ``[B, k]`` lie."""
        chosen = choose(dy, marks, prefix_of(options))
        return chosen._replace(inverse=self.inverse(chosen.rows, dy.shape[0]))


class CPU(Device):
    def attention_kernel(self, q: Tensor, fused: bool) -> str:
        return "cpu" if fused else "plain"


class CUDA(Device):
    """A GPU: PyTorch's attention kernels, our Triton kernels for the steps."""

    has_triton = find_spec("triton") is not None
    kernel_steps: type[KernelSteps] = KernelSteps
    kernel_windows: type[KernelWindowAttention] = KernelWindowAttention

    def attention_kernel(self, q: Tensor, fused: bool) -> str:
        width = q.shape[-1]
        if not fused:
            return "plain"
        if q.dtype in HALF and width % 8 == 0 and width <= 256:
            return "cudnn" if width <= 128 and self.prefers_cudnn(q) else "flash"
        return "efficient" if q.dtype == torch.float32 and width % 4 == 0 else "plain"

    def attention_backward_kernel(self, q: Tensor, k: Tensor, fused: bool) -> str:
        name = super().attention_backward_kernel(q, k, fused)
        return "flash" if name == "cudnn" and self.cudnn_overflows(q, k) else name

    def prefers_cudnn(self, q: Tensor) -> bool:
        rows = q.shape[-2]
        return _prefers_cudnn(q.device.index or 0, rows if type(rows) is int else COMMON_ROWS)

    def cudnn_overflows(self, q: Tensor, k: Tensor) -> bool:
        """Whether cuDNN gives NaN in backward if all scores of a query are below −88, by the exponential of what fills
        up a tile: for a single query (NVIDIA/cudnn-frontend#1072); on Hopper, before version 9.26, for 64 keys in the
        last tile of 128 (pytorch/pytorch#196678)."""
        return q.shape[-2] == 1 or (k.shape[-2] % 128 == 64 and _cudnn_overflows(k.device.index or 0))

    def fits(self, x: Tensor) -> bool:
        """Whether Triton is installed, and its kernels can take rows like x's."""
        return self.has_triton and x.dtype != torch.float64 and x.shape[-1] <= WIDEST and x.numel() > 0

    def windows(self, q: Tensor) -> WindowAttention:
        """Not in Triton if results must be deterministic: its kernels add up the bias's gradient in any order."""
        fits = self.has_triton and q.dtype != torch.float64 and not torch.are_deterministic_algorithms_enabled()
        return self.kernel_windows() if fits else WindowAttention()

    def rotate(
        self, x: Tensor, rope: Tensor, rows: R.Rows, half: bool, back: bool = False, overwrite: bool = False
    ) -> Tensor:
        if not (self.fits(x) and rope.dim() <= 3 and x.shape[1] * x.shape[3] <= WIDEST):
            return super().rotate(x, rope, rows, half, back)
        return rotated(self.launch, x, rope, rows, half, back, overwrite and not compiling())

    def launch(self, kernel: str, grid: tuple[int, ...], **arguments: Any) -> None:
        """Launch a kernel outside of ``KernelSteps``."""
        launch(kernel, grid, **arguments)

    def steps(self, x: Tensor, columns: int) -> Steps:
        return self.kernel_steps(x, columns) if self.fits(x) else Steps(x, columns)

    def weight_gradient(self, weight: Tensor, *pairs: tuple[Tensor, Tensor]) -> Tensor:
        """Products of half-precision matrices are returned in float32, as they are accumulated, without a rounding in
        between; those of several pairs are written to their place in the result."""
        if pairs[0][0].dtype not in HALF or weight.dtype != torch.float32:
            return super().weight_gradient(weight, *pairs)
        if len(pairs) == 1 or compiling():
            products = [torch.mm(dy.t(), x, out_dtype=torch.float32) for dy, x in pairs]
            return products[0] if len(products) == 1 else torch.cat(products)
        sizes = [dy.shape[1] for dy, _ in pairs]
        found = weight.new_empty(sum(sizes), weight.shape[1])
        for (dy, x), place in zip(pairs, found.split_with_sizes(sizes), strict=True):
            torch.mm(dy.t(), x, out_dtype=torch.float32, out=place)
        return found

    def convolution_backward(
        self, dy: Tensor, x: Tensor, weight: Tensor, padding: Size, dilation: Size, groups: int, needs: Sequence[bool]
    ) -> tuple[Any, Grad, Grad]:
        """The input's gradient of a depthwise convolution is taken as a convolution with the flipped weight: cuDNN's
        kernel for it takes twice as long as its forward's (ConvNeXt-T on an H200, `run.py --profile`: 4.8, 2.3 ms)."""
        if not (needs[0] and x.numel()) or weight.shape[:2] != (groups, 1):
            return super().convolution_backward(dy, x, weight, padding, dilation, groups, needs)
        dx = F.conv2d(dy, weight.flip(2, 3), None, 1, padding, dilation, groups)
        others = False, *needs[1:]
        if not any(others):
            return dx, None, None
        at_once = x.shape[0] if compiling() else max(1, self.convolved_at_once() * x.shape[0] // x.numel())
        found = [
            super(CUDA, self).convolution_backward(*part, weight, padding, dilation, groups, others)[1:]
            for part in zip(dy.split(at_once), x.split(at_once), strict=True)
        ]
        dw, db = (sum_of(parts) if needed else None for needed, *parts in zip(needs[1:], *found, strict=True))
        return dx, dw, db

    def convolved_at_once(self) -> int:
        """How many elements of x to take at once for the gradient of a depthwise convolution's weight: meanwhile cuDNN
        has copies of x and dy in float32. Fewer in a CUDA graph, which holds that memory and launches at no cost."""
        return LARGEST // 8 if self.capturing() else LARGEST

    def cast(self, dtype: torch.dtype | None, *tensors: Grad | tuple[Tensor, ...], after: Grad = None) -> list[Any]:
        """In one kernel, unless compiled."""
        if compiling():
            return super().cast(dtype, *tensors, after=after)
        found: list[Any] = []
        places: list[Tensor] = []
        sources: list[Tensor] = []
        for given in tensors:
            first, *others = given if isinstance(given, tuple) else (given,)
            if first is None or (not others and dtype in (None, first.dtype)):
                found.append(first)
                continue
            sizes = [part.shape[0] for part in (first, *others)]
            made = first.new_empty(sum(sizes), *first.shape[1:], dtype=dtype)
            found.append(made)
            places += made.split_with_sizes(sizes)
            sources += first, *others
        if places:
            torch._foreach_copy_(places, sources)
        return found

    def last_layer(self, product: Grad, total: Tensor, weight: Tensor, bias: Grad, scale: Grad) -> LastLayer:
        if product is None or scale is None or not self.has_triton or product.dtype == torch.float64:
            return super().last_layer(product, total, weight, bias, scale)
        return scaled_last_layer(self.launch, product, total, weight, bias, scale)

    def save_rows(self, x: Tensor, rows: R.Rows, dtype: torch.dtype | None = None) -> Tensor:
        """Compiled, by a kernel of our own: left to itself, the compiler gathers the rows of several blocks in one
        kernel behind the last of them, and holds all of x of all these blocks until then."""
        if rows is None or not (compiling() and self.fits(x)):
            return super().save_rows(x, rows, dtype)
        return take_rows(R.flat(x).contiguous(), rows, dtype or x.dtype)

    def save_attention(
        self, x: Tensor, o: Tensor, lse: Tensor, rows: R.Rows, dtype: torch.dtype, x_rows: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        """In one kernel, unless compiled: then the compiler casts all of x where it is made."""
        if rows is None or compiling() or not (self.fits(x) and self.fits(o)):
            return super().save_attention(x, o, lse, rows, dtype, x_rows)
        return keep_rows(self.launch, x, o, lse, rows, dtype, x_rows)

    def run_pass(self, run: Pass, static: Any, given: Tensors) -> tuple[Tensors, Any]:
        """Run the pass by a CUDA graph, once there is one; in a compiled step, as an operator that does so."""
        if compiling():
            return named_pass(run, static, given)
        return run_pass(run, static, given, given[0].device)

    def capturing(self) -> bool:
        if compiling():
            return read_to_be_captured()
        return torch.cuda.is_current_stream_capturing() or measuring()

    def inverse(self, rows: Tensor, size: int) -> Grad:
        return R.inverse(rows, size)

    def choose(self, dy: Tensor, marks: Tensor, options: BackwardOptions) -> Chosen:
        """In two kernels, if a program can hold all rows of a sample."""
        among = dy.shape[0] // marks.shape[0]
        if not self.fits(dy) or type(among) is not int or among > CHOSEN_AMONG:
            return super().choose(dy, marks, options)
        return choose_rows(self.launch, dy, marks, prefix_of(options))


def sum_of(parts: Sequence[Tensor]) -> Tensor:
    wide = torch.promote_types(parts[0].dtype, torch.float32)
    return parts[0] if len(parts) == 1 else torch.stack(tuple(parts)).sum(0, dtype=wide)


_PREFERS_CUDNN: dict[Size, bool] = {}
COMMON_ROWS = 128
"""What PyTorch is asked about where the number of rows is not known, in steps compiled for dynamic sizes."""


@constant_for_dynamo
def _prefers_cudnn(device: int, rows: int) -> bool:
    """Whether PyTorch prefers cuDNN's attention on this GPU, as on newer ones, for so many rows; asked once, with a
    small query that is trained."""
    if (device, rows) not in _PREFERS_CUDNN:
        with _disable_current_modes(), torch.enable_grad():  # modes such as a compiler's, whose tensors have no data
            q = torch.empty(1, 1, rows, 64, dtype=torch.bfloat16, device=f"cuda:{device}", requires_grad=True)
            choice = torch._fused_sdp_choice(q, q, q)
        _PREFERS_CUDNN[device, rows] = choice == torch.nn.attention.SDPBackend.CUDNN_ATTENTION.value
    return _PREFERS_CUDNN[device, rows]


@cache
def _cudnn_overflows(device: int) -> bool:
    return torch.cuda.get_device_capability(device) == (9, 0) and (torch.backends.cudnn.version() or 0) < 92600


CPU_DEVICE, CUDA_DEVICE, OTHER_DEVICE = CPU(), CUDA(), Device()
_substitute: Device | None = None


def device_of(x: Tensor) -> Device:
    """The device of a tensor, or the one that stands in for it."""
    if _substitute is not None:
        return _substitute
    return CPU_DEVICE if x.is_cpu else CUDA_DEVICE if x.is_cuda else OTHER_DEVICE


def weight_gradient(dy: Tensor, x: Tensor, weight: Tensor, need: bool) -> Grad:
    """``dW = dyᵀ x`` where it is needed."""
    return device_of(dy).weight_gradient(weight, (dy, x)) if need else None


@contextmanager
def substituted(device: Device) -> Iterator[None]:
    """Inside, every op asks the given device, wherever its tensors are: in all threads, as backward runs in its own."""
    global _substitute
    before, _substitute = _substitute, device
    try:
        yield
    finally:
        _substitute = before
