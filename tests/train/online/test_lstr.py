"""The temporal model: what it may look at, and frame by frame the same as in batches."""

import pytest
import torch

from torchsbp.errors import UsageError
from torchsbp.train.data.generated import Generated
from torchsbp.train.data.window import Window
from torchsbp.train.online.evaluation import Precision, score_video
from torchsbp.train.online.lstr import LSTR, Attention, Temporal, sinusoids
from torchsbp.train.online.stream import Stream

from .models import CLASSES, SIZES, detector, video

WINDOW = Window(long=5, long_rate=2, work=4)


def model() -> LSTR:
    torch.manual_seed(0)
    return LSTR(6, CLASSES, WINDOW, SIZES).double().eval()


def features(samples: int = 2) -> torch.Tensor:
    return torch.randn(samples, 9, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(2))


NONE_EMPTY = torch.zeros(2, 5, dtype=torch.bool)


@pytest.mark.parametrize("changed", range(4))
def test_a_work_frame_changes_no_earlier_one(changed):
    x, y = features(), features()
    y[:, 5 + changed] += 1
    before, after = (model()(its, NONE_EMPTY) for its in (x, y))
    assert torch.equal(before[:, :changed], after[:, :changed])
    assert (before[:, changed:] != after[:, changed:]).all()


def test_empty_slots_are_not_seen_and_the_others_are():
    empty = NONE_EMPTY.clone()
    empty[:, :3] = True
    x, y, z = features(), features(), features()
    y[:, :3] += 1
    z[:, 3] += 1
    of_x, of_y, of_z = (model()(its, empty) for its in (x, y, z))
    assert torch.equal(of_x, of_y)
    assert (of_x != of_z).all()


def test_the_place_of_a_memory_counts():
    x = features()
    turned = torch.cat((x[:, :5].flip(1), x[:, 5:]), 1)
    assert not torch.allclose(model()(x, NONE_EMPTY), model()(turned, NONE_EMPTY))


def test_attention_is_softmax_of_products():
    torch.manual_seed(0)
    attention = Attention(SIZES).double()
    x, m, s = (torch.randn(n, 16, dtype=torch.float64) for n in (3, 5, 5))
    k, v = attention.kv(m + s).chunk(2, -1)
    heads = []
    for head in range(2):
        its = slice(8 * head, 8 * head + 8)
        weights = (attention.q(x)[:, its] @ k[:, its].T / 8**0.5).softmax(-1)
        heads.append(weights @ v[:, its])
    expected = attention.out(torch.cat(heads, -1))
    found = attention(x, attention.placed(attention.memory(m), s))
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_positions_are_sines_and_cosines():
    table = sinusoids(7, 8)
    assert table[0].tolist() == [0, 1] * 4
    torch.testing.assert_close(table[3, 0], torch.tensor(3.0).sin())
    torch.testing.assert_close(table[3, 7], torch.tensor(3 / 10000 ** (6 / 8)).cos())


@pytest.mark.parametrize(
    "window",
    [Window(5, 2, 4), Window(3, 1, 2), Window(2, 3, 3, 2), Window(1, 1, 1)],
    ids=lambda its: f"{its.long}x{its.long_rate}+{its.work}x{its.work_rate}",
)
def test_streaming_equals_batches(window):
    """From the first frame on, over videos longer and shorter than what is held."""
    for frames in (2, 30):
        clip = video(frames)
        stream = Stream(detector(window))
        found = torch.stack([stream.step(frame) for frame in clip])
        torch.testing.assert_close(found, score_video(detector(window).eval(), clip), rtol=1e-12, atol=1e-12)


def test_the_first_window_is_one_batch():
    """Its frames, one after the other, see what they see in a window of the first frames: as LSTR is trained."""
    clip, detects = video(4), detector(WINDOW).eval()
    empty = torch.tensor([[True] * 4 + [False]])
    with torch.no_grad():
        expected = detects(clip[None, [0] * 5 + [0, 1, 2, 3]], empty)[0].softmax(-1)
    torch.testing.assert_close(score_video(detects, clip), expected, rtol=1e-12, atol=1e-12)


def test_under_autocast_scores_are_evaluated_in_single_precision():
    """On a CPU softmax stays in bfloat16, which NumPy does not have."""
    evaluator, detects = Precision(Generated(1, 8, 6, seed=0)), detector(WINDOW).float().eval()
    clip = video(1, 8)
    with torch.autocast("cpu", torch.bfloat16):
        evaluator.update(detects, (clip, torch.tensor([0])), valid=1)
    found = torch.from_numpy(evaluator.scores[0])
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, score_video(detects, clip[0]), rtol=0, atol=0.02)


def test_a_width_that_heads_do_not_divide_is_refused():
    with pytest.raises(
        UsageError, match=r"task.temporal.width=20 is not allowed; allowed: multiples of 2 · heads = 16"
    ):
        Temporal(width=20, heads=8)
