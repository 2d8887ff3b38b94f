"""Attention in windows: plainly against one dense map over all slots, the kernels against that."""

import math
from typing import NamedTuple

import pytest
import torch
from timm.models.maxxvit import grid_partition
from torch import Tensor

from torchsbp.ops import reference, window_launches
from torchsbp.ops import rows as R
from torchsbp.ops.block import transformer_block
from torchsbp.ops.heads import AttentionSpec, take_head_rows
from torchsbp.ops.layers import COSINE, NO_NORM, BackwardOptions, Norm
from torchsbp.ops.mlp import MLPSpec
from torchsbp.ops.rules import RULES
from torchsbp.ops.window_attention import Cut, Padding, WindowAttention
from torchsbp.ops.window_launches import KernelWindowAttention
from torchsbp.sampling.windows import Partition, cut_all, first_in_each

from .helpers import assert_same_gradients, attention_params, gradients, kept_rows, mlp_params, param, post_norm

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
B, HEADS, SCALE = 2, 2, 0.3


class Case(NamedTuple):
    """A grid, its windows and shift, and whether it is padded before it is rolled."""

    grid: tuple[int, ...]
    window: tuple[int, ...]
    shift: tuple[int, ...]
    pads_first: bool = True


CASES = {
    "plain": Case((4, 6), (2, 3), (0, 0)),
    "shifted": Case((4, 6), (2, 3), (1, 1)),
    "padded": Case((5, 7), (2, 3), (0, 0)),
    "padded, shifted": Case((5, 7), (2, 3), (1, 1)),
    "shifted, padded": Case((5, 7), (2, 3), (1, 1), pads_first=False),
    "three dimensions": Case((3, 4, 5), (2, 3, 3), (1, 1, 0)),
    "one window": Case((3, 3), (3, 3), (0, 0)),
}


def drawn(case: Case, ratio: float, per_sample: bool = False) -> tuple[Cut, Tensor | None]:
    """The cut, and the kept rows."""
    partition, n = Partition(*case), math.prod(case.grid)
    if ratio == 1:
        return cut_all(partition, torch.device("cpu")), None
    order = torch.rand(B if per_sample else 1, n).argsort(1)
    kept, windows = first_in_each(order, partition, ratio)
    return windows.cut, (kept.expand(B, -1) + n * torch.arange(B)[:, None]).flatten()


