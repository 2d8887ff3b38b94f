import pytest
import torch
from torch import nn

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


def test_encode_frames_runs_dropped_frames_in_chunks():
    seen = []

    def encoder(frames):
        seen.append((frames.shape[0], torch.is_grad_enabled()))
        return frames.flatten(1)

    encode_frames(encoder, torch.randn(2, 6, 3), torch.tensor([1, 4]), chunk=3)
    assert seen == [(4, True), (3, False), (3, False), (2, False)]
