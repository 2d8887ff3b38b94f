"""The contest end to end at toy size, and its tables."""

import fcntl
import re
import subprocess
import sys
import time
from pathlib import Path
from threading import Thread

import numpy as np
import pytest

from torchsbp.cli import study as command
from torchsbp.cli.main import main
from torchsbp.study import contest, pool, results, speed
from torchsbp.study.plan import Plan
from torchsbp.study.training import Run

from .commands import rows_of, study


def test_a_contest_runs_resumes_and_draws_its_tables(data, tmp_path, capfd):
    arms = "full;mlp rows 0.25;down exact, rows 0.5"  # the last is not for ViTs
    options = ["--models", "vit", "--arms", arms, "--epochs", "1,2", "--commit", "abc1234"]
    assert study("contest", data, tmp_path, *options) == 0
    rows = rows_of("contest", tmp_path)
    assert {row["commit"] for row in rows} == {"abc1234"}
    assert {row["arm"] for row in rows if "done" in row} == {"full", "mlp rows 0.25"}
    assert [(row["arm"], row["epoch"]) for row in rows if "accuracy" in row] == [
        ("full", 1), ("full", 2), ("mlp rows 0.25", 1), ("mlp rows 0.25", 2),
    ]  # fmt: skip
    table = (tmp_path / "contest.md").read_text()
    assert "| vit | mlp rows 0.25 | 2 | " in table
    assert "No table at equal time" in table
    said = capfd.readouterr().out
    assert said.startswith("2 runs, 1 at a time; 0 were done before\n")
    assert table in said
    assert (tmp_path / "contest.svg").read_text().startswith("<svg xmlns=")
    assert study("contest", data, tmp_path, *options) == 0
    assert len(rows_of("contest", tmp_path)) == len(rows)
    assert capfd.readouterr().out.startswith("0 runs, 1 at a time; 2 were done before\n")


def test_lengths_that_a_longer_run_had_are_not_run_again(data, tmp_path):
    options = ["--models", "vit", "--arms", "full", "--seeds", "2"]
    assert study("contest", data, tmp_path, *options, "--epochs", "1,2,3") == 0
    before = len(rows_of("contest", tmp_path))
    assert study("contest", data, tmp_path, *options, "--epochs", "1,3") == 0
    assert len(rows_of("contest", tmp_path)) == before
    assert study("contest", data, tmp_path, *options, "--epochs", "1,2", "--lr", "1,2") == 0
    later = rows_of("contest", tmp_path)[before:]
    assert [(row["seed"], row["lr"]) for row in later if "done" in row] == [(0, 2.0), (1, 2.0)]
    assert study("contest", data, tmp_path, *options, "--epochs", "1,4") == 0
    assert [row["epochs"] for row in rows_of("contest", tmp_path) if "done" in row][-2:] == [4, 4]


def test_results_have_the_commit_of_the_checkout(tmp_path, monkeypatch):
    monkeypatch.setattr(command, "__file__", str(tmp_path / "src" / "torchsbp" / "cli" / "study.py"))
    assert command.checkout() == ""  # installed from a package
    git = ["git", "-C", str(tmp_path), "-c", "user.name=n", "-c", "user.email=e"]
    source, result = tmp_path / "src" / "file.py", tmp_path / "result"
    source.parent.mkdir()
    for file in (source, result):
        file.write_text("a")
    for words in (["init", "-q"], ["add", "."], ["commit", "-qm", "first"]):
        subprocess.run([*git, *words], check=True)
    assert re.fullmatch("[0-9a-f]{7,}", command.checkout())
    result.write_text("b")
    assert re.fullmatch("[0-9a-f]{7,}", command.checkout())
    source.write_text("b")
    assert command.checkout().endswith("-dirty")


