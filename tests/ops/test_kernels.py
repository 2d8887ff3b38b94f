"""The Triton kernels against the plain steps: on the GPU, and without one in Triton's interpreter."""

import itertools
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from torchsbp.ops import fused
from torchsbp.ops.attention import AttentionSpec, attention_branch
from torchsbp.ops.block import transformer_block
from torchsbp.ops.downsample import DownsampleSpec, downsample
from torchsbp.ops.layers import ACTIVATIONS, Backward, Norm, norm_again
from torchsbp.ops.mlp import MLPSpec, mlp_branch

from .helpers import attention_params, downsample_params, gradients, kept_rows, mlp_params

kernels = pytest.importorskip("torchsbp.ops.kernels")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SAMPLES, N, C = 3, 21, 40  # neither rows nor channels fill a tile


@contextmanager
def steps(module):
    """Within it the steps of backward are those of the given module, None: the plain ones."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fused, "kernels_for", lambda x: module)
        yield


def randn(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, device=DEVICE).to(dtype)


def rows_of(ratio: float) -> Tensor | None:
    rows = kept_rows(SAMPLES, N, ratio)
    return None if rows is None else rows.to(DEVICE)


def assert_close(ours, plain, half: bool = False) -> None:
    for a, b in zip(ours, plain, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            assert a.dtype == b.dtype
            assert a.shape == b.shape
            assert (a - b).float().norm() <= (8e-3 if half else 2e-6) * b.float().norm() + 1e-6


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scale", [False, True])
@pytest.mark.parametrize("factor", [False, True])
@pytest.mark.parametrize("ratio", [1.0, 0.3])
def test_cotangent(ratio, factor, scale, dtype):
    dy, rows = randn(SAMPLES * N, C), rows_of(ratio)
    args = dy, rows, randn(SAMPLES) if factor else None, randn(C) if scale else None, SAMPLES, dtype
    ours = kernels.cotangent(*args)
    with steps(None):
        plain = fused.cotangent(*args)
    assert_close(ours, plain, dtype == torch.bfloat16)
    assert scale or ours[0] is ours[1]


@pytest.mark.parametrize("kind", ["layer", "rms"])
@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("branch", [None, "plain", "scaled"])
@pytest.mark.parametrize("ratio", [1.0, 0.3])
def test_normalise(ratio, branch, affine, kind):
    x, rows = randn(SAMPLES * N, C) + 2, rows_of(ratio)
    count = x.shape[0] if rows is None else rows.shape[0]
    scaled = branch == "scaled"
    args = (
        randn(C) if affine else None, randn(C) if affine and kind == "layer" else None, Norm(1e-6, kind),
        torch.float32, rows, None if branch is None else randn(count, C), randn(C) if scaled else None,
        randn(SAMPLES) if scaled else None, SAMPLES,
    )  # fmt: skip
    y, mid, mean, rstd = kernels.normalise(x, *args)
    names = ("rows", "branch", "scale", "factor", "samples")
    with steps(None):
        plain = fused.normalise(x, *args[:4], **dict(zip(names, args[4:], strict=True)))
    assert_close((y, mid, rstd), (plain.y, plain.x, plain.rstd.flatten()))
    if kind == "layer":
        assert_close((mean,), (plain.mean.flatten(),))


@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activation_step(name, dtype, own):
    h, dg = randn(SAMPLES * N, 300, dtype=dtype) * 2, randn(SAMPLES * N, 300, dtype=dtype)
    with steps(None):
        plain = fused.activation_step(h.clone(), dg.clone(), name, own)
    ours = kernels.activation_step(h, dg, name, own)
    assert (ours[0] is h) == own
    assert ours[1] is dg
    assert_close(ours[:2], plain[:2], dtype == torch.bfloat16)
    assert_close(ours[2:], [plain[2].float()], dtype == torch.bfloat16)


@pytest.mark.parametrize("kind", ["layer", "rms"])
@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("residual", [None, "same rows", "other rows"])
def test_norm_backward(residual, affine, kind):
    rows = rows_of(0.3)
    x, weight, bias = randn(rows.shape[0], C), randn(C) if affine else None, randn(C) if affine else None
    n = norm_again(x, weight, bias, Norm(1e-6, kind), None)
    dn, base = randn(*x.shape), randn(SAMPLES * N, C) if residual == "other rows" else randn(*x.shape)
    args = dn, n, weight, bias, Norm(1e-6, kind), (affine, affine and kind == "layer")
    with steps(None):
        plain = fused.norm_backward(*args, base if residual else None, rows if residual == "other rows" else None)
    base_rows = rows if residual == "other rows" else None
    assert_close(kernels.norm_backward(*args, x.dtype, base=base if residual else None, base_rows=base_rows), plain)


@pytest.mark.parametrize(
    "dense, kept, base, gated",
    [c for c in itertools.product((False, True), repeat=4) if (c[1] or c[2] or not c[0]) and (c[2] or not c[3])],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norm_backward_spread(dense, kept, base, gated, dtype):
    rows, size = rows_of(0.3), SAMPLES * N
    x, weight, bias = randn(size if dense else rows.shape[0], C), randn(C), randn(C)
    n, dn = norm_again(x, weight, bias, Norm(), None), randn(*x.shape)
    args = dn, n, weight, bias, Norm(), (True, True)
    more = {
        "dn_kept": randn(rows.shape[0], C) if dense else None,
        "kept": randn(rows.shape[0], C) if kept else None,
        "base": randn(size, C) if base else None,
        "gated": gated,
    }
    with steps(None):
        plain = fused.norm_backward_spread(*args, rows, size, dtype, **more)
    ours = kernels.norm_backward(*args, dtype, rows=rows, size=size, **more)
    assert_close(ours, plain, dtype == torch.bfloat16)


B, SIDE, WIDTH, HEADS = 2, 6, 48, 3


@pytest.mark.parametrize("recompute", [True, False])
@pytest.mark.parametrize("scope", ["branch", "block"])
@pytest.mark.parametrize("rule", ["query", "qkv"])
@pytest.mark.parametrize("ratio", [1.0, 0.3])
@pytest.mark.parametrize("op", ["block", "attention", "mlp", "convnext"])
def test_ops_take_the_same_gradients_from_the_kernels(op, ratio, rule, scope, recompute):
    """Float32, whole ops: this is what the arguments of each step are."""
    if op in ("mlp", "convnext") and rule == "qkv":
        pytest.skip("has no attention")
    x = randn(B, SIDE * SIDE, WIDTH).requires_grad_()
    p1 = on_device(attention_params(WIDTH, HEADS, dtype=torch.float32))
    p2 = on_device(mlp_params(WIDTH, 2 * WIDTH, dtype=torch.float32))
    rows, spec = kept_rows(B, SIDE * SIDE, ratio), AttentionSpec(HEADS, 0.25, rule=rule)
    rows, how = None if rows is None else rows.to(DEVICE), Backward(scope, recompute)
    factor = torch.tensor([0.5, 2.0], device=DEVICE)
    run = {
        "block": lambda: transformer_block(x, rows, p1, spec, p2, MLPSpec(), factors=(factor, factor), how=how),
        "attention": lambda: attention_branch(x, rows, p1, spec, factor=factor, how=how),
        "mlp": lambda: mlp_branch(x, rows, p2, factor=factor, how=how),
        "convnext": lambda: mlp_branch(x, rows, p2, factor=factor, residual=False, how=how),
    }[op]
    leaves = {"block": (x, *p1, *p2), "attention": (x, *p1)}.get(op, (x, *p2))
    compare(run, leaves)


@pytest.mark.parametrize("ratio", [1.0, 0.3])
def test_downsample_takes_the_same_gradients_from_the_kernels(ratio):
    x = randn(B, WIDTH, 7, 9).requires_grad_()
    p = on_device(downsample_params(WIDTH, 2 * WIDTH, 2, dtype=torch.float32))
    rows = kept_rows(B, 12, ratio)
    compare(lambda: downsample(x, None if rows is None else rows.to(DEVICE), p, DownsampleSpec((2, 2))), (x, *p))


def compare(run, leaves) -> None:
    y = run()
    dy = torch.randn_like(y)
    with steps(None):
        plain = gradients(y, dy, leaves)
    with steps(kernels):
        ours = gradients(run(), dy, leaves)
    for i, (a, b) in enumerate(zip(ours, plain, strict=True)):
        assert (a is None) == (b is None)
        assert a is None or (a - b).norm() <= 2e-5 * b.norm() + 1e-6, i


def on_device(params):
    return type(params)(*(None if t is None else t.detach().to(DEVICE).requires_grad_() for t in params))
