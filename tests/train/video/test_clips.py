"""Clips of videos that can't be read: others take their place, and they are told."""

import pytest
import torch

from torchsbp.errors import DataError, UsageError
from torchsbp.train.data.clips import Clips, EvalClips, Note, Sampling, TrainClips
from torchsbp.train.data.moving import Held

SAMPLING = Sampling(4, 2)


class Some(Clips):
    """Every second video raises an error when it is read; the others are of one grey."""

    heads, names = ("class",), (["a"] * 64,)
    labels = tuple((number,) for number in range(64))

    def __init__(self, error: Exception) -> None:
        self.error = error

    def title(self, index):
        return f"number {index}"

    def open(self, index):
        if index % 2:
            raise self.error
        return Held(torch.full((5 + index, 8, 8, 3), index, dtype=torch.uint8))


@pytest.mark.parametrize("error", [DataError("gone"), RuntimeError("gone"), IndexError("gone"), MemoryError("gone")])
def test_whatever_a_decoder_raises_ends_no_run(error):
    """Half of the videos can't be read; each of 2,000 samples is of a video that can, with that one's class."""
    clips = TrainClips(Some(error), SAMPLING)
    for index in range(2000):
        frames, target = clips[index % 64]
        number = int(target.labels)
        assert (frames == number).all()
        assert number % 2 == 0
        unread = [note for note in target.notes if note.kind == "unread"]
        assert bool(unread) == bool(index % 2)
    text = "gone" if isinstance(error, DataError) else "video number 1 can't be read: gone"
    assert clips[1][1].notes[0] == Note("unread", text)


def test_in_evaluation_they_have_no_class():
    clips = EvalClips(Some(RuntimeError("gone")), SAMPLING, views=3)
    frames, target = clips[1]
    assert frames.shape == (12, 8, 8, 3)
    assert target.labels.tolist() == [-1]
    assert target.notes == (Note("unread", "video number 1 can't be read: gone"),)
    frames, target = clips[0]
    assert target.notes == (Note("short", "number 0: 5 frames, a clip spans 7"),)


def test_what_is_not_installed_is_no_broken_video():
    with pytest.raises(UsageError, match="install it"):
        TrainClips(Some(UsageError("install it")), SAMPLING)[1]
