import pytest
import torch
from torch import nn

from torchsbp.errors import UsageError
from torchsbp.ops import reference
from torchsbp.ops.frames import encode_frames
from torchsbp.ops.wrap import complement, sbp

from .helpers import assert_same_gradients, gradients


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("dim", [0, 1, 2, -2])
def test_sbp_equals_reference(dim, recompute):
    torch.manual_seed(0)
    x = torch.randn(5, 6, 7, 4, dtype=torch.float64, requires_grad=True)
    fn = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 3)).double()
    keep = torch.randperm(x.shape[dim])[:2]
    ours, theirs = sbp(fn, x, keep, dim, recompute=recompute), reference.sbp(fn, x, keep, dim)
    torch.testing.assert_close(ours, theirs, rtol=1e-14, atol=1e-14)
    dy, leaves = torch.randn_like(ours), (x, *fn.parameters())
    assert_same_gradients(gradients(ours, dy, leaves), gradients(theirs, dy, leaves))


def test_sbp_saves_the_kept_part_only():
    x = torch.randn(4, 10, 8, requires_grad=True)
    fn = nn.Linear(8, 8)
    shapes = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: shapes.append(t.shape) or t, lambda t: t):
        sbp(fn, x, torch.arange(3))
    floats = [s for s in shapes if len(s) > 1 and s != (8, 8)]
    assert floats
    assert all(s.numel() <= 4 * 3 * 8 for s in floats)


@pytest.mark.parametrize("keep", [torch.ones(10, dtype=torch.bool), torch.zeros(2, 3, dtype=torch.int64)])
def test_sbp_refuses_masks_by_name(keep):
    with pytest.raises(ValueError, match=r"keep must be a vector of position indices .*mask.nonzero"):
        sbp(nn.Identity(), torch.randn(2, 10, 3), keep)


def test_complement():
    assert complement(torch.tensor([4, 0, 2]), 6).tolist() == [1, 3, 5]
    assert complement(torch.arange(3), 3).tolist() == []


@pytest.mark.parametrize("chunk", [None, 1, 3, 100])
@pytest.mark.parametrize("k", [1, 4, 6])
def test_encode_frames_equals_reference(k, chunk):
    torch.manual_seed(0)
    video = torch.randn(2, 6, 3, 8, 8, dtype=torch.float64, requires_grad=True)
    encoder = nn.Sequential(nn.Conv2d(3, 4, 3), nn.GELU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()).double()
    keep = torch.randperm(6)[:k].sort().values
    ours = encode_frames(encoder, video, keep, chunk)
    theirs = reference.encode_frames(encoder, video, keep)
    torch.testing.assert_close(ours, theirs, rtol=1e-13, atol=1e-13)
    dy, leaves = torch.randn_like(ours), (video, *encoder.parameters())
    assert_same_gradients(gradients(ours, dy, leaves), gradients(theirs, dy, leaves))


def test_encode_frames_runs_dropped_frames_first_and_in_chunks():
    seen = []

    def encoder(frames):
        seen.append((frames.shape[0], torch.is_grad_enabled()))
        return frames.flatten(1)

    encode_frames(encoder, torch.randn(2, 6, 3), torch.tensor([1, 4]), chunk=3)
    assert seen == [(3, False), (3, False), (2, False), (4, True)]


@pytest.mark.parametrize(
    "fn, x, made",
    [
        (lambda x: x.mean(1), (2, 6, 4), r"\(2, 2, 4\) it made \(2, 4\), not 2 positions in dim 1"),
        (lambda x: x.mean(1), (2, 4, 2), r"\(2, 1, 2\) it made \(2, 2\), not 1 positions in dim 1"),
        (lambda x: x[:, :1], (2, 6, 4), r"\(2, 2, 4\) it made \(2, 1, 4\), not 2 positions in dim 1"),
        (lambda x: x.sum(), (2, 6, 4), r"it made \(\), not 2 positions in dim 1"),
    ],
    ids=["dropped", "dropped, and another of that size left", "changed", "all gone"],
)
def test_sbp_refuses_a_function_that_loses_positions(fn, x, made):
    with pytest.raises(UsageError, match=r"fn must treat positions one by one and keep them in dim 1: .*" + made):
        sbp(fn, torch.randn(x), torch.tensor([0, 2]))
    with torch.no_grad(), pytest.raises(UsageError, match=r"fn must treat positions one by one"):
        sbp(fn, torch.randn(2, 6, 4), torch.tensor([0, 2]))


@pytest.mark.parametrize("fn", [nn.BatchNorm1d(4), nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))], ids=type)
def test_sbp_refuses_batch_norm_in_training_as_its_split_would_change_the_output(fn):
    x, keep = torch.randn(8, 4), torch.tensor([0, 3, 5])
    with pytest.raises(
        ValueError, match=r" is a batch norm in training mode: .* kept and dropped positions. Freeze it"
    ):
        sbp(fn.train(), x, keep, 0)
    torch.testing.assert_close(sbp(fn.eval(), x, keep, 0), fn(x))


def test_sbp_takes_a_function_that_drops_channels_and_asks_it_once():
    calls = []

    def fn(x):
        calls.append(tuple(x.shape))
        return nn.functional.dropout(x, 0.5).sum(-1)

    x, states = torch.randn(2, 4, 2), []
    for _ in range(2):
        torch.manual_seed(0)
        assert sbp(fn, x, torch.tensor([0, 2]), dim=-2).shape == (2, 4)
        states.append(torch.get_rng_state())
    assert calls == [(2, 2, 2), (2, 2, 2), (2, 1, 2), (2, 2, 2), (2, 2, 2)]
    assert torch.equal(*states)


@pytest.mark.parametrize(
    "keep, message",
    [
        ([1, 3, 1], r"keep repeats positions \(\[1\]\), each may be kept once; use keep.unique\(\)"),
        ([1, 9], r"keep has positions out of range \(\[9\]\); allowed: 0 … 5"),
        ([-1, 2], r"keep has positions out of range \(\[-1\]\); allowed: 0 … 5"),
    ],
)
def test_sbp_refuses_positions_that_are_repeated_or_out_of_range(keep, message):
    with pytest.raises(UsageError, match=message):
        sbp(nn.Identity(), torch.randn(2, 6, 4), torch.tensor(keep))


@pytest.mark.cuda
@pytest.mark.skipif("not torch.cuda.is_available()")
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
def test_sbp_waits_for_the_device_once_per_shape():
    x, keep = torch.randn(3, 11, 4, device="cuda"), torch.tensor([1, 4, 1], device="cuda")
    with pytest.raises(UsageError, match="keep repeats positions"):
        sbp(nn.Identity(), x, keep)
    torch.cuda.set_sync_debug_mode("error")
    try:
        sbp(nn.Identity(), x, keep)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    with pytest.raises(UsageError, match="keep repeats positions"):
        sbp(nn.Identity(), x, keep, check=True)
