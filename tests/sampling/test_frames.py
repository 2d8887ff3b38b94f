import pytest
import torch
from torch import nn

import torchsbp


def encoder() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.GELU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()).double()


VIDEO = torch.randn(2, 8, 3, 6, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("sampler", ["frames", "frames_jitter"])
@pytest.mark.parametrize("ratio, count", [(1.0, 8), (0.5, 4), (0.25, 2)])
def test_gradients_reach_the_sampled_share_of_frames(sampler, ratio, count):
    video = VIDEO.clone().requires_grad_()
    model = encoder()
    y = torchsbp.sbp_frames(model, video, ratio, step=3, sampler=sampler, chunk=3)
    torch.testing.assert_close(y, model(VIDEO.flatten(0, 1)).unflatten(0, (2, 8)), rtol=1e-12, atol=1e-12)
    y.sum().backward()
    touched = video.grad.flatten(2).abs().sum(-1) > 0
    assert touched.sum(1).tolist() == [count, count]
    assert torch.equal(touched[0], touched[1])


def test_frames_follow_the_step():
    def frames(step):
        video = VIDEO.clone().requires_grad_()
        torchsbp.sbp_frames(encoder(), video, 0.25, step=step).sum().backward()
        return tuple((video.grad[0].flatten(1).abs().sum(-1) > 0).nonzero().flatten().tolist())

    assert frames(5) == frames(5)
    assert {frames(step) for step in range(30)} == {(0, 4), (1, 5), (2, 6), (3, 7)}


def test_frames_of_each_video_of_the_batch():
    video = VIDEO.repeat(8, 1, 1, 1, 1).requires_grad_()
    model = encoder()
    y = torchsbp.sbp_frames(model, video, 0.25, step=3, per_sample=True, chunk=5)
    torch.testing.assert_close(y, model(video.flatten(0, 1)).unflatten(0, (16, 8)), rtol=1e-12, atol=1e-12)
    y.sum().backward()
    touched = video.grad.flatten(2).abs().sum(-1) > 0
    assert {tuple(its.nonzero().flatten().tolist()) for its in touched} == {(0, 4), (1, 5), (2, 6), (3, 7)}


def test_balanced_over_the_batch():
    """Eight videos, two of eight frames each: every frame twice."""
    video = VIDEO.repeat(4, 1, 1, 1, 1).requires_grad_()
    torchsbp.sbp_frames(encoder(), video, 0.25, step=3, per_sample="balanced").sum().backward()
    touched = video.grad.flatten(2).abs().sum(-1) > 0
    assert touched.sum(1).tolist() == [2] * 8
    assert touched.sum(0).tolist() == [2] * 8
    message = r"which sampler='frames_jitter' does not allow; .* \['random', 'stratified', 'frames', 'checkerboard'\]"
    with pytest.raises(ValueError, match=message):
        torchsbp.sbp_frames(encoder(), VIDEO, 0.25, step=0, per_sample="balanced", sampler="frames_jitter")
    with pytest.raises(ValueError, match=r"per_sample='some' is not allowed; allowed: False, True, \"balanced\""):
        torchsbp.sbp_frames(encoder(), VIDEO, 0.25, step=0, per_sample="some")


def test_chunks_are_of_equal_size():
    sizes = []

    def watched(frames):
        sizes.append(len(frames))
        return frames.flatten(1)

    with torch.no_grad():
        torchsbp.sbp_frames(watched, VIDEO, 0.25, step=0, chunk=7)
    assert sizes == [6, 6, 4]
    sizes.clear()
    torchsbp.sbp_frames(watched, VIDEO, 1.0, step=0, chunk=7)
    assert sizes == [16]


def test_under_autocast_every_weight_learns():
    """Weights are cast once for all chunks: first with gradients, or none would reach them."""
    model = encoder().float()
    with torch.autocast("cpu", torch.bfloat16):
        torchsbp.sbp_frames(model, VIDEO.float(), 0.25, step=0, chunk=3).sum().backward()
    assert model[0].weight.grad.abs().sum() > 0


def test_batch_norm_in_training_is_refused():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten()).double()
    with pytest.raises(ValueError, match=r"1 is a batch norm in training mode.*Freeze it with .eval\(\)"):
        torchsbp.sbp_frames(model, VIDEO, 0.5, step=0)
    assert torchsbp.sbp_frames(model.eval(), VIDEO, 0.5, step=0).shape[:2] == (2, 8)


def test_bad_ratio_and_sampler():
    with pytest.raises(ValueError, match=r"in \(0, 1\], found 0"):
        torchsbp.sbp_frames(encoder(), VIDEO, 0, step=0)
    with pytest.raises(ValueError, match="sampler='frame' is unknown; allowed here: 'random', 'stratified', 'frames'"):
        torchsbp.sbp_frames(encoder(), VIDEO, 0.5, step=0, sampler="frame")
