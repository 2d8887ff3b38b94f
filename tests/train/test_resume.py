"""Nothing lost: killed anywhere and resumed, a run ends bit for bit where one that was never killed does."""

import os
import random
import shutil
import signal
import subprocess
import time
from collections import Counter
from pathlib import Path

import pytest
import torch

from torchsbp.cli.main import INTERRUPTED
from torchsbp.train.record import WEIGHTS

from .kills import PHASES, ended, killed
from .runs import ENVIRONMENT, command, final, lines, recipe, run, same, stopped_at


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was never interrupted."""
    code, out = run(tmp_path_factory.mktemp("whole"))
    assert code == 0
    return out


def test_the_same_seed_gives_the_same_run(whole, tmp_path):
    _, again = run(tmp_path)
    assert same(final(whole), final(again))
    assert lines(whole) == lines(again)


def test_another_seed_gives_another_run(whole, tmp_path):
    _, other = run(tmp_path, "--seed", "1")
    assert not same(final(whole)["model"], final(other)["model"])


def test_workers_change_nothing(whole, tmp_path):
    """Augmentation is seeded by sample, not by worker."""
    _, other = run(tmp_path, "--task.data.workers", "2")
    assert same(final(whole), final(other))


@pytest.mark.parametrize("step", [3, 10, 13])
def test_resumed_from_any_checkpoint_it_ends_the_same(whole, tmp_path, step):
    """Within an epoch, at its end, and while losses were being averaged for the next line of metrics."""
    with stopped_at(step):
        run(tmp_path, "--checkpoint.every_steps", "1")
    code, out = run(tmp_path, "--checkpoint.every_steps", "1", "--resume", "auto")
    assert code == 0
    assert same(final(whole), final(out))
    assert lines(whole) == lines(out)


def test_killed_in_every_phase_it_ends_the_same(whole, tmp_path):
    path = recipe(tmp_path, checkpoint={"every_steps": 1})
    chance = random.Random(0)
    for phase in PHASES:
        tries = 5
        while killed(path, phase, 1, chance) is None:  # on a busy machine it had ended: then again from the beginning
            tries -= 1
            assert tries
            shutil.rmtree(path.parent / "run")
    assert_same(whole, ended(path))


@pytest.mark.slow
@pytest.mark.parametrize("processes, kills", [(1, 60), (2, 40)])
def test_killed_at_random_moments_it_ends_the_same(tmp_path, processes, kills):
    """A hundred kills, spread over all phases; several in each run."""
    whole = ended(recipe(tmp_path / "whole", checkpoint={"every_steps": 1}), processes)
    chance = random.Random(processes)
    began, found, number = time.monotonic(), Counter(), 0
    while found.total() < kills:
        path = recipe(tmp_path / f"killed {number}", checkpoint={"every_steps": 1})
        for _ in range(12):
            wanted = min(PHASES, key=lambda phase: (found[phase], chance.random()))
            found.update(filter(None, [killed(path, wanted, processes, chance)]))
        assert_same(whole, ended(path, processes))
        number += 1
    print(f"\n{processes} processes, {number} runs, {time.monotonic() - began:.0f} s, killed while {dict(found)}")
    assert min(found[phase] for phase in PHASES) >= kills // 10


def assert_same(whole: Path, out: Path) -> None:
    assert same(final(whole), final(out))
    assert lines(whole) == lines(out)
    assert (whole / WEIGHTS).read_bytes()[-1000:] == (out / WEIGHTS).read_bytes()[-1000:]  # its head has the folder
    assert not list((out / "checkpoints").glob(".*.tmp"))


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
def test_a_signal_finishes_the_step_saves_and_exits(whole, tmp_path, number):
    path = recipe(tmp_path, task={"data": {"workers": 1}}, checkpoint={"every_steps": None})
    process = subprocess.Popen(
        command(path, "--log.every_steps", "1"),
        env=ENVIRONMENT,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    out = tmp_path / "run"
    while not (out / "metrics.jsonl").exists() or len(lines(out)) < 3:
        time.sleep(0.01)
    os.killpg(process.pid, number)  # the workers get it too, as from a terminal or a job manager
    _, errors = process.communicate(timeout=60)
    assert process.returncode == INTERRUPTED, errors
    assert errors.splitlines()[-1] == "interrupted: everything is saved; continue with --resume auto"
    done = final(out)["progress"]["step"]
    assert lines(out)[-1]["step"] == done
    assert run(tmp_path, "--resume", "auto")[0] == 0
    assert same(final(whole)["model"], final(out)["model"])


def test_the_last_checkpoints_and_the_best_are_kept(whole):
    names = sorted(path.name for path in (whole / "checkpoints").iterdir())
    assert names == ["best.pt", "step-0000000018.pt", "step-0000000020.pt"]
    best = torch.load(whole / "checkpoints" / "best.pt", weights_only=True)["progress"]
    assert best["step"] == best["best_step"] == best["evaluated"]
    assert best["best"] == max(line["ema_top1"] for line in lines(whole) if line["kind"] == "valid")


def test_a_finished_run_stays_as_it_is(whole):
    before = final(whole)
    assert run(whole.parent, "--resume", "auto")[0] == 0
    assert same(before, final(whole))


def test_a_second_run_in_the_same_folder_is_refused(whole, capsys):
    assert run(whole.parent)[0] == 1
    assert "has a run already: continue with --resume auto, or choose another --out" in capsys.readouterr().err
