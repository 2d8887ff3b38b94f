"""Which frames a clip has, and what a model sees of them: the same augmentation in all frames, crops side by side."""

import pytest
import torch

from torchsbp.train.data.clips import Sampling, Target
from torchsbp.train.video.views import Augment, EvalViews, TrainView

TARGET = Target(torch.tensor([0]))
STRONG = {"rand_augment": 15, "color_jitter": 0.8}


@pytest.mark.parametrize("augment", [{}, {"hflip": 1.0}, STRONG])
def test_augmentation_is_the_same_in_all_frames(augment):
    """Of a still clip it makes a still clip, another one with every seed."""
    view, frame = TrainView(Augment(**augment), 16), torch.randint(0, 256, (24, 32, 3), dtype=torch.uint8)
    still, seen = frame.expand(6, -1, -1, -1), []
    for seed in range(20):
        torch.manual_seed(seed)
        clip, _ = view(still, TARGET)
        assert clip.shape == (3, 6, 16, 16)
        assert clip.dtype == torch.uint8
        assert torch.equal(clip, clip[:, :1].expand(-1, 6, -1, -1))
        seen.append(clip)
    assert len({tuple(clip.flatten().tolist()) for clip in seen}) == 20


def test_frames_stay_in_their_order():
    frames = 10 * torch.arange(6, dtype=torch.uint8)[:, None, None, None].expand(-1, 24, 32, 3)
    clip, _ = TrainView(Augment(), 16)(frames, TARGET)
    assert clip[:, :, 8, 8].tolist() == [[0, 10, 20, 30, 40, 50]] * 3
    views = EvalViews(16, 20, frames=3, crops=2).of(frames)  # two clips of three frames
    assert views.shape == (4, 3, 3, 16, 16)
    assert views[:, 0, :, 8, 8].tolist() == [[0, 10, 20], [30, 40, 50]] * 2


@pytest.mark.parametrize("crops, begins", [(1, [12]), (2, [0, 24]), (3, [0, 12, 24])])
@pytest.mark.parametrize("tall", [False, True])
def test_crops_are_spread_over_the_longer_side(crops, begins, tall):
    """Each pixel of the 20 × 40 frame tells where it is along that side; the shorter one has 4 pixels to spare."""
    frames = torch.arange(40, dtype=torch.uint8)[None, None, :, None].expand(2, 20, -1, 3)
    across = torch.arange(20, dtype=torch.uint8)[None, :, None, None].expand(2, -1, 40, 3)
    if tall:
        frames, across = frames.transpose(1, 2), across.transpose(1, 2)
    views, others = (EvalViews(16, 20, frames=2, crops=crops).of(its) for its in (frames, across))
    assert views.shape == (crops, 3, 2, 16, 16)
    if tall:
        views, others = views.mT, others.mT
    assert views[:, 0, 0, 0].tolist() == [list(range(begin, begin + 16)) for begin in begins]
    assert others[:, 0, 0, :, 0].tolist() == [list(range(2, 18))] * crops


def test_clips_are_taken_from_anywhere_in_a_video():
    sampling = Sampling(frames=4, stride=3)
    assert sampling.span == 10
    torch.manual_seed(0)
    begins = set()
    for _ in range(200):
        first, *others = sampling.at_random(14)
        assert others == [first + 3, first + 6, first + 9]
        begins.add(first)
    assert begins == {0, 1, 2, 3, 4}  # the last frame is 13
    assert sampling.at_random(10) == [0, 3, 6, 9]
    assert sampling.at_random(5) == [0, 3, 1, 4]  # it begins again


@pytest.mark.parametrize("views, begins", [(1, [20]), (2, [10, 30]), (4, [5, 15, 25, 35])])
def test_views_are_spread_over_the_video(views, begins):
    sampling = Sampling(frames=2, stride=4)  # spans 5 frames: of 44, a clip can begin at 0 to 39
    assert sampling.evenly(44, views) == [number for begin in begins for number in (begin, begin + 4)]
