"""Nothing lost: killed anywhere and resumed, a run ends bit for bit where one that was never killed does."""

import os
import random
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from torchsbp.cli.main import INTERRUPTED

from .runs import ENVIRONMENT, command, final, lines, recipe, run, same, spawn


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
def test_resumed_from_any_checkpoint_it_ends_the_same(whole, tmp_path, step, monkeypatch):
    """Within an epoch, at its end, and while losses were being averaged for the next line of metrics."""
    from torchsbp.train.loop import Trainer

    update = Trainer.update

    def dies(self, batches):
        if self.progress.step == step:
            raise KeyboardInterrupt
        return update(self, batches)

    monkeypatch.setattr(Trainer, "update", dies)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, "--checkpoint.every_steps", "1")
    monkeypatch.setattr(Trainer, "update", update)
    code, out = run(tmp_path, "--checkpoint.every_steps", "1", "--resume", "auto")
    assert code == 0
    assert same(final(whole), final(out))
    assert lines(whole) == lines(out)


def family(pid: int) -> list[int]:
    """A process and its descendants: torchrun's workers are in sessions of their own."""
    with suppress(FileNotFoundError):
        children = [int(c) for t in Path(f"/proc/{pid}/task").iterdir() for c in (t / "children").read_text().split()]
        return [pid, *(p for child in children for p in family(child))]
    return [pid]


def killed(path: Path, kills: int, processes: int, seconds: float) -> int:
    """Start and SIGKILL at random moments, then let it end; how many kills found a run in progress."""
    chance = random.Random(processes)
    effective = 0
    for _ in range(kills):
        process = subprocess.Popen(
            command(path, "--resume", "auto", processes=processes),
            env=ENVIRONMENT,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        deadline = time.monotonic() + 60
        out = path.parent / "run" / "metrics.jsonl"
        before = out.stat().st_mtime_ns if out.exists() else 0
        while time.monotonic() < deadline and process.poll() is None:  # until it trains
            if out.exists() and out.stat().st_mtime_ns != before:
                break
            time.sleep(0.01)
        time.sleep(chance.uniform(0, seconds))
        effective += process.poll() is None
        for pid in family(process.pid):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait()
    result = spawn(path, "--resume", "auto", processes=processes)
    assert result.returncode == 0, result.stderr
    return effective


@pytest.mark.parametrize(
    "kills, processes",
    [(2, 1), pytest.param(10, 1, marks=pytest.mark.slow), pytest.param(10, 2, marks=pytest.mark.slow)],
)
def test_killed_at_random_moments_it_ends_the_same(tmp_path, kills, processes):
    changes = {"checkpoint": {"every_steps": 1}, "epochs": 2 + kills}
    if processes == 1:
        assert run(tmp_path / "whole", **changes)[0] == 0
    else:
        result = spawn(recipe(tmp_path / "whole", **changes), processes=processes)
        assert result.returncode == 0, result.stderr
    effective = killed(recipe(tmp_path / "killed", **changes), kills, processes, seconds=1.0)
    assert effective >= kills // 2
    whole, out = tmp_path / "whole" / "run", tmp_path / "killed" / "run"
    assert same(final(whole), final(out))
    assert lines(whole) == lines(out)
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