def test_several_runs_at_once_are_processes_of_their_own(data, tmp_path):
    options = ["--models", "vit", "--arms", "full;grid 0.5", "--epochs", "1", "--jobs", "2"]
    assert study("contest", data, tmp_path, *options) == 0
    rows = rows_of("contest", tmp_path)
    assert {row["arm"] for row in rows if "done" in row} == {"full", "grid 0.5"}
    (mine,) = (row["loss"] for row in rows if row["arm"] == "full" and "loss" in row)
    assert study("contest", data, tmp_path / "here", *options[:-1], "0", "--arms", "full") == 0
    assert [row["loss"] for row in rows_of("contest", tmp_path / "here") if "loss" in row] == [pytest.approx(mine)]


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="asks Linux for the processes of a process")
def test_runs_end_with_a_study_that_is_killed(data, tmp_path):
    command = [sys.executable, "-m", "torchsbp", "study", "contest", "--data", str(data), "--out", str(tmp_path)]
    options = ["--size", "toy", "--eager", "--batch", "16", "--models", "vit", "--arms", "full", "--epochs", "1,100000"]
    with subprocess.Popen([*command, *options], stdout=subprocess.PIPE, text=True) as study:
        assert study.stdout is not None
        next(line for line in study.stdout if "epoch 1, accuracy" in line)  # its second length is being trained
        children = Path(f"/proc/{study.pid}/task/{study.pid}/children").read_text().split()
        study.kill()
    assert children
    end = time.monotonic() + 20
    while any(map(alive, children)) and time.monotonic() < end:
        time.sleep(0.05)
    assert not [pid for pid in children if alive(pid)]


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_process_takes_runs_of_one_arm_first(data, tmp_path):
    options = ["--models", "vit", "--arms", "full;grid 0.5;mlp 0.5", "--epochs", "1", "--seeds", "2", "--jobs", "1"]
    assert study("contest", data, tmp_path, *options) == 0
    found = [(row["arm"], row["seed"]) for row in rows_of("contest", tmp_path) if "done" in row]
    assert found == [(arm, seed) for arm in ("full", "grid 0.5", "mlp 0.5") for seed in (0, 1)]
    left = [Run("vit", "full"), Run("vit", "mlp 0.5", seed=1), Run("vit", "mlp 0.5", seed=1, drop_path=0.0)]
    assert pool.next_of(left, Run("vit", "mlp 0.5", drop_path=0.0)).drop_path == 0
    assert pool.next_of(left, Run("swin", "full")).arm == "full"
    assert [run.arm for run in left] == ["mlp 0.5"]


def test_arms_begin_from_the_best_rate_so_far(data, tmp_path):
    options = ["--models", "vit", "--epochs", "vit 1"]
    assert study("contest", data, tmp_path, *options, "--arms", "full", "--lr", "0,3") == 0
    assert study("contest", data, tmp_path, *options, "--arms", "full;grid 0.5", "--tuned", "--lr", "1,2") == 0
    accuracy = {(row["arm"], row["lr"]): row["accuracy"] for row in rows_of("contest", tmp_path) if "accuracy" in row}
    best = max((0, 3), key=lambda lr: accuracy["full", lr])
    assert {lr for arm, lr in accuracy if arm == "grid 0.5"} == {best, 2 * best}


def test_speed_is_measured_alone_with_all_arms(data, tmp_path, monkeypatch):
    monkeypatch.setattr(speed, "ROUNDS", 2)
    monkeypatch.setattr(speed, "STEPS", 2)
    arms = "full;exact;checkpoint;batch ½;patches ½"
    assert study("speed", data, tmp_path, "--models", "vit", "--arms", arms) == 0
    found = {row["arm"]: row for row in rows_of("speed", tmp_path) if "ms" in row}
    assert list(found) == arms.split(";")
    assert all(row["ms"] > 0 for row in found.values())
    assert found["batch ½"]["steps"] == 2 * found["full"]["steps"] == 8
    assert "| vit | full | " in (tmp_path / "speed.md").read_text()


def test_in_this_process_nothing_begins_after_the_time_either(data, tmp_path):
    options = ["--models", "vit", "--arms", "full", "--epochs", "1", "--seeds", "3", "--seconds", "0.001"]
    assert study("contest", data, tmp_path, *options) == 0
    assert [row["seed"] for row in rows_of("contest", tmp_path) if "done" in row] in ([], [0])


def test_other_settings_in_one_folder_are_refused(data, tmp_path, capfd):
    options = ["--models", "vit", "--arms", "full", "--epochs", "1"]
    assert study("contest", data, tmp_path, *options) == 0
    assert study("contest", data, tmp_path, *options, "--images", "32") == 2
    assert "has results of contest with images 0; use the same, or another --out" in capfd.readouterr().err


@pytest.mark.parametrize("option", ["--jobs", "--images"])
def test_counts_below_0_are_refused(option, data, tmp_path, capfd):
    with pytest.raises(SystemExit):
        study("contest", data, tmp_path, option, "-1")
    assert f"argument {option}: '-1' is not a whole number, 0 or more" in capfd.readouterr().err


