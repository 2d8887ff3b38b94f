"""One run in a folder at a time: a second is told who is there; one that died, or failed early, is in nobody's way."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from torchsbp.errors import RunError
from torchsbp.train.loop import Trainer
from torchsbp.train.runs.lock import Lock

from .runs import ENVIRONMENT, SERVER, fork, lines, ranks, recipe, run

HOLDER = """
import os, sys
from pathlib import Path
from torchsbp.train.runs.lock import Lock
with Lock(Path(sys.argv[1]), print):
    if len(sys.argv) > 2 and os.fork() == 0:  # as a worker that reads data
        print("held", flush=True)
        sys.stdin.read()
        os._exit(0)
    elif len(sys.argv) == 2:
        print("held", flush=True)
    sys.stdin.read()
"""


def holder(folder: Path, *arguments: str) -> "subprocess.Popen[str]":
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(folder), *arguments],
        env=ENVIRONMENT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout.readline() == "held\n"
    return process


def test_a_second_process_is_told_who_holds_the_folder(tmp_path, capsys):
    process = holder(tmp_path / "run")
    for resume in ([], ["--resume=auto"]):
        assert run(tmp_path, *resume)[0] == 1
        told = capsys.readouterr().err
        assert f"error: {tmp_path / 'run'} is in use by process {process.pid} on " in told
        assert "wait for it, stop it, or choose another --out" in told
    assert not (tmp_path / "run" / "metrics.jsonl").exists()
    process.communicate("")
    assert run(tmp_path, "--resume=auto", "--epochs=1", "--schedule.warmup_epochs=0")[0] == 0


@pytest.mark.parametrize("worker", [[], ["worker"]])
def test_a_killed_process_leaves_no_lock(tmp_path, worker):
    """Even if a worker of it still lives."""
    process = holder(tmp_path, *worker)
    with pytest.raises(RunError, match=f"is in use by process {process.pid} on .*, since 2"):
        Lock(tmp_path, print)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    with Lock(tmp_path, print):
        pass
    process.stdin.close()
    process.stdout.close()


def test_one_process_does_not_hold_a_folder_twice(tmp_path):
    with Lock(tmp_path, print), pytest.raises(RunError, match=f"is in use by process {os.getpid()}, this one: "):
        Lock(tmp_path / ".", print)
    with Lock(tmp_path, print):
        pass


def test_without_locks_a_run_goes_on_and_says_so(tmp_path, monkeypatch):
    def none(*_):
        raise OSError(37, "No locks available")

    monkeypatch.setattr("fcntl.lockf", none)
    told = []
    with Lock(tmp_path, told.append):
        pass
    assert told == [f"{tmp_path} can't be locked (No locks available): nothing keeps a second run out of it"]


def test_several_processes_are_one_holder_and_all_are_refused(tmp_path):
    path = recipe(tmp_path)
    process = holder(tmp_path / "run")
    told = [tmp_path / f"{rank}" for rank in range(2)]
    started = [fork(path, told=file, environment=rank) for file, rank in zip(told, ranks(2), strict=True)]
    for refused, file in zip(started, told, strict=True):
        refused.join(60)
        assert refused.exitcode == 1
        assert f"is in use by process {process.pid} on " in file.read_text()
    process.communicate("")
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_of_three_that_begin_at_once_one_runs(tmp_path):
    path = recipe(tmp_path)
    together = SERVER.Barrier(3)
    told = [tmp_path / f"{number}" for number in range(3)]
    started = [fork(path, "--resume=auto", told=file, before=together.wait) for file in told]
    for process in started:
        process.join(60)
    codes = [process.exitcode for process in started]
    for code, file in zip(codes, told, strict=True):
        # Which process it is, is not written yet if that has just taken the lock: then "another process" is told.
        assert code == 0 or re.search("is in use by (process [0-9]|another process)", file.read_text())
    assert codes.count(0) >= 1  # one that began when the first had ended finds it finished
    assert [line["kind"] for line in lines(tmp_path / "run")].count("run") == 1


def test_a_run_that_failed_before_its_first_checkpoint_does_not_block_its_folder(tmp_path, monkeypatch, capsys):
    def fails(self, batches):
        raise RunError("no luck")

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "update", fails)
        assert run(tmp_path)[0] == 1
    out = tmp_path / "run"
    capsys.readouterr()
    assert run(tmp_path, "--epochs=1", "--schedule.warmup_epochs=0")[0] == 0
    aside = out / "failed-metrics.jsonl"
    assert (
        f"{out} has a run that ended before its first checkpoint; its record is now {aside}" in capsys.readouterr().err
    )
    assert json.loads(aside.read_text().splitlines()[0])["config"]["epochs"] == 2
    assert json.loads((out / "metrics.jsonl").read_text().splitlines()[0])["config"]["epochs"] == 1
    assert run(tmp_path)[0] == 1  # now there is something to lose
    assert "has a run already" in capsys.readouterr().err


def test_a_finished_run_without_its_checkpoints_is_still_one(tmp_path, capsys):
    _, out = run(tmp_path, "--epochs=1", "--schedule.warmup_epochs=0")
    for path in (out / "checkpoints").iterdir():
        path.unlink()
    assert run(tmp_path)[0] == 1
    assert "has a run already" in capsys.readouterr().err
