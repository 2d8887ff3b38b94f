"""The Triton kernels against the plain steps: on the GPU, and without one in Triton's interpreter."""

import itertools
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from torchsbp.ops import attention, block, mlp
from torchsbp.ops import downsample as downsample_file
from torchsbp.ops.attention import AttentionSpec, attention_branch
from torchsbp.ops.block import transformer_block
from torchsbp.ops.downsample import DownsampleSpec, downsample
from torchsbp.ops.layers import ACTIVATIONS, Backward, Norm, norm_again
from torchsbp.ops.mlp import MLPSpec, mlp_branch
from torchsbp.ops.steps import Affine, Steps

from .helpers import attention_params, downsample_params, gradients, kept_rows, mlp_params

kernels = pytest.importorskip("torchsbp.ops.kernels")
TritonSteps = kernels.TritonSteps

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SAMPLES, N, C = 3, 21, 40  # neither rows nor channels fill a tile


def randn(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, device=DEVICE).to(dtype)


def rows_of(ratio: float) -> Tensor | None:
    rows = kept_rows(SAMPLES, N, ratio)
    return None if rows is None else rows.to(DEVICE)


def check(run, columns: int = 0, half: bool = False) -> tuple[Tensor, ...]:
    """``run(steps)`` gives the same tensors and leaves the same totals with both kinds of steps."""
    ours, plain = TritonSteps(randn(1), columns), Steps(randn(1), columns)
    found, expected = run(ours), run(plain)
    for a, b in zip((*found, *ours.totals()), (*expected, *(t.float() for t in plain.totals())), strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            assert a.dtype == b.dtype
            assert a.shape == b.shape
            assert (a - b).float().norm() <= (8e-3 if half else 2e-6) * b.float().norm() + 1e-6
    return found


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def test_cast():
    tensors = randn(3, 4), None, randn(5).bfloat16(), randn(6)
    found = check(lambda steps: steps.cast(torch.bfloat16, *tensors))
    assert found[2] is tensors[2]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_take(dtype):
    x, rows = randn(SAMPLES * N, C).bfloat16().float(), rows_of(0.3)  # the interpreter does not round as GPUs do
    assert torch.equal(kernels.take(x, rows, dtype), x[rows].to(dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scale", [False, True])
@pytest.mark.parametrize("factor", [False, True])
@pytest.mark.parametrize("ratio", [1.0, 0.3])
def test_cotangent(ratio, factor, scale, dtype):
    dy, rows = randn(SAMPLES * N, C), rows_of(ratio)
    args = dy, rows, randn(SAMPLES) if factor else None, randn(C) if scale else None, SAMPLES, dtype
    found = check(lambda steps: steps.cotangent(*args), C, dtype == torch.bfloat16)
    assert scale or found[0] is found[1]


@pytest.mark.parametrize("kind", ["layer", "rms"])
@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("branch", [None, "plain", "scaled"])
@pytest.mark.parametrize("ratio", [1.0, 0.3])
def test_normalise(ratio, branch, affine, kind):
    x, rows, scaled = randn(SAMPLES * N, C) + 2, rows_of(ratio), branch == "scaled"
    norm = norm_of(affine, kind)
    more = {
        "branch": None if branch is None else randn(x.shape[0] if rows is None else rows.shape[0], C),
        "scale": randn(C) if scaled else None,
        "factor": randn(SAMPLES) if scaled else None,
    }

    def run(steps):
        n = steps.normalise(x, norm, torch.float32, after=x, rows=rows, samples=SAMPLES, **more)
        return n.y, n.x, None if n.mean is None else n.mean.flatten(), n.rstd.flatten()

    check(run)


@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activation(name, dtype, own):
    h, dg = randn(SAMPLES * N, 300, dtype=dtype) * 2, randn(SAMPLES * N, 300, dtype=dtype)

    def run(steps):
        a, b = h.clone(), dg.clone()
        g, dh = steps.activation(a, b, name, own)
        if isinstance(steps, TritonSteps):
            assert dh is b
            assert (g is a) == own
        assert own or torch.equal(a, h)
        return g, dh

    check(run, 300, dtype == torch.bfloat16)


@pytest.mark.parametrize("parts", [1, 2, 3])
def test_stack(parts):
    matrices = [randn(SAMPLES * N, C, dtype=torch.bfloat16) for _ in range(parts)]

    def run(steps):
        steps.stack(matrices[0].float())
        return (steps.stack(*matrices, more=True),)

    (stacked,) = check(run, (parts + 1) * C, half=True)
    assert torch.equal(stacked, torch.cat(matrices, 1))


def norm_of(affine: bool, kind: str = "layer") -> Affine:
    return Affine(randn(C) if affine else None, randn(C) if affine and kind == "layer" else None, Norm(1e-6, kind))


@pytest.mark.parametrize("scale", [False, True])
@pytest.mark.parametrize("kind", ["layer", "rms"])
@pytest.mark.parametrize("ratio", [1.0, 0.3])
def test_norm_backward_middle(ratio, kind, scale):
    rows, dy, norm = rows_of(ratio), randn(SAMPLES * N, C), norm_of(True, kind)
    x = randn(dy.shape[0] if rows is None else rows.shape[0], C)
    n, dn = norm_again(x, *norm, None), randn(*x.shape)
    args = (randn(SAMPLES), randn(C)) if scale else (None, None)

    def run(steps):
        middle, cotangent = steps.norm_backward_middle(dn, n, norm, dy, rows, *args, SAMPLES, torch.bfloat16)
        return middle, *(t.float() for t in cotangent)

    check_norm(run, 3 * C, kind, half=True)


@pytest.mark.parametrize("kind", ["layer", "rms"])
@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("residual", [False, True])
def test_norm_backward_input_of_all_rows(residual, affine, kind):
    x, norm = randn(SAMPLES * N, C), norm_of(affine, kind)
    n, dn, base = norm_again(x, *norm, None), randn(*x.shape), randn(*x.shape) if residual else None
    check_norm(lambda steps: (steps.norm_backward_input(dn, n, norm, x.dtype, base=base),), 2 * C, kind, affine)


def check_norm(run, columns: int, kind: str, affine: bool = True, half: bool = False) -> None:
    """Totals of parameters that a norm does not have are not compared."""
    ours, plain = TritonSteps(randn(1), columns), Steps(randn(1), columns)
    found, expected = [*run(ours), *ours.totals()], [*run(plain), *plain.totals()]
    absent = [len(found) - columns // C + i for i in range(2) if not affine or (i == 1 and kind == "rms")]
    for i, (a, b) in enumerate(zip(found, expected, strict=True)):
        assert i in absent or (a - b).norm() <= (8e-3 if half else 2e-6) * b.norm() + 1e-6, i


@pytest.mark.parametrize(
    "dense, kept, base, gated",
    [c for c in itertools.product((False, True), repeat=4) if (c[1] or c[2] or not c[0]) and (c[2] or not c[3])],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norm_backward_input_of_kept_rows(dense, kept, base, gated, dtype):
    rows, size, norm = rows_of(0.3), SAMPLES * N, norm_of(True)
    x = randn(size if dense else rows.shape[0], C)
    n, dn = norm_again(x, *norm, None), randn(*x.shape)
    more = {
        "dn_kept": randn(rows.shape[0], C) if dense else None,
        "kept": randn(rows.shape[0], C) if kept else None,
        "base": randn(size, C) if base else None,
        "gated": gated,
    }
    check(
        lambda steps: (steps.norm_backward_input(dn, n, norm, dtype, rows=rows, size=size, **more),),
        2 * C,
        dtype == torch.bfloat16,
    )


@contextmanager
def steps_are(kind: type[Steps]):
    with pytest.MonkeyPatch.context() as patch:
        for module in (attention, block, downsample_file, mlp):
            patch.setattr(module, "steps_for", kind)
        yield


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
    with steps_are(Steps):
        plain = gradients(y, dy, leaves)
    with steps_are(TritonSteps):
        ours = gradients(run(), dy, leaves)
    for i, (a, b) in enumerate(zip(ours, plain, strict=True)):
        assert (a is None) == (b is None)
        assert a is None or (a - b).norm() <= 2e-5 * b.norm() + 1e-6, i


def on_device(params):
    return type(params)(*(None if t is None else t.detach().to(DEVICE).requires_grad_() for t in params))