@pytest.mark.slow
def test_a_failure_is_told_and_the_others_go_on(data, tmp_path):
    with np.load(data) as arrays:
        np.savez(tmp_path / "wrong.npz", **{**arrays, "x_test": arrays["x_test"][:, :16, :16]})
    assert study("contest", tmp_path / "wrong.npz", tmp_path, "--models", "vit", "--arms", "full", "--epochs", "1") == 0
    (row,) = rows_of("contest", tmp_path)
    assert row["error"].startswith("AssertionError: Input height (16)")
    assert f"{row['run']}: {row['error']}" in (tmp_path / "contest.md").read_text()


def test_unknown_names_are_refused(data, tmp_path, capfd):
    assert study("contest", data, tmp_path, "--arms", "half") == 2
    assert "unknown arms: half; allowed: full; exact;" in capfd.readouterr().err
    assert study("contest", tmp_path / "none.npz", tmp_path) == 1
    assert study("contest", data, tmp_path, "--models", "video") == 2
    assert "nothing to run: no arm of contest for these --models" in capfd.readouterr().err
    assert study("contest", data, tmp_path, "--batch", "65") == 2
    assert "has fewer images than --batch 65" in capfd.readouterr().err
    assert main(["study", "contest", "--out", str(tmp_path)]) == 2
    assert "contest needs --data: an .npz file with x_train," in capfd.readouterr().err


@pytest.mark.parametrize(
    "change, message",
    [
        (
            lambda its: its | {"x_train": its["x_train"] / 255},
            "x_train and y_train are [64, 32, 32, 3] (float64) and [64]",
        ),
        (lambda its: its | {"y_test": its["y_test"][:9]}, "x_test and y_test are [32, 32, 32, 3] (uint8) and [9]"),
        (lambda its: {"x_train": its["x_train"]}, "has no y_train, x_test, y_test; a study needs the arrays"),
        (None, "can not be read as an .npz file of arrays"),
    ],
)
def test_wrong_data_are_told_before_anything_runs(data, tmp_path, capfd, change, message):
    file = tmp_path / "wrong.npz"
    file.write_text("no arrays")
    if change:
        with np.load(data) as arrays:
            np.savez(file, **change(dict(arrays)))
    assert study("contest", file, tmp_path, "--models", "vit") == 1
    assert message in capfd.readouterr().err
    assert not (tmp_path / "contest.jsonl").exists()


def test_what_is_stopped_early_has_pairs():
    """What is the same model as full's runs once."""
    found = contest.jobs(Plan(("vit", "convnext"), ("full", "exact", "mlp 0.5"), seeds=2))
    first = [("vit", "full"), ("convnext", "full"), ("vit", "exact"), ("convnext", "exact"), ("vit", "mlp 0.5")]
    assert [(run.model, run.arm) for run in found[:5]] == first
    assert [(run.arm, run.seed) for run in found[5:]] == [("full", 1), ("full", 1), ("mlp 0.5", 1)]


def rows_by_hand():
    """Full backpropagation takes 10 s an epoch, "rows 0.5" 8; one learning rate suits it better than the other."""
    found = [
        ("full", lr, seed, epochs, 80 + seed + epochs / 10) for lr in (1,) for seed in (0, 1) for epochs in (10, 40)
    ]
    found += [("rows 0.5", lr, seed, epochs, 79 + lr + seed + epochs / 10) for lr in (0.5, 1.5) for seed in (0, 1) for epochs in (10, 40)]  # fmt: skip  # noqa: E501
    rows = [
        {"study": "contest", "run": f"{its[:4]}", "model": "vit", "arm": its[0], "lr": its[1], "drop_path": 0.1}
        | {"seed": its[2], "epochs": its[3], "epoch": its[3], "accuracy": its[4]}
        for its in found
    ]
    for arm, ms in (("full", 100.0), ("exact", 110.0), ("rows 0.5", 80.0)):
        speeds = {"ms": ms, "steps": 100, "peak_bytes": 100 if arm == "full" else 25}
        rows.append({"study": "speed", "run": arm, "model": "vit", "arm": arm} | speeds)
    return rows


def test_the_table_compares_pairs_with_the_learning_rate_that_suits_an_arm():
    table = contest.equal_epochs(rows_by_hand())
    assert "| vit | rows 0.5 | 40 | 84.5, 85.5 | 85.00 | +0.50 ± 0.00 (2) |" in table
    assert "| vit | full | 10 | 81.0, 82.0 | 81.50 | +0.00 ± 0.00 (2) |" in table


