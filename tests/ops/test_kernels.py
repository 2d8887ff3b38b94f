"""The Triton kernels against the plain steps: on the GPU, and without one in Triton's interpreter."""

import itertools

import pytest
import torch
from torch import Tensor

from torchsbp.ops import device as devices
from torchsbp.ops import mlp
from torchsbp.ops.activations import ACTIVATIONS, GATED, Activation
from torchsbp.ops.attention import attention_branch
from torchsbp.ops.block import transformer_block
from torchsbp.ops.chosen import marks
from torchsbp.ops.device import CPU, CUDA, substituted
from torchsbp.ops.downsample import DownsampleSpec, downsample
from torchsbp.ops.heads import AttentionSpec
from torchsbp.ops.kernel_steps import (
    ACTIVATION_CODES,
    ACTIVATION_TILE,
    KernelSteps,
    choose_rows,
    keep_rows,
    launch,
    rotated,
    scaled_last_layer,
    take_rows,
)
from torchsbp.ops.layers import NO_NORM, BackwardOptions, Norm, last_layer_gradients, norm_again
from torchsbp.ops.mlp import MLPSpec, mlp_branch
from torchsbp.ops.rotary import rotate, rotate_backward
from torchsbp.ops.rows import RowWeight, inverse
from torchsbp.ops.rules import RULES
from torchsbp.ops.steps import Affine, Steps

from .helpers import attention_params, downsample_params, gradients, kept_rows, mlp_params, post_norm

pytest.importorskip("triton")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SAMPLES, N, C = 3, 21, 40  # neither rows nor channels fill a tile


def randn(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, device=DEVICE).to(dtype)


def rows_of(ratio: float) -> Tensor | None:
    rows = kept_rows(SAMPLES, N, ratio)
    return None if rows is None else rows.to(DEVICE)


def check(run, columns: int = 0, half: bool = False) -> tuple[Tensor, ...]:
    """``run(steps)`` gives the same tensors and leaves the same totals with both kinds of steps."""
    ours, plain = KernelSteps(randn(1), columns), Steps(randn(1), columns)
    found, expected = run(ours), run(plain)
    totals, expected_totals = ours.totals(), {name: t.float() for name, t in plain.totals().items()}
    assert totals.keys() == expected_totals.keys()
    pairs = [(totals[name], expected_totals[name]) for name in totals]
    for a, b in (*zip(found, expected, strict=True), *pairs):
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
    a, b, c, d = CUDA().cast(torch.bfloat16, *tensors)
    assert torch.equal(a, tensors[0].bfloat16())
    assert b is None
    assert c is tensors[2]
    assert torch.equal(d, tensors[3].bfloat16())
    assert all(a is b for a, b in zip(CUDA().cast(None, *tensors), tensors, strict=True))


