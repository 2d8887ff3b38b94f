"""Early stopping: after so many evaluations without a better value, the same when it is resumed."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from torchsbp.train import accuracy
from torchsbp.train.loop import Trainer

from .runs import final, lines, run, same, stopped_at

LONG = {"epochs": 8, "log": {"every_steps": 10}, "checkpoint": {"every_steps": None}}
ACCURACY = [10.0, 30.0, 20.0, 30.0, 5.0, 40.0, 41.0, 42.0]
"""by epoch: the best so far in the second, not better in the three that follow"""


@pytest.fixture(scope="module", autouse=True)
def given_accuracy() -> Iterator[None]:
    """Of averaged weights, by epoch."""
    epoch, evaluate = [0], Trainer.evaluate

    def remember(self):
        epoch[0] = round(self.epoch())
        evaluate(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "evaluate", remember)
        patch.setattr(accuracy.Accuracy, "result", lambda self: {"loss": 1.0, "top1": ACCURACY[epoch[0] - 1]})
        patch.setattr(accuracy.Accuracy, "sections", lambda self: {})
        yield


@pytest.fixture(scope="module")
def whole(given_accuracy, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that ran out of patience."""
    code, out = run(tmp_path_factory.mktemp("whole"), "--patience=3", **LONG)
    assert code == 0
    return out


def test_it_stops_when_nothing_gets_better(whole):
    assert [line["epoch"] for line in lines(whole) if line["kind"] == "valid"] == [1, 2, 3, 4, 5]
    assert lines(whole)[-1] == {"kind": "end", "step": 50, "best": 30.0, "best_step": 20}
    assert (whole / "model.safetensors").exists()


def test_more_patience_goes_on(whole, tmp_path, capsys):
    out = Path(shutil.copytree(whole, tmp_path / "run"))
    assert run(tmp_path, "--patience=3", "--resume=auto", **LONG)[0] == 0  # it is finished, and stays so
    assert "finished at step 50 of 80, out of patience: best top1 30.00" in capsys.readouterr().err
    assert same(final(out), final(whole))
    assert run(tmp_path, "--patience=4", "--resume=auto", **LONG)[0] == 0
    assert lines(out)[-1]["step"] == 80


def test_killed_and_resumed_it_stops_at_the_same_step(whole, tmp_path, capsys):
    with stopped_at(43):
        run(tmp_path / "killed", "--patience=3", **LONG)
    code, out = run(tmp_path / "killed", "--patience=3", "--resume=auto", **LONG)
    assert code == 0
    assert "finished at step 50 of 80, out of patience: best top1 30.00" in capsys.readouterr().err
    assert same(final(whole), final(out))
    assert lines(whole) == lines(out)