def test_at_equal_time_a_faster_arm_has_more_epochs():
    """In the time of 20 epochs of full: 18.18 exact, 25 of the arm; accuracy grows by 1.5 with every doubling."""
    table = contest.equal_time(rows_by_hand())
    assert "| vit | 20.0 | full | 20.0 | 83.00 | +0.00 ± 0.00 (2) | +0.21 ± 0.00 (2) | 1.00× |" in table
    assert "| vit | 20.0 | exact | 18.2 | 82.79 | -0.21 ± 0.00 (2) | +0.00 ± 0.00 (2) | 0.25× |" in table
    assert "| vit | 20.0 | rows 0.5 | 25.0 | 83.98 | +0.98 ± 0.00 (2) | +1.19 ± 0.00 (2) | 0.25× |" in table


def test_lengths_beyond_those_that_were_run_are_not_guessed():
    curve = {10: 80.0, 40: 84.0}
    assert contest.at(curve, 20) == pytest.approx(82)
    assert contest.at(curve, 40) == 84
    assert contest.at(curve, 41) is None
    assert contest.at(curve, 9) is None


def test_between_three_lengths_accuracy_follows_a_parabola():
    """80 + 3 d − d²/2 with the doublings d since 10 epochs."""
    curve = {10: 80.0, 20: 82.5, 40: 84.0}
    assert contest.at(curve, 10 * 2**0.5) == pytest.approx(81.375)
    assert contest.at(curve, 10 * 2**1.5) == pytest.approx(83.375)
    assert [contest.at(curve, length) for length in curve] == pytest.approx([80, 82.5, 84])


def test_equal_time_reads_the_lengths_that_every_long_run_has():
    """A short run of the first seeds too would leave the others out; a run that is not over yet says nothing."""
    short, long = {4: 0.0}, {8: 80.0, 16: 85.0, 32: 88.0}
    lengths = contest.shared([short | long, long, short | {8: 80.0}])
    assert lengths == {8, 16, 32}
    assert contest.budgets(lengths) == pytest.approx([11.2, 16, 32 / 1.4])
    assert contest.budgets({6, 8}) == []
    found = {("vit", "full"): {0: short | long, 1: long, 2: {8: 80.0, 16: 85.0}}}
    assert contest.by_seed(found, "vit", "exact", lengths, 16) == pytest.approx({0: 85, 1: 85})


def test_one_lucky_seed_is_no_better_setting():
    def rows(lr, *accuracies):
        its = {"study": "contest", "model": "vit", "arm": "full", "lr": lr, "drop_path": 0.1, "epoch": 8}
        return [its | {"run": f"{lr}, {seed}", "seed": seed, "accuracy": got} for seed, got in enumerate(accuracies)]

    assert contest.tuned(rows(1, 80, 81) + rows(2, 85))["vit", "full"] == (1, 0.1)
    assert contest.tuned(rows(1, 80, 81) + rows(2, 85, 79))["vit", "full"] == (2, 0.1)


def test_intervals_are_student_s():
    """Of the numbers 0 and 1: ± 12.7062 · √½ / √2. Of many the last known quantile, which is wide."""
    assert results.interval([0, 1]) == pytest.approx(12.7062 / 2)
    assert results.interval([0, 1] * 10) == pytest.approx(2.2622 * (5 / 19) ** 0.5 / 20**0.5)
    assert results.interval([1]) is None


def test_speed_is_relative_to_full_backpropagation():
    assert "| vit | rows 0.5 | 80.00 | 8.00 | 1.25× | 0.25× |" in speed.table(rows_by_hand())
    alone = [row for row in rows_by_hand() if row["arm"] != "full"]
    assert "| vit | rows 0.5 | 80.00 | 8.00 | – | – |" in speed.table(alone)


def test_nobody_is_timed_while_another_gets_ready(tmp_path):
    order = []

    def timed():
        with speed.held(tmp_path, fcntl.LOCK_EX):
            order.append("timed")

    with speed.held(tmp_path, fcntl.LOCK_SH), speed.held(tmp_path, fcntl.LOCK_SH):
        thread = Thread(target=timed)
        thread.start()
        thread.join(0.1)
        order.append("ready")
    thread.join()
    assert order == ["ready", "timed"]
