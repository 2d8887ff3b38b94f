"""A step as one CUDA graph is the step."""

from dataclasses import replace

import pytest
import torch

from torchsbp.study.data import Data
from torchsbp.study.training import Run, Training

from .test_training import TOY

pytestmark = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
ARMS = [
    ("vit", "full"), ("vit", "exact"), ("vit", "own rows 0.5"), ("vit", "patches ½"), ("convnext", "full"),
    ("convnext", "down exact, own rows 0.5"), ("swin", "full"), ("swin", "own rows 0.5"),
]  # fmt: skip


def check(data, model, arm, **settings):
    """Of two runs, the second in the graph of the first."""
    losses = []
    for capture in (True, False):
        training = Training(Run(model, arm, drop_path=0.3), replace(TOY, capture=capture, **settings), Data.load(data))
        assert (training.advance == training.step) is not capture
        for seed in (0, 1):
            training.begin(Run(model, arm, seed=seed, epochs=2, drop_path=0.3))
            losses.append([training.epoch(number) for number in range(2)])
    assert losses[0] == pytest.approx(losses[2], rel=2e-3)
    assert losses[1] == pytest.approx(losses[3], rel=2e-3)
    assert losses[0] != losses[1]


@pytest.mark.parametrize("model, arm", ARMS)
def test_captured_steps_are_those_one_by_one(data, model, arm):
    check(data, model, arm)


@pytest.mark.parametrize("arm", ["full", "own rows 0.5"])
def test_compiled_steps_are_captured(data, arm):
    check(data, "vit", arm, compile=True)
