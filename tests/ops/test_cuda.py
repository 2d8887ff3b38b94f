"""On a GPU: error against float32 no more than three times that of plain PyTorch in the same precision."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from torchsbp.ops import reference
from torchsbp.ops.attention import attention_branch
from torchsbp.ops.block import transformer_block
from torchsbp.ops.downsample import DownsampleSpec, downsample
from torchsbp.ops.heads import AttentionParams, AttentionSpec
from torchsbp.ops.layers import BackwardOptions
from torchsbp.ops.mlp import MLPParams, MLPSpec, mlp_branch
from torchsbp.ops.patches import patch_embedding
from torchsbp.ops.rules import RULES
from torchsbp.ops.sdpa import KERNELS, attend, attend_backward

from .helpers import attention_params, downsample_params, gradients, kept_rows, mlp_params

pytestmark = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

B, N, C, HEADS = 4, 97, 192, 3
SPEC = AttentionSpec(HEADS, (C // HEADS) ** -0.5)


@pytest.fixture(autouse=True)
def poisoned_memory():
    """Large buffers that are allocated empty hold NaN at first: an output that is not written shows."""
    block = torch.full((64, 2**20), float("nan"), device="cuda")
    del block


def on_gpu(params):
    return type(params)(*(None if t is None else (t.detach() * 0.2).cuda().requires_grad_() for t in params))


def plain_mlp(x: Tensor, rows: Tensor | None, p: MLPParams) -> Tensor:
    """Plain PyTorch under autocast, with the gate."""
    h = F.linear(F.layer_norm(x, x.shape[-1:], p.norm_weight, p.norm_bias, 1e-6), p.weight1, p.bias1)
    y = F.linear(F.gelu(h), p.weight2, p.bias2)
    return x + reference.gate(y if p.scale is None else y * p.scale, rows)


def plain_attention(x: Tensor, rows: Tensor | None, p: AttentionParams, rule: str) -> Tensor:
    n = F.layer_norm(x, x.shape[-1:], p.norm_weight, p.norm_bias, 1e-6)
    q, k, v = F.linear(n, p.qkv_weight, p.qkv_bias).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
    m = q @ k.transpose(-2, -1) * SPEC.softmax_scale
    if rule == "qkv" and rows is not None:
        m, v = reference.drop_qkv(m, v, reference.mask(rows, x.shape[:2])[:, None])
    o = (m.softmax(-1).to(v.dtype) @ v).transpose(1, 2).flatten(2)
    y = F.linear(o, p.proj_weight, p.proj_bias)
    return x + reference.gate(y if p.scale is None else y * p.scale, rows)


def compare(ours, plain, leaves, dtype) -> None:
    """Both under autocast against plain PyTorch in float32, every gradient."""
    with torch.no_grad():
        dy = torch.randn_like(plain())
    exact = gradients(plain(), dy, leaves)
    with torch.autocast("cuda", dtype):
        outputs = ours(), plain()
    found, baseline = (gradients(y, dy.to(y.dtype), leaves) for y in outputs)
    for i, (a, b, e) in enumerate(zip(found, baseline, exact, strict=True)):
        if e is None:
            assert a is None
            continue
        assert a.isfinite().all(), f"leaf {i}: not finite"
        error, theirs = (a - e).norm() / e.norm(), (b - e).norm() / e.norm()
        assert error <= 3 * theirs + 1e-6, f"leaf {i}: {error:.2e}, plain PyTorch {theirs:.2e}"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("ratio", [1.0, 0.5, 0.25])
@pytest.mark.parametrize("recompute", [True, False])
def test_mlp(dtype, ratio, recompute):
    torch.manual_seed(0)
    x, p = torch.randn(B, N, C, device="cuda", requires_grad=True), on_gpu(mlp_params(C, 4 * C, dtype=torch.float32))
    rows = kept_rows(B, N, ratio)
    rows = None if rows is None else rows.cuda()
    options = BackwardOptions(recompute=recompute)
    compare(lambda: mlp_branch(x, rows, p, options=options), lambda: plain_mlp(x, rows, p), (x, *p), dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("ratio", [1.0, 0.5, 0.25])
@pytest.mark.parametrize("rule", ["query", "qkv"])
@pytest.mark.parametrize("recompute", [True, False])
def test_attention(dtype, ratio, rule, recompute):
    torch.manual_seed(0)
    x = torch.randn(B, N, C, device="cuda", requires_grad=True)
    p = on_gpu(attention_params(C, HEADS, dtype=torch.float32))
    rows = kept_rows(B, N, ratio)
    rows = None if rows is None else rows.cuda()
    spec, options = SPEC._replace(rule=RULES[rule]), BackwardOptions(recompute=recompute)
    ours, plain = lambda: attention_branch(x, rows, p, spec, options=options), lambda: plain_attention(x, rows, p, rule)
    compare(ours, plain, (x, *p), dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("ratio", [1.0, 0.5, 0.25])
@pytest.mark.parametrize("rule", ["query", "qkv"])
def test_block(dtype, ratio, rule):
    torch.manual_seed(0)
    x = torch.randn(B, N, C, device="cuda", requires_grad=True)
    p1, p2 = on_gpu(attention_params(C, HEADS, dtype=torch.float32)), on_gpu(mlp_params(C, 4 * C, dtype=torch.float32))
    rows = kept_rows(B, N, ratio)
    rows = None if rows is None else rows.cuda()
    spec = SPEC._replace(rule=RULES[rule])
    compare(
        lambda: transformer_block(x, rows, p1, spec, p2, MLPSpec()),
        lambda: plain_mlp(plain_attention(x, rows, p1, rule), rows, p2),
        (x, *p1, *p2),
        dtype,
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("ratio", [1.0, 0.5, 0.25])
def test_downsample(dtype, ratio):
    torch.manual_seed(0)
    x = torch.randn(B, C, 16, 14, device="cuda").to(memory_format=torch.channels_last).requires_grad_()
    p = on_gpu(downsample_params(C, 2 * C, 2, dtype=torch.float32))
    rows = kept_rows(B, 56, ratio)
    rows = None if rows is None else rows.cuda()
    compare(
        lambda: downsample(x, rows, p, DownsampleSpec((2, 2))),
        lambda: reference.downsample(x, rows, p, DownsampleSpec((2, 2))),
        (x, *p),
        dtype,
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("needs_x", [False, True])
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("size, kernel", [((70, 64), (16, 16)), ((8, 32, 36), (2, 4, 4))])
def test_patch_embedding(size, kernel, compiled, needs_x, dtype):
    torch.manual_seed(0)
    x = torch.randn(B, 3, *size, device="cuda", requires_grad=needs_x)
    weight, bias = (torch.randn(C, *rest, device="cuda", requires_grad=True) for rest in ((3, *kernel), ()))
    run = torch.compile(patch_embedding, fullgraph=True) if compiled else patch_embedding
    leaves = (x, weight, bias)
    compare(lambda: run(*leaves), lambda: reference.patch_embedding(*leaves), leaves, dtype)


@pytest.mark.parametrize("rule", ["query", "qkv"])
@pytest.mark.parametrize("ratio", [1.0, 0.5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_attention_without_autocast(rule, ratio, dtype):
    """The memory-efficient kernel in float32, the plain fallback in float64, against the dense reference."""
    torch.manual_seed(0)
    x = torch.randn(B, N, C, device="cuda", dtype=dtype, requires_grad=True)
    p = on_gpu(attention_params(C, HEADS, dtype=dtype))
    rows = kept_rows(B, N, ratio)
    rows = None if rows is None else rows.cuda()
    spec = SPEC._replace(rule=RULES[rule])
    ours, theirs = attention_branch(x, rows, p, spec), reference.attention_branch(x, rows, p, spec)
    tolerance = 1e-10 if dtype == torch.float64 else 2e-5
    assert (ours - theirs).norm() / theirs.norm() < tolerance
    dy = torch.randn_like(x)
    found, expected = gradients(ours, dy, (x, *p)), gradients(theirs, dy, (x, *p))
    for i, (a, b) in enumerate(zip(found, expected, strict=True)):
        assert b is None or (a - b).norm() < 10 * tolerance * b.norm(), i


@pytest.mark.parametrize("queries", [1, 40, 64])
@pytest.mark.parametrize("keys", [64, 97, 128, 192])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_scores_far_below_zero_have_finite_gradients(dtype, keys, queries):
    """All scores are near −120, whose exponential is 0: versions of cuDNN give NaN for what fills up their tiles."""
    torch.manual_seed(0)
    q, k, v, do = (0.1 * torch.randn(2, 3, keys, 64, device="cuda") for _ in range(4))
    q[..., 0], k[..., 0] = 960.0, -1.0
    o, lse = attend(*(t.to(dtype) for t in (q, k, v)), 0.125)
    do, q, o, lse = (t[:, :, :queries] for t in (do.to(dtype), q.to(dtype), o, lse))
    found = attend_backward(do, q, k.to(dtype), v.to(dtype), o, lse, 0.125)
    wide = (t.double() for t in (do, q, k.to(dtype), v.to(dtype), o, lse))
    expected = KERNELS["plain"].backward(*wide, 0.125)
    for name, a, b in zip("qkv", found, expected, strict=True):
        assert a.isfinite().all(), name
        assert (a - b).norm() < 0.1 * b.norm(), name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_forward_takes_the_kernel_that_plain_pytorch_takes(dtype):
    torch.manual_seed(0)
    x = torch.randn(B, N, C, device="cuda")
    p = on_gpu(attention_params(C, HEADS, dtype=torch.float32))
    with torch.autocast("cuda", dtype), torch.no_grad():
        n = F.layer_norm(x, x.shape[-1:], p.norm_weight, p.norm_bias, 1e-6)
        q, k, v = F.linear(n, p.qkv_weight, p.qkv_bias).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        o = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        plain = x + F.linear(o, p.proj_weight, p.proj_bias) * p.scale
        assert torch.equal(attention_branch(x, None, p, SPEC), plain)
