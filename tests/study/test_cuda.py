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
    ("convnext", "down exact, own rows 0.5"), ("swin", "full"), ("swin", "own rows 0.5"), ("hybrid", "own rows 0.5"),
    ("hybrid", "own norm rows 0.5"), ("convnext", "own norm rows 0.5"), ("hybrid", "own stratified rows 0.5"),
    ("convnext", "down exact, own stratified rows 0.5"), ("pooled", "own rows 0.5, then exact"),
]  # fmt: skip


def losses(data, model, arm, **settings):
    """Of two runs, the second in the graph of the first if there is one."""
    training = Training(Run(model, arm, drop_path=0.3), replace(TOY, **settings), Data.load(data))
    assert (training.advance == training.step) is (settings.get("capture") is False)
    found = []
    for seed in (0, 1):
        training.begin(Run(model, arm, seed=seed, epochs=3, drop_path=0.3))
        found += [training.epoch(number) for number in range(3)]
    return found


@pytest.mark.parametrize("model, arm", ARMS)
def test_captured_steps_are_those_one_by_one(data, model, arm):
    assert losses(data, model, arm) == pytest.approx(losses(data, model, arm, capture=False), rel=2e-3)


@pytest.mark.parametrize("model, arm", [its for its in ARMS if its[0] != "swin"])
def test_compiled_and_captured_steps_train_as_plain_ones(data, model, arm):
    plain = losses(data, model, arm, capture=False)
    assert losses(data, model, arm, compile=True) == pytest.approx(plain, rel=0.03)
    assert plain[2] < plain[0]
