"""The contest end to end at toy size, and its parts."""

import json

import numpy as np
import pytest
import torch

from torchsbp.cli.main import main
from torchsbp.study import contest
from torchsbp.study.augment import Augment, jittered, mixed, warped, with_hole
from torchsbp.study.contest import ARMS
from torchsbp.study.training import MODELS, Data, Run, Settings, schedule, train


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Two classes, dark and light."""
    path, random = tmp_path_factory.mktemp("data") / "images.npz", np.random.default_rng(0)
    arrays = {}
    for part, n in (("train", 64), ("test", 32)):
        y = random.integers(0, 2, n)
        x = random.integers(0, 100, (n, 32, 32, 3)) + 130 * y[:, None, None, None]
        arrays |= {f"x_{part}": x.astype(np.uint8), f"y_{part}": y}
    np.savez(path, **arrays)
    return path


def study(data, out, *more):
    arguments = ["--data", str(data), "--out", str(out), "--toy", "--eager", "--batch", "16", "--epochs", "2"]
    return main(["study", "contest", *arguments, *more])


def test_a_contest_runs_resumes_and_draws_its_table(data, tmp_path, capfd):
    arms = "full;mlp rows 0.25;down exact, rows 0.5"  # the last is not for ViTs
    assert study(data, tmp_path, "--models", "vit", "--arms", arms, "--seeds", "1", "--jobs", "2") == 0
    rows = [json.loads(line) for line in (tmp_path / "contest.jsonl").read_text().splitlines()]
    assert {row["run"] for row in rows if row["epoch"] == 2} == {"vit, full, seed 0", "vit, mlp rows 0.25, seed 0"}
    table = (tmp_path / "contest.md").read_text()
    assert "| vit | mlp rows 0.25 | 2 | " in table
    assert table in capfd.readouterr().out + "\n"
    assert study(data, tmp_path, "--models", "vit", "--arms", "full", "--seeds", "1") == 0
    assert len((tmp_path / "contest.jsonl").read_text().splitlines()) == len(rows)


@pytest.mark.slow
def test_a_failure_is_told_and_the_others_go_on(data, tmp_path):
    with np.load(data) as arrays:
        np.savez(tmp_path / "wrong.npz", **{**arrays, "x_test": arrays["x_test"][:, :, :, :2]})
    assert study(tmp_path / "wrong.npz", tmp_path, "--models", "vit", "--arms", "full", "--seeds", "1") == 0
    (row,) = contest.read(tmp_path / "contest.jsonl")
    assert row["error"].startswith("RuntimeError")
    assert f"vit, full, seed 0: {row['error']}" in (tmp_path / "contest.md").read_text()


@pytest.mark.parametrize("model", MODELS)
def test_full_backpropagation_and_ratio_one_train_the_same_model(data, model):
    settings = Settings(epochs=2, batch=16, compile=False, toy=True, evaluations=2)
    runs = Run(model, "full", 0), Run(model, "exact", 0, ARMS["exact"])
    images = Data.load(data, torch.device("cpu"))
    full, exact = ([row["loss"] for row in train(run, settings, images)] for run in runs)
    assert len(full) == 2
    assert exact == pytest.approx(full, rel=2e-3)


@pytest.mark.parametrize("model, arm", [(its.model, its.arm) for its in contest.runs(list(MODELS), list(ARMS), [0])])
def test_every_arm_runs(data, model, arm):
    settings = Settings(epochs=1, batch=32, compile=False, toy=True, evaluations=1)
    (row,) = train(Run(model, arm, 0, ARMS[arm]), settings, Data.load(data, torch.device("cpu")))
    assert 0 <= row["accuracy"] <= 100
    assert 0.3 < row["loss"] < 3


def test_unknown_names_are_refused(data, tmp_path, capfd):
    assert study(data, tmp_path, "--arms", "half") == 2
    assert "unknown arms: half; allowed: full; exact;" in capfd.readouterr().err
    assert study(tmp_path / "none.npz", tmp_path) == 1


def test_arms_that_are_stopped_early_are_pairs():
    found = contest.runs(["vit", "convnext"], ["full", "mlp 0.5"], range(2))
    assert [run.name for run in found[:3]] == ["vit, full, seed 0", "convnext, full, seed 0", "vit, mlp 0.5, seed 0"]
    assert {run.seed for run in found[3:]} == {1}


def test_the_table_compares_pairs():
    results = [("full", 0, 2, 80.0), ("full", 1, 2, 82.0), ("rows 0.5", 0, 1, 50.0), ("rows 0.5", 0, 2, 79.5)]
    rows = [
        {"model": "vit", "arm": arm, "seed": seed, "epoch": epoch, "accuracy": accuracy, "seconds": 4.0}
        | {"peak_bytes": 100 if arm == "full" else 25}
        for arm, seed, epoch, accuracy in results
    ]
    assert "| vit | rows 0.5 | 2 | 79.5 | 79.50 | -0.50 (1) | 0.25× | 2.0 |" in contest.table(rows)


def test_the_schedule_warms_up_and_ends_at_zero():
    assert [round(schedule(p, 0.1), 4) for p in (0, 0.05, 0.1, 0.55, 1)] == [0, 0.5, 1, 0.5, 0]


def generator():
    return torch.Generator().manual_seed(0)


def test_the_same_generator_gives_the_same_images():
    x, y = torch.rand(8, 3, 16, 16), torch.arange(8) % 2
    a, b = (Augment()(x, y, 2, generator()) for _ in range(2))
    assert torch.equal(a[0], b[0])
    assert torch.equal(a[1], b[1])
    torch.testing.assert_close(a[1].sum(1), torch.ones(8))


def test_images_that_are_not_turned_keep_their_pixels():
    x = torch.rand(32, 3, 8, 8)
    for before, after in zip(x, warped(x, 0, 0.0, generator()), strict=True):
        assert min((after - before).abs().max(), (after - before.flip(2)).abs().max()) < 1e-5


def test_holes_are_squares_of_the_given_side():
    holes = (with_hole(torch.ones(200, 3, 16, 16), 0.5, generator())[:, 0] == 0.5).sum((1, 2))
    assert holes.max() == 64
    assert holes.min() >= 16


def test_jitter_of_nothing_is_nothing_and_mixing_keeps_means():
    x, targets = torch.rand(64, 3, 4, 4), torch.rand(64, 5)
    torch.testing.assert_close(jittered(x, 0.0, generator()), x)
    images, labels = mixed(x, targets, 1.0, generator())
    assert not torch.equal(images, x)
    part = (labels - targets).abs().sum()
    assert part > 0
    assert all(torch.equal(a, b) for a, b in zip(mixed(x, targets, 0.0, generator()), (x, targets), strict=True))