@pytest.mark.parametrize("device", [CPU(), CUDA()], ids=["cpu", "cuda"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, None])
def test_cast_of_several_is_one_below_the_other(dtype, device):
    a, b, c = randn(3, 4), randn(2, 4), randn(5)
    stacked, alone, bias = device.cast(dtype, (a, b), (a,), c)
    assert torch.equal(stacked, torch.cat([a, b]).to(dtype or torch.float32))
    assert torch.equal(alone, a.to(dtype or torch.float32))
    assert torch.equal(bias, c.to(dtype or torch.float32))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_take(dtype):
    x, rows = randn(SAMPLES * N, C).bfloat16().float(), rows_of(0.3)  # the interpreter does not round as GPUs do
    assert torch.equal(take_rows(x, rows, dtype), x[rows].to(dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("x_rows", [False, True])
@pytest.mark.parametrize("rows_first", [False, True])
def test_keep(rows_first, x_rows, dtype):
    """Of a log-sum-exp whose rows lie as one or the other kernel leaves them."""
    x, o, rows = randn(SAMPLES, N, C).bfloat16().float(), randn(SAMPLES, N, 30), rows_of(0.3)
    lse = randn(SAMPLES, N, 3).transpose(1, 2) if rows_first else randn(SAMPLES, 3, N)
    found = keep_rows(launch, x, o, lse, rows, dtype, x_rows)
    for ours, plain in zip(found, CPU().save_attention(x, o, lse, rows, dtype, x_rows), strict=True):
        assert ours.is_contiguous()
        assert torch.equal(ours, plain)


@pytest.mark.parametrize("prefix", [0, 1, 2])
@pytest.mark.parametrize("k", [1, 7, 18, 19])
@pytest.mark.parametrize("spread", [0.0, 1.0, 3.0])
def test_choose(spread, k, prefix):
    """Rows of lengths that are alike, or differ a thousandfold: many are certain then. Lengths are summed up in another
    order, so rows may differ where a mark lies on the edge of two: here none does."""
    lengths = (spread * randn(SAMPLES * N)).exp()
    dy = lengths[:, None] * torch.nn.functional.normalize(randn(SAMPLES * N, C))
    at = marks(torch.tensor([1e-6, 1 / torch.pi, 1 - 1e-6], dtype=torch.float64), k).to(DEVICE)
    options = BackwardOptions(row_weight=RowWeight(1.0, prefix))
    found, expected = CUDA().choose(dy, at, options), CPU().choose(dy, at, options)
    assert torch.equal(found.rows, expected.rows)
    torch.testing.assert_close(found.counts, expected.counts, rtol=1e-5, atol=0)
    assert torch.equal(found.inverse, inverse(expected.rows, SAMPLES * N))


def test_every_mark_chooses_a_row_where_the_last_one_is_at_the_end():
    """Probabilities are rounded down, so that they may add up to less than the place of the last mark."""
    n, k = 1024, 256
    dy, at = randn(n, 8), marks(torch.tensor([0.5 / 2**32], dtype=torch.float64), k).to(DEVICE)
    found, expected = (its.choose(dy, at, BackwardOptions()) for its in (CUDA(), CPU()))
    assert torch.equal(found.inverse, inverse(found.rows, n))
    assert (found.counts > 0).all()
    assert (found.rows == expected.rows).sum() >= k - 1


@pytest.mark.filterwarnings("ignore:(invalid value|divide by zero):RuntimeWarning")  # of the interpreter
def test_choose_of_what_is_zero_or_not_finite():
    """Zeros are all alike. Rows stay within their sample whatever comes, and what is not finite is seen by a scaler."""
    dy, k = randn(4 * N, C), 6
    dy[:N], dy[N : 2 * N - 1], dy[2 * N, 0], dy[3 * N + 4, 1] = 0, 0, torch.nan, torch.inf
    found = choose_rows(launch, dy, marks(torch.full((4,), 0.5, dtype=torch.float64), k).to(DEVICE), 1)
    rows, counts = found.rows.view(4, -1), found.counts.view(4, -1)
    assert torch.equal(rows // N, torch.arange(4, device=DEVICE)[:, None].expand(4, 1 + k))
    assert torch.equal(rows[:, 0] % N, torch.zeros(4, dtype=torch.int64, device=DEVICE))
    torch.testing.assert_close(counts[0, 1:], torch.full((k,), (N - 1) / k, device=DEVICE))
    assert counts[1, -1] == 1
    assert int(rows[1, -1]) == 2 * N - 1
    assert not counts[3].isfinite().all()
    assert counts[2].isfinite().all()  # its row is of the prefix: kept always


def test_rows_that_no_program_can_hold_are_chosen_plainly(monkeypatch):
    monkeypatch.setattr(devices, "CHOSEN_AMONG", N - 1)
    monkeypatch.setattr(devices, "choose_rows", None)
    dy, at = randn(SAMPLES * N, C), marks(torch.full((SAMPLES,), 0.5, dtype=torch.float64), 5).to(DEVICE)
    found, expected = (its.choose(dy, at, BackwardOptions()) for its in (CUDA(), CPU()))
    assert torch.equal(found.rows, expected.rows)
    assert torch.equal(found.inverse, inverse(expected.rows, SAMPLES * N))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scale", [False, True])
@pytest.mark.parametrize("factor", [False, True])
@pytest.mark.parametrize("weight", [None, RowWeight(3.3, 2), "by row"])
@pytest.mark.parametrize("ratio", [1.0, 0.3])
def test_cotangent(ratio, weight, factor, scale, dtype):
    dy, rows = randn(SAMPLES * N, C), rows_of(ratio)
    args = dy, rows, randn(SAMPLES) if factor else None, randn(C) if scale else None, SAMPLES, dtype
    weight = randn(SAMPLES * N if rows is None else len(rows)) if weight == "by row" else weight
    found = check(lambda steps: steps.cotangent(*args, total="output", weight=weight), C, dtype == torch.bfloat16)
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


@pytest.mark.parametrize("given", [True, False])
def test_normalise_gives_kept_rows_apart(given):
    x, rows, norm = randn(SAMPLES * N, C) + 2, rows_of(0.3), norm_of(True)
    place = inverse(rows, SAMPLES * N) if given else None
    n = KernelSteps(x, 0).normalise(x, norm, torch.bfloat16, after=x, kept=rows, inverse=place)
    assert torch.equal(n.y_kept, n.y[rows])


@pytest.mark.parametrize("overwrite", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ACTIVATION_CODES)
def test_activation(name, dtype, overwrite):
    h, dg = randn(SAMPLES * N, 300, dtype=dtype) * 2, randn(SAMPLES * N, 300, dtype=dtype)

    def run(steps):
        a, b = h.clone(), dg.clone()
        g, dh = steps.activation(a, b, name, overwrite, total="hidden")
        if isinstance(steps, KernelSteps):
            assert dh is b
            assert (g is a) == overwrite
        assert overwrite or torch.equal(a, h)
        return g, dh

    check(run, 300, dtype == torch.bfloat16)


@pytest.mark.parametrize("overwrite", [True, False])
@pytest.mark.parametrize("name", ["silu", "gelu"])
def test_gated_activation(name, overwrite):
    h, dg = randn(SAMPLES * N, 300) * 2, randn(SAMPLES * N, 150)

    def run(steps):
        a = h.clone()
        g, dh = steps.activation(a, dg.clone(), GATED + name, overwrite, total="hidden")
        assert overwrite or torch.equal(a, h)
        return g, dh

    check(run, 300)


@pytest.mark.parametrize("overwrite", [True, False])
@pytest.mark.parametrize("back", [True, False])
@pytest.mark.parametrize("half, by_head, ratio", [(False, False, 1.0), (True, False, 0.3), (False, True, 0.3)])
def test_rotation(half, by_head, ratio, back, overwrite):
    """Of queries that lie in a product of three, as the op has them."""
    heads, width, rows = 3, 12, rows_of(ratio)
    m = N if rows is None else rows.shape[0] // SAMPLES
    x, *_ = randn(SAMPLES, m, 3, heads, width).permute(2, 0, 3, 1, 4)
    rope = randn(*([heads] if by_head else []), N, 2 * width)
    expected = (rotate_backward if back else rotate)(x, rope, rows, half)
    found = rotated(launch, x, rope, rows, half, back, overwrite)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    assert (found.data_ptr() == x.data_ptr()) == overwrite


def test_the_kernel_knows_activations_by_the_names_of_the_registry():
    assert ACTIVATION_CODES.keys() <= ACTIVATIONS.keys()
    assert len(set(ACTIVATION_CODES.values())) == len(ACTIVATION_CODES)


SOFTSIGN = Activation("softsign", lambda x: x / (1 + x.abs()), lambda dy, x: dy / (1 + x.abs()).square(), ())


@pytest.mark.parametrize("overwrite", [True, False])
def test_an_activation_that_the_kernel_does_not_know_runs_as_itself(overwrite, monkeypatch):
    """Between two sums of kernels: its total is in its own columns."""
    monkeypatch.setitem(ACTIVATIONS, "softsign", SOFTSIGN)
    h, dg, dy = randn(SAMPLES * N, 70), randn(SAMPLES * N, 70), randn(SAMPLES * N, C)

    def run(steps):
        steps.cotangent(dy, None, None, None, SAMPLES, torch.float32, total="output")
        g, dh = steps.activation(h.clone(), dg.clone(), "softsign", overwrite, total="hidden")
        steps.stack(dy, total="qkv")
        return g, dh

    g, dh = check(run, 70 + 2 * C)
    leaf = h.clone().requires_grad_()
    expected = torch.nn.functional.softsign(leaf)
    torch.testing.assert_close(g, expected.detach())
    torch.testing.assert_close(dh, torch.autograd.grad(expected, leaf, dg)[0])


def test_the_kernel_refuses_a_code_that_it_does_not_know():
    h = randn(4, 8)
    arguments = {"sums": randn(1, 8), "first": 0, "columns": 8, "count": 4, "H": 8, "CODE": 99, "OVERWRITE": False}
    with pytest.raises(Exception) as raised:
        launch("activation", (1, 1), h=h, dg=h.clone(), g=h.clone(), **arguments, **ACTIVATION_TILE)
    told = f"{raised.value} {raised.value.__cause__}"  # a compiler tells where it was, and of what that is the cause
    assert "the kernel has no activation of that code" in told


@pytest.mark.parametrize("apart", [False, True])
def test_stack(apart):
    matrices = [randn(SAMPLES * N, C, dtype=torch.bfloat16) for _ in range(2 if apart else 3)]
    alone = randn(SAMPLES * 5, C, dtype=torch.bfloat16) if apart else None
    (stacked,) = check(lambda steps: (steps.stack(*matrices, apart=alone, total="qkv"),), 3 * C, half=True)
    assert torch.equal(stacked, torch.cat(matrices, 1))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("width", [40, 1500])
def test_last_layer(width, bias):
    product, total, weight, scale = randn(C, width), randn(C), randn(C, width), randn(C)
    arguments = total, weight, randn(C) if bias else None, scale
    expected = last_layer_gradients(product.clone(), *arguments)
    for a, b in zip(scaled_last_layer(launch, product, *arguments), expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-4)


def test_totals_are_all_those_announced_each_once():
    steps, x = KernelSteps(randn(1), 3 * C), randn(SAMPLES * N, C)
    steps.stack(x, total="qkv")
    with pytest.raises(AssertionError, match=f"{C} columns were summed, {3 * C} announced"):
        steps.totals()
    steps.stack(x, total="other")
    with pytest.raises(AssertionError, match="qkv has a sum already"):
        steps.stack(x, total="qkv")


def norm_of(affine: bool, kind: str = "layer") -> Affine:
    return Affine(randn(C) if affine else None, randn(C) if affine and kind == "layer" else None, Norm(1e-6, kind))


@pytest.mark.parametrize("scale", [False, True])
@pytest.mark.parametrize("kind", ["layer", "rms"])
@pytest.mark.parametrize("weight", [None, RowWeight(3.3, 2), "by row"])
@pytest.mark.parametrize("ratio", [1.0, 0.3])
def test_norm_backward_middle(ratio, weight, kind, scale):
    rows, dy, norm = rows_of(ratio), randn(SAMPLES * N, C), norm_of(True, kind)
    x = randn(dy.shape[0] if rows is None else rows.shape[0], C)
    n, dn = norm_again(x, *norm, None), randn(*x.shape)
    args = (randn(SAMPLES), randn(C)) if scale else (None, None)
    weight = randn(x.shape[0]) if weight == "by row" else weight

    def run(steps):
        middle, cotangent = steps.norm_backward_middle(
            dn, n, norm, dy, rows, *args, SAMPLES, torch.bfloat16, norm_total="norm", total="output", weight=weight
        )
        return middle, *(t.float() for t in cotangent)

    check_norm(run, 3 * C, kind, half=True)


@pytest.mark.parametrize("kind", ["layer", "rms"])
@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("residual, overwrite", [(False, False), (False, True), (True, False)])
def test_norm_backward_input_of_all_rows(residual, overwrite, affine, kind):
    x, norm = randn(SAMPLES * N, C), norm_of(affine, kind)
    n, dn, base = norm_again(x, *norm, None), randn(*x.shape), randn(*x.shape) if residual else None

    def run(steps):
        more = {"base": base, "norm_total": "norm", "overwrite": overwrite}
        return (steps.norm_backward_input(dn.clone(), n, norm, x.dtype, **more),)

    check_norm(run, 2 * C, kind, affine)


def check_norm(run, columns: int, kind: str, affine: bool = True, half: bool = False) -> None:
    """Totals of parameters that a norm does not have are not compared."""
    ours, plain = KernelSteps(randn(1), columns), Steps(randn(1), columns)
    absent = {"norm_weight"} if not affine else set()
    absent |= {"norm_bias"} if not affine or kind == "rms" else set()
    pairs = dict(enumerate(zip(run(ours), run(plain), strict=True)))
    totals, expected = ours.totals(), plain.totals()
    assert totals.keys() == expected.keys()
    pairs |= {name: (totals[name], expected[name]) for name in totals.keys() - absent}
    for name, (a, b) in pairs.items():
        assert (a - b).norm() <= (8e-3 if half else 2e-6) * b.norm() + 1e-6, name


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
        lambda steps: (steps.norm_backward_input(dn, n, norm, dtype, rows=rows, size=size, norm_total="norm", **more),),
        2 * C,
        dtype == torch.bfloat16,
    )


class WithKernels(CUDA if DEVICE == "cuda" else CPU):
    def steps(self, x: Tensor, columns: int) -> Steps:
        return KernelSteps(x, columns)

    def save_attention(self, x, o, lse, rows, dtype, x_rows):
        if rows is None:
            return super().save_attention(x, o, lse, rows, dtype, x_rows)
        return keep_rows(launch, x, o, lse, rows, dtype, x_rows)


class WithoutKernels(CUDA if DEVICE == "cuda" else CPU):
    def steps(self, x: Tensor, columns: int) -> Steps:
        return Steps(x, columns)


B, SIDE, WIDTH, HEADS = 2, 6, 48, 3


WAYS = [("branch", True), ("branch", False), ("block", True), ("block", False)]  # scope, recompute
BY_RULE = {"query": WAYS, "qkv": WAYS[1:3], "exact": WAYS[::3]}
ATTENTION = ("block", "post-norm block", "attention")
OPS = [(op, rule, *way) for op in ATTENTION for rule, ways in BY_RULE.items() for way in ways]
OPS += [(op, "query", *way) for op in ("mlp", "inner-norm mlp", "convnext") for way in WAYS]


@pytest.mark.parametrize("ratio", [1.0, 0.3])
@pytest.mark.parametrize("op, rule, scope, recompute", OPS)
def test_ops_take_the_same_gradients_from_the_kernels(op, ratio, rule, scope, recompute):
    """Float32, whole ops: this is what the arguments of each step are."""
    x = randn(B, SIDE * SIDE, WIDTH).requires_grad_()
    p1 = on_device(attention_params(WIDTH, HEADS, dtype=torch.float32))
    p2 = on_device(mlp_params(WIDTH, 2 * WIDTH, dtype=torch.float32))
    gate = on_device(mlp_params(WIDTH, 2 * WIDTH, gated=True, inner_norm=True, dtype=torch.float32))
    post1, post2 = post_norm(p1), post_norm(p2)
    rows, spec = kept_rows(B, SIDE * SIDE, ratio), AttentionSpec(HEADS, 0.25, rule=RULES[rule])
    weight = RowWeight(1 / ratio, 1) if scope == "branch" else None
    rows = None if rows is None else rows.to(DEVICE)
    options = BackwardOptions(scope, recompute, row_weight=None if rows is None else weight)
    factor = torch.tensor([0.5, 2.0], device=DEVICE)
    factors = {"factors": (factor, factor), "options": options}
    post = spec._replace(norm=NO_NORM, post_norm=Norm()), MLPSpec(NO_NORM, post_norm=Norm())
    run = {
        "block": lambda: transformer_block(x, rows, p1, spec, p2, MLPSpec(), **factors),
        "post-norm block": lambda: transformer_block(x, rows, post1, post[0], post2, post[1], **factors),
        "attention": lambda: attention_branch(x, rows, p1, spec, factor=factor, options=options),
        "mlp": lambda: mlp_branch(x, rows, p2, factor=factor, options=options),
        "inner-norm mlp": lambda: mlp_branch(
            x, rows, gate, MLPSpec(act=GATED + "silu", inner_norm=Norm()), factor=factor, options=options
        ),
        "convnext": lambda: mlp_branch(x, rows, p2, factor=factor, residual=False, options=options),
    }[op]
    blocks = {"block": (x, *p1, *p2), "post-norm block": (x, *post1, *post2)}
    leaves = {**blocks, "attention": (x, *p1), "inner-norm mlp": (x, *gate)}.get(op, (x, *p2))
    compare(run, leaves)


@pytest.mark.cuda
@pytest.mark.parametrize("op, rule", [("block", "query"), ("block", "exact"), ("mlp", "query")])
@pytest.mark.parametrize("recompute", [True, False])
def test_rows_that_are_chosen_in_backward_take_the_same_gradients_from_the_kernels(recompute, op, rule):
    x = randn(B, SIDE * SIDE, WIDTH).requires_grad_()
    p1 = on_device(attention_params(WIDTH, HEADS, dtype=torch.float32))
    p2 = on_device(mlp_params(WIDTH, 2 * WIDTH, dtype=torch.float32))
    spec, factor = AttentionSpec(HEADS, 0.25, rule=RULES[rule]), torch.tensor([0.5, 2.0], device=DEVICE)
    options = BackwardOptions(recompute=recompute, row_weight=RowWeight(2.0, 1))
    at = marks(torch.tensor([0.3, 0.6], dtype=torch.float64, device=DEVICE), 5)
    if op == "mlp":
        compare(lambda: mlp_branch(x, None, p2, marks=at, factor=factor, options=options), (x, *p2))
        return
    given = {"marks": at, "factors": (factor, factor), "options": options}
    compare(lambda: transformer_block(x, None, p1, spec, p2, MLPSpec(), **given), (x, *p1, *p2))


@pytest.mark.parametrize("act, inner_norm", [("gelu", None), (GATED + "silu", None), (GATED + "silu", Norm())])
@pytest.mark.parametrize("recompute", [True, False])
def test_halves_leave_the_totals_of_all_rows(recompute, act, inner_norm, monkeypatch):
    monkeypatch.setattr(mlp, "PART", 1)
    for device in (WithKernels, WithoutKernels):
        monkeypatch.setattr(device, "capturing", lambda self: True)
    x = randn(B, SIDE * SIDE, WIDTH).requires_grad_()
    gated = act.startswith(GATED)
    p = on_device(mlp_params(WIDTH, 2 * WIDTH, gated=gated, inner_norm=bool(inner_norm), dtype=torch.float32))
    spec, options = MLPSpec(act=act, inner_norm=inner_norm), BackwardOptions(recompute=recompute)
    compare(lambda: mlp_branch(x, None, p, spec, options=options), (x, *p))


@pytest.mark.parametrize("ratio", [1.0, 0.3])
def test_downsample_takes_the_same_gradients_from_the_kernels(ratio):
    x = randn(B, WIDTH, 7, 9).requires_grad_()
    p = on_device(downsample_params(WIDTH, 2 * WIDTH, 2, dtype=torch.float32))
    rows = kept_rows(B, 12, ratio)
    compare(lambda: downsample(x, None if rows is None else rows.to(DEVICE), p, DownsampleSpec((2, 2))), (x, *p))


def compare(run, leaves) -> None:
    y = run()
    dy = torch.randn_like(y)
    with substituted(WithoutKernels()):
        plain = gradients(y, dy, leaves)
    with substituted(WithKernels()):
        ours = gradients(run(), dy, leaves)
    for i, (a, b) in enumerate(zip(ours, plain, strict=True)):
        assert (a is None) == (b is None)
        assert a is None or (a - b).norm() <= 2e-5 * b.norm() + 1e-6, i


def on_device(params):
    return type(params)(*(None if t is None else t.detach().to(DEVICE).requires_grad_() for t in params))
