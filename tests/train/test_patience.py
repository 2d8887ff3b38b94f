"""Early stopping: after so many evaluations without a better value, the same when it is resumed."""

import pytest

from torchsbp.train import accuracy
from torchsbp.train.loop import Trainer

from .runs import final, lines, run, same, stopped_at

LONG = {"epochs": 8, "log": {"every_steps": 10}, "checkpoint": {"every_steps": None}}
ACCURACY = [10.0, 30.0, 20.0, 30.0, 5.0, 40.0, 41.0, 42.0]
"""by epoch: the best so far in the second, not better in the three that follow"""


@pytest.fixture(autouse=True)
def given_accuracy(monkeypatch):
    """Of averaged weights, by epoch."""
    epoch, evaluate = [0], Trainer.evaluate

    def remember(self):
        epoch[0] = round(self.epoch())
        evaluate(self)

    monkeypatch.setattr(Trainer, "evaluate", remember)
    monkeypatch.setattr(accuracy.Accuracy, "result", lambda self: {"loss": 1.0, "top1": ACCURACY[epoch[0] - 1]})
    monkeypatch.setattr(accuracy.Accuracy, "sections", lambda self: {})


def test_it_stops_when_nothing_gets_better(tmp_path, capsys):
    code, out = run(tmp_path, "--patience=3", **LONG)
    assert code == 0
    assert "finished at step 50 of 80, out of patience: best top1 30.00" in capsys.readouterr().err
    assert [line["epoch"] for line in lines(out) if line["kind"] == "valid"] == [1, 2, 3, 4, 5]
    assert lines(out)[-1] == {"kind": "end", "step": 50, "best": 30.0, "best_step": 20}
    assert (out / "model.safetensors").exists()


def test_more_patience_goes_on(tmp_path):
    _, out = run(tmp_path, "--patience=3", **LONG)
    before = final(out)
    assert run(tmp_path, "--patience=3", "--resume=auto", **LONG)[0] == 0  # it is finished, and stays so
    assert same(final(out), before)
    assert run(tmp_path, "--patience=4", "--resume=auto", **LONG)[0] == 0
    assert lines(out)[-1]["step"] == 80


def test_killed_and_resumed_it_stops_at_the_same_step(tmp_path):
    _, whole = run(tmp_path / "whole", "--patience=3", **LONG)
    with stopped_at(43):
        run(tmp_path / "killed", "--patience=3", **LONG)
    code, out = run(tmp_path / "killed", "--patience=3", "--resume=auto", **LONG)
    assert code == 0
    assert same(final(whole), final(out))
    assert lines(whole) == lines(out)
