"""Random parameters, kept rows and comparisons shared by the op tests."""

from typing import TypeVar

import torch
from torch import Tensor

from torchsbp.ops.downsample import DownsampleParams
from torchsbp.ops.heads import AttentionParams
from torchsbp.ops.mlp import MLPParams

RATIOS = (1.0, 0.75, 0.5, 0.25, 0.1)


def param(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return (torch.randn(*shape, dtype=dtype) * 0.5).requires_grad_()


def mlp_params(
    c: int, hidden: int, *, bias: bool = True, scale: bool = True, gated: bool = False, inner_norm: bool = False, **kw
) -> MLPParams:
    def b(n: int) -> Tensor | None:
        return param(n, **kw) if bias else None

    width = 2 * hidden if gated else hidden
    return MLPParams(
        param(c, **kw), b(c), param(width, c, **kw), b(width), param(c, hidden, **kw), b(c),
        param(c, **kw) if scale else None, *((param(hidden, **kw), b(hidden)) if inner_norm else ()),
    )  # fmt: skip


def attention_params(
    c: int, heads: int, *, bias: bool = True, scale: bool = True, qk_norm: bool = False, **kw
) -> AttentionParams:
    def b(n: int) -> Tensor | None:
        return param(n, **kw) if bias else None

    d = c // heads
    qk = [param(d, **kw), b(d), param(d, **kw), b(d)] if qk_norm else [None] * 4
    return AttentionParams(
        param(c, **kw), b(c), param(3 * c, c, **kw), b(3 * c), *qk, param(c, c, **kw), b(c),
        param(c, **kw) if scale else None,
    )  # fmt: skip


Branch = TypeVar("Branch", AttentionParams, MLPParams)


def post_norm(p: Branch) -> Branch:
    """The norm behind the branch instead of before it, and no layer scale."""
    weight, bias = p.norm_weight, p.norm_bias
    return p._replace(norm_weight=None, norm_bias=None, post_norm_weight=weight, post_norm_bias=bias, scale=None)


def downsample_params(c: int, out: int, kernel: int, *, bias: bool = True, **kw) -> DownsampleParams:
    b = param(c, **kw) if bias else None
    return DownsampleParams(param(c, **kw), b, param(out, c, kernel, kernel, **kw), param(out, **kw) if bias else None)


def kept_rows(samples: int, n: int, ratio: float, shared: bool = False) -> Tensor | None:
    """``round(ratio * n)`` rows of each sample; None at ratio 1."""
    if ratio == 1:
        return None
    k = round(ratio * n)
    draws = [torch.randperm(n)[:k].sort().values for _ in range(1 if shared else samples)]
    return torch.cat([draws[b % len(draws)] + b * n for b in range(samples)])


def gradients(y: Tensor, dy: Tensor, inputs) -> list[Tensor | None]:
    used = [t for t in inputs if t is not None and t.requires_grad]
    found = iter(torch.autograd.grad(y, used, dy, allow_unused=True))
    return [next(found) if t is not None and t.requires_grad else None for t in inputs]


def assert_same_gradients(ours, theirs, rtol: float = 1e-9) -> None:
    """Relative in norm, per tensor; the absolute part is for gradients that are zero (softmax ignores a bias of K)."""
    for i, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        if b is None or not b.any():  # autograd says None or zeros where nothing flows
            assert a is None or not a.any(), f"input {i}: expected no gradient"
            continue
        assert a is not None, f"input {i}: no gradient"
        error = (a - b).norm()
        assert error < rtol * b.norm() + 1e-12, f"input {i}: error {error:.2e} of {b.norm():.2e}"
