"""What a user gets wrong, or a machine can't do, ends in one message of ours that says what to do."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from torchsbp.cli.main import ENDED
from torchsbp.cli.recipe import parse
from torchsbp.errors import RunError
from torchsbp.train.distributed import Processes
from torchsbp.train.loop import Trainer
from torchsbp.train.raw import smaller, told

from .runs import ENVIRONMENT, command, final, fork, recipe, run, train


@pytest.mark.parametrize(
    "option, message",
    [
        ("--task.data.size=12", "task.data.size=12 does not fit vit_tiny_patch16_224: Input height (12) doesn't match"),
        ("--task.model.options.embed_dim=15", "task.model.name vit_tiny_patch16_224 with {"),
        ("--task.model.options.patch_size=0", "task.model.name vit_tiny_patch16_224 with {"),
        (
            "--task.augment.interpolation=foo",
            "task.augment.interpolation='foo' is not allowed; allowed: random, ",
        ),
        ("--task.augment.auto_augment=foo", "task.augment.auto_augment='foo' is not allowed; allowed: null, rand-m9"),
        ("--task.augment.auto_augment=rand-x9", "task.augment.auto_augment='rand-x9' is not allowed; allowed: null, "),
        ("--out=", "out is empty, or the current folder; name a folder for the run"),
    ],
)
def test_settings_that_do_not_fit(tmp_path, capsys, option, message):
    assert run(tmp_path, option)[0] == 2
    assert f"torchsbp train: {message}" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_a_size_that_does_not_fit_has_a_way_out(tmp_path, capsys):
    run(tmp_path, "--task.data.size=12")
    told = capsys.readouterr().err
    assert "(as published: 224), or task.model.options.img_size=12 if it has that option" in told


@pytest.mark.parametrize(
    "text, message",
    [
        ("", "recipe.yaml: a recipe has options (NAME: VALUE), found nothing; allowed: "),
        ("[1]", "recipe.yaml: a recipe has options (NAME: VALUE), found [1]; allowed: "),
        ("3", "recipe.yaml: a recipe has options (NAME: VALUE), found 3; allowed: "),
        ("task: {data: 3}", "recipe.yaml: task.data has options of its own (NAME: VALUE), found 3; allowed: "),
        ("task: 3", "recipe.yaml: task has options of its own (NAME: VALUE), found 3; allowed: model, data, augment"),
        ("optimizer: null", "recipe.yaml: optimizer has options of its own (NAME: VALUE), found nothing; allowed: "),
        ("batch: null", "batch=None is not allowed; allowed: an integer at least 1"),
        ("batch: [1", "recipe.yaml can't be read as YAML: while parsing a flow sequence in "),
    ],
)  # fmt: skip
def test_recipes_that_are_none(tmp_path, capsys, text, message):
    path = tmp_path / "recipe.yaml"
    path.write_text(text)
    assert train([str(path), f"--out={tmp_path / 'run'}"]) == 2
    told = capsys.readouterr().err
    assert message in told
    assert "Traceback" not in told


@pytest.fixture(scope="module")
def half(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("half")
    assert run(folder, epochs=1, schedule={"warmup_epochs": 0})[0] == 0
    return folder


def test_another_optimizer_can_not_resume(half, capsys):
    assert run(half, "--resume=auto", "--schedule.warmup_epochs=0", "--optimizer.name=lamb")[0] == 1
    newest = half / "run" / "checkpoints" / "step-0000000010.pt"
    told = capsys.readouterr().err
    assert f"error: {newest} has the state of adamw, which lamb can't use: resume with --optimizer.name adamw" in told
    assert f"task.model.weights: {newest}" in told


def test_resume_takes_a_runs_folder(half, tmp_path, capsys):
    assert run(tmp_path, f"--resume={half / 'run'}", "--schedule.warmup_epochs=0")[0] == 0
    assert (
        f"resumed from {half / 'run' / 'checkpoints' / 'step-0000000010.pt'} at step 10 of 20"
        in capsys.readouterr().err
    )
    assert final(tmp_path / "run")["progress"]["step"] == 20
    (tmp_path / "empty").mkdir()
    assert run(tmp_path / "b", f"--resume={tmp_path / 'empty'}")[0] == 1
    assert "empty: --resume takes a run's folder, a checkpoint, or auto" in capsys.readouterr().err


CPU_DEVICE = torch.device("cpu")
CPU = "[enforce fail] . DefaultCPUAllocator: can't allocate memory: you tried to allocate 4194304 bytes"


@pytest.mark.parametrize(
    "raised, asked",
    [
        (RuntimeError(CPU), "(4 MiB more were needed)"),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.50 GiB."), "(2.50 GiB more were needed)"),
        (MemoryError(), ""),
    ],
)
def test_out_of_memory_says_what_to_do_with_the_numbers(tmp_path, capsys, monkeypatch, raised, asked):
    def full(self, batches):
        raise raised

    monkeypatch.setattr(Trainer, "update", full)
    assert run(tmp_path)[0] == 1
    told = capsys.readouterr().err
    assert "error: out of memory with 8 samples per forward" in told
    assert asked in told
    assert "--micro_batch 4 leaves the batch of 16 as it is; torchsbp plan says what fits" in told
    assert "sbp.preset" not in told  # it is used already
    assert run(tmp_path / "full", "--sbp.preset=none")[0] == 1
    assert "--sbp.preset exact saves activations" in capsys.readouterr().err


def test_a_real_shortage_is_recognised(tmp_path):
    config = parse("train", [str(recipe(tmp_path))])
    needed = r"out of memory with 8 samples per forward \(\d{9,} MiB more were needed\)"
    with pytest.raises(RunError, match=needed), told(config, Processes(CPU_DEVICE)):
        torch.empty(1 << 50, dtype=torch.uint8)
    assert [smaller(n) for n in (2, 9, 64, 70, 7)] == [1, 3, 32, 35, 1]


@pytest.mark.parametrize(
    "ours", [RuntimeError("ours"), EOFError("Caught EOFError in DataLoader worker process 0.\nours")]
)
def test_other_errors_pass(tmp_path, ours):
    config = parse("train", [str(recipe(tmp_path))])
    with pytest.raises(type(ours), match="ours"), told(config, Processes(CPU_DEVICE)):
        raise ours


@pytest.mark.parametrize("cut_off", [ConnectionResetError(104, "Connection reset by peer"), EOFError()])
def test_a_worker_that_is_lost_while_it_hands_over_a_batch(tmp_path, cut_off):
    config = parse("train", [str(recipe(tmp_path))])
    with pytest.raises(RunError, match="a process that reads data was lost"), told(config, Processes(CPU_DEVICE)):
        raise cut_off


def test_a_lost_worker_is_told_in_any_thread(tmp_path):
    """Signals can be set in the main one alone."""
    config, ended = parse("train", [str(recipe(tmp_path))]), []

    def lost() -> None:
        with pytest.raises(RunError, match="a process that reads data was lost"), told(config, Processes(CPU_DEVICE)):
            raise EOFError
        ended.append(True)

    thread = threading.Thread(target=lost)
    thread.start()
    thread.join()
    assert ended


def test_a_killed_worker_is_told(tmp_path):
    path = recipe(tmp_path, task={"data": {"workers": 1}}, epochs=200)
    process = subprocess.Popen(command(path), env=ENVIRONMENT, stderr=subprocess.PIPE, text=True)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    record = tmp_path / "run" / "metrics.jsonl"
    while process.poll() is None and not (record.exists() and children.read_text().split()):
        time.sleep(0.05)
    os.kill(int(children.read_text().split()[-1]), signal.SIGKILL)
    _, told = process.communicate(timeout=60)
    assert process.returncode == 1, told
    assert "error: a process that reads data was " in told
    assert "fewer task.data.workers read less at once. Continue with --resume auto" in told


def test_ctrl_c_while_starting(tmp_path):
    """One line at any moment between our first own line and the loop's; nothing was written."""
    path = recipe(tmp_path)
    heard = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"  # also begun in the background
    begin = f"{heard}; import torchsbp.cli.main as m; print('here', flush=True); m.main(['train', {str(path)!r}])"
    for seconds in (0.1, 0.3, 0.7, 1.5):
        process = subprocess.Popen(
            [sys.executable, "-c", begin], env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        assert process.stdout.readline() == "here\n"
        time.sleep(seconds)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
        assert (process.returncode, errors) == (ENDED, "interrupted\n")
        assert not (tmp_path / "run").exists()


def test_of_two_ctrl_c_the_second_ends_at_once(tmp_path):
    """The first asks the loop to save; if that lasts too long, what was saved before is there."""
    process = fork(recipe(tmp_path), told=tmp_path / "told", before=slow_to_stop)
    while not list((tmp_path / "run").glob("checkpoints/step-*.pt")):
        time.sleep(0.01)
    for _ in range(2):
        os.kill(process.pid, signal.SIGINT)
        time.sleep(0.5)
    process.join(60)
    assert (process.exitcode, (tmp_path / "told").read_text()) == (ENDED, "interrupted\n")
    assert run(tmp_path, "--resume=auto")[0] == 0


def slow_to_stop() -> None:
    stopping = Trainer.stopping

    def slow(self: Trainer) -> bool:
        if stopping(self):
            time.sleep(60)
        return False

    Trainer.stopping = slow