def leaves_of(case: Case, width: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """Q, K, V, bias, key and value of padding."""
    n, area = math.prod(case.grid), math.prod(case.window)
    qkv = [param(B, HEADS, n, width, dtype=dtype) for _ in range(3)]
    return [*qkv, param(HEADS, area, area, dtype=dtype), *(param(HEADS, width, dtype=dtype) for _ in range(2))]


def backward(attention: WindowAttention, leaves: list[Tensor], cut: Cut, rows: Tensor | None, rule: str, dy: Tensor):
    """The gradients of all leaves from kept queries, as an op takes them."""
    q, k, v, bias, *pads = (t.detach() for t in leaves)
    padding = Padding(*pads)
    o, lse = attention.forward(q, k, v, bias, padding, cut, SCALE)
    q, o, do = (take_head_rows(t, rows) for t in (q, o, dy))
    kept_lse = take_head_rows(lse.unsqueeze(-1), rows).squeeze(-1)
    keys = rows if rule == "qkv" else None
    k, v = take_head_rows(k, keys), take_head_rows(v, keys)
    found = attention.backward(do, q, k, v, o, kept_lse, bias, padding, cut, SCALE, rule == "qkv", True)
    full = [put_head_rows(leaves[0], rows, found.q)]
    full += [put_head_rows(leaves[0], keys, t) for t in (found.k, found.v)]
    return [*full, found.bias, *(found.padding or (None, None))]


def put_head_rows(like: Tensor, rows: Tensor | None, values: Tensor) -> Tensor:
    base = torch.zeros_like(like.transpose(1, 2).flatten(2))
    found = R.put(base, rows, R.flat(values.transpose(1, 2).flatten(2)))
    return found.unflatten(2, (HEADS, -1)).transpose(1, 2)


@pytest.mark.parametrize("rule", ["query", "qkv"])
@pytest.mark.parametrize("ratio, per_sample", [(1.0, False), (0.5, False), (0.5, True), (0.2, False)])
@pytest.mark.parametrize("name", CASES)
def test_equals_reference(name, ratio, per_sample, rule):
    torch.manual_seed(0)
    case = CASES[name]
    leaves, (cut, rows) = leaves_of(case, 4), drawn(case, ratio, per_sample)
    expected = reference.window_attention(
        *leaves[:4], Padding(*leaves[4:]), cut, SCALE, rows if rule == "qkv" else None
    )
    ours, _ = WindowAttention().forward(*leaves[:4], Padding(*leaves[4:]), cut, SCALE)
    torch.testing.assert_close(ours, expected, rtol=1e-12, atol=1e-12)
    dy = torch.randn_like(expected)
    by_rows = expected.transpose(1, 2).flatten(2)
    theirs = gradients(reference.gate(by_rows, rows), dy.transpose(1, 2).flatten(2), leaves)
    assert_same_gradients(backward(WindowAttention(), leaves, cut, rows, rule, dy), theirs)


KERNEL_CASES = {
    "one tile": Case((3, 10), (3, 5), (0, 2)),
    "one tile, padded": Case((3, 8), (3, 5), (0, 2)),
    "tiles": Case((4, 10), (4, 5), (0, 2)),
    "tiles, three dimensions, padded": Case((2, 2, 8), (2, 2, 5), (0, 0, 2)),
}


HALF = torch.bfloat16 if DEVICE == "cuda" else torch.float16  # Triton's interpreter has no products in bfloat16


KERNEL_OPTIONS = [
    (1.0, False, "query", torch.float32),
    (0.5, False, "query", HALF),
    (0.5, True, "query", torch.float32),
    (0.5, False, "qkv", torch.float32),
    (0.25, True, "qkv", torch.float32),
]
PADDED = ("one tile, padded", "tiles, three dimensions, padded")
UNPADDED = ("one tile", "tiles")


@pytest.mark.parametrize(
    "ratio, per_sample, rule, dtype, name",
    [  # all options with one tile and with several, with padding and without
        (*options, name)
        for number, options in enumerate(KERNEL_OPTIONS)
        for name in (PADDED[number % 2], UNPADDED[1 - number % 2])
    ],
)
def test_kernels_equal_the_plain_ones(name, ratio, per_sample, rule, dtype, monkeypatch):
    pytest.importorskip("triton")
    monkeypatch.setattr(window_launches, "TILE", 16)  # the interpreter is slow
    torch.manual_seed(0)
    case = KERNEL_CASES[name]
    leaves, (cut, rows) = leaves_of(case, 24, torch.float32), drawn(case, ratio, per_sample)
    leaves = [t.detach().to(DEVICE, torch.float32 if i == 3 else dtype) for i, t in enumerate(leaves)]
    cut = Cut(*(None if t is None else t.to(DEVICE) for t in cut))
    rows = None if rows is None else rows.to(DEVICE)
    args = (*leaves[:4], Padding(*leaves[4:]), cut, SCALE)
    exact = [t.double() for t in leaves]
    dy = torch.randn_like(leaves[0])
    limit = 2e-5 if dtype == torch.float32 else 2e-3 if dtype == torch.float16 else 2e-2
    for a, b in zip(KernelWindowAttention().forward(*args), WindowAttention().forward(*args), strict=True):
        assert a.dtype == b.dtype
        assert (a - b).norm() <= limit * b.norm()
    found = backward(KernelWindowAttention(), leaves, cut, rows, rule, dy)
    expected = backward(WindowAttention(), exact, cut, rows, rule, dy.double())
    for i, (a, b) in enumerate(zip(found, expected, strict=True)):
        assert (a is None) == (b is None), i
        assert a is None or (a - b).norm() <= limit * b.norm() + 1e-6, i


@pytest.mark.parametrize("recompute", [True, False])
@pytest.mark.parametrize("rule", ["query", "exact"])
@pytest.mark.parametrize("strided", [False, True])
def test_rows_that_are_not_equally_many_in_windows_equal_reference(strided, rule, recompute):
    torch.manual_seed(0)
    partition, n, channels = Partition((4, 6), (2, 3), (0, 0), False, strided), 24, 4 * HEADS
    cut, rows, x = cut_all(partition, torch.device("cpu")), kept_rows(B, n, 0.3), param(B, n, channels)
    p1 = attention_params(channels, HEADS)._replace(score_bias=param(HEADS, 6, 6))
    p2, spec = mlp_params(channels, 2 * channels), AttentionSpec(HEADS, SCALE, rule=RULES[rule])
    options = BackwardOptions(recompute=recompute)
    ours = transformer_block(x, rows, p1, spec, p2, MLPSpec(), options=options, cut=cut)
    theirs = reference.transformer_block(x, rows, p1, spec, p2, MLPSpec(), cut=cut)
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    dy, leaves = torch.randn_like(x), (x, *p1, *p2)
    assert_same_gradients(gradients(ours, dy, leaves), gradients(theirs, dy, leaves))


def test_strided_windows_are_those_of_maxvit():
    places = Partition((4, 6), (2, 3), (0, 0), False, True).places(torch.device("cpu"))
    expected = grid_partition(torch.arange(24).view(1, 4, 6, 1), (2, 3)).flatten(1)
    assert torch.equal(places, expected)


@pytest.mark.parametrize("recompute", [True, False])
@pytest.mark.parametrize("scope", ["branch", "block"])
@pytest.mark.parametrize("rule", ["query", "qkv", "exact"])
@pytest.mark.parametrize("ratio", [1.0, 0.5])
@pytest.mark.parametrize("name", ["shifted", "padded, shifted", "three dimensions"])
@pytest.mark.parametrize("version", [1, 2])
def test_a_block_in_windows_equals_reference(version, name, ratio, rule, scope, recompute):
    """Swin's of that version: the second has cosines for scores, and its norms behind the branches."""
    torch.manual_seed(0)
    case, channels = CASES[name], 4 * HEADS
    n, area = math.prod(case.grid), math.prod(case.window)
    cut, rows = drawn(case, ratio)
    x = param(B, n, channels)
    p1 = attention_params(channels, HEADS)._replace(score_bias=param(HEADS, area, area))
    p2, spec, spec2 = mlp_params(channels, 2 * channels), AttentionSpec(HEADS, SCALE, rule=RULES[rule]), MLPSpec()
    if version == 2:
        p1, p2 = post_norm(p1)._replace(q_norm_weight=param(HEADS, 1, 1)), post_norm(p2)
        spec = spec._replace(softmax_scale=1.0, norm=NO_NORM, qk_norm=COSINE, post_norm=Norm())
        spec2 = MLPSpec(NO_NORM, post_norm=Norm())
    factors = torch.tensor([0.0, 2.0], dtype=x.dtype), torch.tensor([2.0, 0.5], dtype=x.dtype)
    ours = transformer_block(
        x, rows, p1, spec, p2, spec2, factors=factors, options=BackwardOptions(scope, recompute), cut=cut
    )
    theirs = reference.transformer_block(x, rows, p1, spec, p2, spec2, factors, scope, cut=cut)
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    dy = torch.randn_like(x)
    leaves = (x, *p1, *p2)
    assert_same_gradients(gradients(ours, dy, leaves), gradients(theirs, dy, leaves))
