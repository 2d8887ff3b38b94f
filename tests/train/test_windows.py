"""Windows of untrimmed videos."""

import torch

from torchsbp.train.data.window import Window


def test_the_published_window():
    """128 s at 4 frames a second, every fourth frame, and 8 s: 128 + 32 frames."""
    view = Window().view(torch.tensor([1000]))
    assert view.work[0].tolist() == list(range(969, 1001))
    assert view.long[0].tolist() == list(range(969 - 512, 969, 4))
    assert not view.empty.any()
    assert view.slot.tolist() == [31]


def test_before_the_first_frame_there_is_nothing_but_that_frame():
    view = Window(long=3, long_rate=2, work=4).view(torch.arange(8))
    assert view.slot.tolist() == [0, 1, 2, 3, 3, 3, 3, 3]
    assert view.work[1].tolist() == [0, 1, 1, 1]
    assert view.work[7].tolist() == [4, 5, 6, 7]
    assert view.long[7].tolist() == [0, 0, 2]
    assert view.empty[7].tolist() == [True, False, False]
    assert view.empty[0].tolist() == [True, True, False]


def test_a_rate_of_work_frames():
    view = Window(long=1, long_rate=10, work=3, work_rate=5).view(torch.tensor([7, 30]))
    assert view.work.tolist() == [[2, 7, 7], [20, 25, 30]]
    assert view.slot.tolist() == [1, 2]
    assert view.long.tolist() == [[0], [10]]
