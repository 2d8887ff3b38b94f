"""Along training, at toy size."""

import pytest
import torch

from torchsbp.study.trajectory import emptied, findings, watched, weights

from .commands import rows_of, study


def test_the_study_runs_at_toy_size(data, tmp_path):
    options = ["--models", "vit", "--arms", "grid 0.5;other order", "--epochs", "2"]
    assert study("trajectory", data, tmp_path, *options) == 0
    rows = [row for row in rows_of("trajectory", tmp_path) if "agreement" in row]
    assert [(row["arm"], row["epoch"]) for row in rows] == [
        (arm, e) for arm in ("grid 0.5", "other order") for e in (1, 2)
    ]
    assert [row["full_norms"] for row in rows[:2]] == [row["full_norms"] for row in rows[2:]]
    assert [row["full_accuracy"] for row in rows[:2]] == [row["full_accuracy"] for row in rows[2:]]
    (kept,) = (tmp_path / "states").glob("trajectory, vit, full, *")  # trained once
    known, epochs = torch.load(kept, weights_only=True)
    torch.save((known, [(its, dict.fromkeys(norms, 7.0)) for its, norms in epochs]), kept)
    assert study("trajectory", data, tmp_path, *options[:3], "mlp 0.5", *options[4:]) == 0
    assert set(rows_of("trajectory", tmp_path)[-2]["full_norms"].values()) == {7.0}  # and read where it is
    grid = rows[1]
    assert 0.9 < grid["weights"]["all"] < 1
    assert set(grid["norms"]) == {"", "blocks.0", "blocks.1", "blocks.2"}
    assert 0 <= grid["agreement"] <= 100
    assert (tmp_path / "trajectory_vit.svg").exists()
    assert [its.figure for its in findings(rows)] == ["9 (vit)", "11 (vit)", "8.6 (vit)"]


def test_norms_are_those_of_steps():
    layer = torch.nn.Linear(3, 2, bias=False)
    found = watched(layer)
    for scale in (1.0, 7.0):
        layer.zero_grad()
        layer(torch.ones(1, 3)).backward(torch.full((1, 2), scale))
    assert emptied(found, 2) == {"": pytest.approx((6 * (1 + 49) / 2) ** 0.5)}
    assert found == {"": []}


def test_weights_of_equal_models_are_equal():
    a, b = torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)
    b.load_state_dict(a.state_dict())
    assert weights(a, b) == {"": pytest.approx(1), "all": pytest.approx(1)}
    b.weight.data.neg_()
    assert weights(a, b)["all"] == pytest.approx(-1)
