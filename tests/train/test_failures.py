"""What goes wrong in real runs: a clear message, and the last good checkpoint survives."""

import errno
import json
import os
import pickle
import shutil
import sys
import tempfile
import types
from pathlib import Path

import pytest
import torch

from torchsbp.errors import CheckpointError
from torchsbp.report import html, read
from torchsbp.train.loop import Trainer
from torchsbp.train.runs import checkpoint
from torchsbp.train.runs.metrics import Metrics, identity
from torchsbp.train.runs.state import Progress
from torchsbp.train.runs.weights import head_names, read_weights

from .runs import evaluate, final, fork, lines, recipe, run, same
from .test_recipes import picture_folder

FOLDER = {
    "model": {"options": {"img_size": 16, "patch_size": 4, "num_classes": 3}},
    "augment": {"mixup": 0.0, "cutmix": 0.0},
}


@pytest.fixture(scope="module")
def half(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run whose second epoch is still to come."""
    folder = tmp_path_factory.mktemp("half")
    assert run(folder, epochs=1, schedule={"warmup_epochs": 0})[0] == 0
    return folder


@pytest.fixture
def copy(half: Path, tmp_path: Path) -> Path:
    shutil.copytree(half / "run", tmp_path / "run")
    return tmp_path


def on(folder: Path, *arguments: str, **changes) -> int:
    """Continue that run."""
    return run(folder, "--resume=auto", "--schedule.warmup_epochs=0", *arguments, **changes)[0]


def test_a_nan_loss_stops_before_anything_is_saved(copy, capsys, monkeypatch):
    before = sorted((copy / "run" / "checkpoints").iterdir())
    update = Trainer.update

    def poisoned(self, batches):
        return {name: loss * float("nan") for name, loss in update(self, batches).items()}

    monkeypatch.setattr(Trainer, "update", poisoned)
    assert on(copy) == 1
    error = capsys.readouterr().err
    assert "the loss is nan at step 12" in error  # the next checkpoint or line of metrics
    assert "the last good checkpoint: " in error
    assert "step-0000000010.pt" in error
    assert sorted((copy / "run" / "checkpoints").iterdir()) == before


@pytest.fixture(scope="module")
def continued(half: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same run, continued without any failure."""
    folder = tmp_path_factory.mktemp("continued")
    shutil.copytree(half / "run", folder / "run")
    assert on(folder) == 0
    return folder / "run"


def events(out: Path) -> list[dict]:
    """But for those that have the time of a change."""
    return [line for line in lines(out) if line["kind"] != "run"]


def full(handle: int, name: str) -> tuple[int, str]:
    os.close(handle)
    return os.open("/dev/full", os.O_WRONLY), name


def read_only(handle: int, name: str) -> tuple[int, str]:
    os.close(handle)
    os.unlink(name)
    raise OSError(errno.EROFS, "Read-only file system", name)


REFUSALS = {full: "[Errno 28] No space left on device", read_only: "[Errno 30] Read-only file system"}
FILES = {  # what is written: how many files in its folder before, and the folder
    "step-0000000012.pt": (0, "checkpoints"),
    "Accuracy by class.html": (0, "report"),
    "metrics.jsonl": (0, "run"),
    "model.safetensors": (1, "run"),
}


@pytest.mark.parametrize("refuse", REFUSALS)
@pytest.mark.parametrize("file", FILES)
def test_a_disk_that_refuses_loses_nothing(copy, continued, capsys, monkeypatch, refuse, file):
    """It is told with the file's name; resumed, the run ends as it would have."""
    left, folder = FILES[file]
    mkstemp = tempfile.mkstemp

    def refused(dir: Path, **options):
        nonlocal left
        handle, name = mkstemp(dir=dir, **options)
        left -= Path(dir).name == folder
        return refuse(handle, name) if left < 0 and Path(dir).name == folder else (handle, name)

    with monkeypatch.context() as patch:
        patch.setattr(tempfile, "mkstemp", refused)
        assert on(copy) == 1
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("error: ")
    assert f"{file} can't be written: {REFUSALS[refuse]}" in error
    assert not list((copy / "run").rglob(".*.tmp"))
    assert on(copy) == 0
    assert same(final(copy / "run"), final(continued))
    assert events(copy / "run") == events(continued)


def test_a_full_disk_may_leave_half_a_line(copy, continued, capsys, monkeypatch):
    """The record is appended to; what is lost of it is written again after the last checkpoint."""
    write = Metrics.write

    def fails(self, kind, step, **values):
        if step == 16:
            self.file.write('{"kind": "tr')
            self.file.close()
            self.file = open("/dev/full", "a")  # noqa: SIM115
        write(self, kind, step, **values)

    with monkeypatch.context() as patch:
        patch.setattr(Metrics, "write", fails)
        assert on(copy) == 1
    error = capsys.readouterr().err.splitlines()[-1]
    assert f"{copy / 'run' / 'metrics.jsonl'} can't be written: [Errno 28] No space left on device. The chec" in error
    assert (copy / "run" / "metrics.jsonl").read_text().endswith('{"kind": "tr')
    assert on(copy) == 0
    assert same(final(copy / "run"), final(continued))
    assert events(copy / "run") == events(continued)


def test_a_folder_that_can_not_be_made_is_named(tmp_path, capsys):
    assert run(tmp_path, "--out=/proc/torchsbp")[0] == 1
    assert "/proc/torchsbp" in capsys.readouterr().err.splitlines()[-1]


def test_a_real_write_that_fails_is_told_apart(tmp_path):
    """The operating system refuses after 4 KiB, inside torch.save."""
    import subprocess

    code = (
        "import resource, torch; from pathlib import Path; from torchsbp.train.runs.checkpoint import Folder\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))\n"
        f"Folder(Path({str(tmp_path)!r}), 2).save({{'x': torch.zeros(10000)}}, 1, False)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "CheckpointError" in result.stderr.splitlines()[-1]
    assert "can't be written" in result.stderr.splitlines()[-1]
    assert list(tmp_path.iterdir()) == []


def test_auto_skips_a_truncated_checkpoint(copy, capsys):
    newest = sorted((copy / "run" / "checkpoints").glob("step-*"))[-1]
    data = newest.read_bytes()
    newest.unlink()  # best.pt is the same file
    newest.write_bytes(data[: len(data) // 2])
    assert on(copy) == 0
    error = capsys.readouterr().err
    assert f"{newest} can't be read: it is truncated, or no checkpoint" in error
    assert "resumed from" in error
    assert "at step 9 of 20" in error


def test_named_checkpoints_must_be_whole_and_ours(copy, capsys, tmp_path):
    torch.save({"state_dict": {}}, tmp_path / "foreign.pt")
    (tmp_path / "text.pt").write_text("hello")
    for name, message in {
        "foreign.pt": "was not written by torchsbp train",
        "text.pt": "can't be read: it is truncated, or no checkpoint",
        "none.pt": "no checkpoint at",
    }.items():
        assert run(copy, f"--resume={tmp_path / name}")[0] == 1
        assert message in capsys.readouterr().err
    assert evaluate([str(tmp_path / "foreign.pt")]) == 1


class Shell:
    def __reduce__(self):
        return os.system, ("touch ran",)


@pytest.mark.parametrize(
    "content, reason",
    [
        (Shell(), "is refused: it holds posix.system, and to load anything but tensors and plain values is"),
        (torch.nn.Linear(2, 2), "is refused: it holds torch.nn.modules.linear.Linear, and"),
        (b"hello", "can't be read: it is truncated, or no checkpoint"),
        (b"", "can't be read: it is truncated, or no checkpoint"),
        (b"\x89PNG" * 30, "can't be read: it is truncated, or no checkpoint"),
        (b"eee", "can't be read: it is truncated, or no checkpoint"),
        (pickle.dumps({"a": 3}), "can't be read: it is truncated, or no checkpoint"),
        ([torch.ones(2)], "holds a list, not a checkpoint"),
        ({"a": 1, "b": {}}, "has no weights; it holds a, b"),
        ({}, "has no weights; it is empty"),
        ({"model": {"weight": 3}}, "has no weights: weight is of type int"),
    ],
)  # fmt: skip
@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
def test_weights_that_are_no_weights(tmp_path, content, reason):
    """Refused in our words: no advice to load them unsafely, no number as a reason."""
    path = tmp_path / "weights.pt"
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        torch.save(content, path)
    with pytest.raises(CheckpointError) as refused:
        read_weights(path)
    assert f"{path} {reason}" in str(refused.value)
    assert "weights_only" not in str(refused.value)
    assert "(" not in str(refused.value).replace("state_dict()", "")


def test_safetensors_that_are_none(tmp_path):
    path = tmp_path / "model.safetensors"
    for content in (b"", b"hello", b"\xff" * 100, (20).to_bytes(8, "little") + b"{" * 40):
        path.write_bytes(content)
        with pytest.raises(CheckpointError, match="can't be read: it is truncated, or no safetensors"):
            read_weights(path)
    with pytest.raises(CheckpointError, match=r"no weights at .*none\.safetensors"):
        read_weights(tmp_path / "none.safetensors")


def test_a_checkpoint_of_another_model_is_refused(copy, capsys):
    assert on(copy, "--task.model.options.embed_dim=32") == 1
    assert "is of a model of another size: cls_token (1, 1, 16), here (1, 1, 32)" in capsys.readouterr().err
    assert on(copy, "--task.model.options.depth=4") == 1
    assert "is of another model: it lacks blocks.3" in capsys.readouterr().err
    assert on(copy, "--ema.decay=null") == 1
    assert "has an average of weights: ema.decay was changed" in capsys.readouterr().err


def test_changed_settings_are_named_and_recorded(copy, capsys):
    """The report shows the settings of now, what was changed, and when; to resume once more changes nothing."""
    for _ in range(2):
        assert on(copy, "--optimizer.lr=5e-4") == 0
    error = capsys.readouterr().err
    assert "epochs=2 instead of 1, optimizer.lr=0.0005 instead of 0.001" in error
    first, last = (line for line in lines(copy / "run") if line["kind"] == "run")
    changed = ["epochs=2 instead of 1", "optimizer.lr=0.0005 instead of 0.001"]
    assert (first["step"], last["step"], last["changed"], first["steps"], last["steps"]) == (0, 10, changed, 10, 20)
    found = read(copy / "run")
    assert found.about["config"]["optimizer"]["lr"] == 0.0005
    assert found.progress() == "finished; settings changed at step 10"
    page = html([found], "Runs")
    assert f"<p>Resumed at step 10, {last['when']}: {', '.join(changed)}</p>" in page
    assert "&quot;lr&quot;: 0.0005" in page


def test_changed_options_of_the_optimizer_take_effect(copy):
    """All of them, not the learning rate alone: what the record says is what the run does."""
    before = final(copy / "run")["optimizer"]["param_groups"]
    assert on(copy, "--optimizer.weight_decay=0.5", "--optimizer.options.eps=1e-6") == 0
    after = final(copy / "run")["optimizer"]["param_groups"]
    assert {group["weight_decay"] for group in before} == {0.0, 0.05}
    assert [group["weight_decay"] for group in after] == [10 * group["weight_decay"] for group in before]
    assert {group["eps"] for group in after} == {1e-6}
    assert [group["lr_scale"] for group in after] == [group["lr_scale"] for group in before]


def test_resumed_with_the_same_settings_nothing_is_recorded_about_them(copy):
    assert run(copy, "--resume=auto", "--epochs=1", "--schedule.warmup_epochs=0")[0] == 0
    assert [line["kind"] for line in lines(copy / "run")].count("run") == 1


def test_strange_lines_of_metrics_are_dropped(copy):
    path = copy / "run" / "metrics.jsonl"
    path.write_bytes(path.read_bytes() + b'[3]\n{"kind": "train"}\n\xff\n{"kind": "train", "step": null}\n7\n')
    assert on(copy) == 0
    assert all(line["step"] >= 0 for line in lines(copy / "run"))


def test_missing_wandb_names_its_extra(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    assert run(tmp_path, "--log.wandb=project")[0] == 2
    assert "log.wandb needs wandb: pip install 'torchsbp[wandb]'" in capsys.readouterr().err


def test_wandb_tells_runs_of_one_folder_name_apart(tmp_path):
    a, b = identity(tmp_path / "a" / "run"), identity(tmp_path / "b" / "run")
    assert a.startswith("run-")
    assert a != b
    assert a == identity(tmp_path / "b" / ".." / "a" / "run")


def test_fine_tuning_with_other_classes(half, tmp_path, capsys):
    """Refused, unless a new classifier is asked for; everything else comes from the weights."""
    weights = tmp_path / "model.safetensors"
    shutil.copy(half / "run" / "model.safetensors", weights)
    data = {"source": "folder", "root": str(picture_folder(tmp_path / "data")), "channels": 1}
    changes = {"task": {"data": data, "model": {"weights": str(weights)}}, "batch": 12, "micro_batch": 6}
    assert run(tmp_path / "a", **changes)[0] == 1
    assert (
        "has another classifier: head.weight (10, 16), here (3, 16), head.bias (10,), here (3,);"
        in capsys.readouterr().err
    )
    changes["task"]["model"]["new_head"] = True
    changes["optimizer"] = {"lr": 0.0, "weight_decay": 0.0}
    changes["schedule"] = {"min_lr": 0.0}
    code, out = run(tmp_path / "b", **changes)
    assert code == 0
    found = final(out)["model"]
    from safetensors.torch import load_file

    expected = load_file(weights)
    assert torch.equal(found["blocks.0.attn.qkv.weight"], expected["blocks.0.attn.qkv.weight"])
    assert found["head.weight"].shape == (3, 16)
    weights.unlink()
    assert evaluate([str(out)]) == 0  # what training began from is not needed any more


@pytest.mark.parametrize(
    "classifier, names", [("head", {"head.weight"}), (("a", "head"), {"head.weight"}), (None, set())]
)
def test_the_classifier_is_what_the_library_calls_so_if_anything(classifier, names):
    """timm's vision encoders of language models have None."""
    model = torch.nn.ModuleDict({name: torch.nn.Linear(2, 3, bias=False) for name in ("body", "head")})
    model.default_cfg = {"classifier": classifier}
    assert head_names(model) == names


@pytest.mark.parametrize("workers", [0, 1])
def test_an_unreadable_image_is_named(tmp_path, capfd, workers):
    root = picture_folder(tmp_path / "data")
    bad = root / "train" / "class1" / "2.jpg"
    bad.write_bytes(bad.read_bytes()[:300])
    data = {"source": "folder", "root": str(root), "size": 16, "workers": workers, "channels": 3}
    data |= {"mean": [0.5] * 3, "std": [0.5] * 3}
    code, _ = run(tmp_path, task={**FOLDER, "data": data}, batch=12, micro_batch=12)
    assert code == 1
    assert capfd.readouterr().err.splitlines()[-1].startswith(f"error: image {bad} can't be read: ")


def test_workers_do_not_keep_a_failed_run_alive(tmp_path):
    """Workers of a forked run are begun by a server, so that the run is not their parent."""
    root = picture_folder(tmp_path / "data")
    (root / "train" / "class0" / "0.jpg").write_text("no picture")
    data = {"source": "folder", "root": str(root), "size": 16, "workers": 2, "channels": 3}
    data |= {"mean": [0.5] * 3, "std": [0.5] * 3}
    told = tmp_path / "told"
    process = fork(recipe(tmp_path, task={**FOLDER, "data": data}, batch=12, micro_batch=12), told=told)
    process.join(120)
    process.kill()
    assert process.exitcode == 1
    assert "0.jpg can't be read" in told.read_text()


def test_class_counts_must_agree(tmp_path, capsys):
    root = picture_folder(tmp_path / "data")
    data = {"source": "folder", "root": str(root), "channels": 3, "mean": [0.5] * 3, "std": [0.5] * 3}
    assert run(tmp_path, task={"data": data, "model": {"options": {"num_classes": 5}}}, batch=12, micro_batch=6)[0] == 1
    assert (
        "model.options.num_classes is 5, but the data have 3 classes: class0, class1, class2" in capsys.readouterr().err
    )


def test_a_half_written_line_of_metrics_is_dropped(copy):
    path = copy / "run" / "metrics.jsonl"
    path.write_text(path.read_text() + '{"kind": "train", "st')
    assert on(copy) == 0
    assert all(json.loads(line) for line in path.read_text().splitlines())


def test_an_evaluation_that_no_checkpoint_knows_of_is_recorded_once(tmp_path):
    """Killed between the line and the checkpoint of an evaluation, a run evaluates again."""
    path = tmp_path / "metrics.jsonl"
    events = [("run", 0), ("valid", 10), ("train", 20), ("valid", 20), ("train", 24)]
    path.write_text("".join(json.dumps({"kind": kind, "step": step}) + "\n" for kind, step in events))
    Metrics(tmp_path, Progress(step=20, evaluated=10), {}, False, None).close()
    left = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(line["kind"], line["step"]) for line in left] == [("run", 0), ("valid", 10), ("train", 20)]


def test_tensorboard_and_wandb_get_the_same_numbers(tmp_path, monkeypatch):
    logged = []
    fake = types.SimpleNamespace(log=lambda values, step: logged.append((step, values)), finish=lambda: None)
    started = []
    module = types.SimpleNamespace(init=lambda **options: started.append(options) or fake)
    monkeypatch.setitem(sys.modules, "wandb", module)
    code, out = run(tmp_path, "--log.tensorboard=true", "--log.wandb=project")
    assert code == 0
    assert started[0]["project"] == "project"
    expected = [(line["step"], line["loss"]) for line in lines(out) if line["kind"] == "train"]
    assert [(step, v["train/loss"]) for step, v in logged if "train/loss" in v] == expected
    assert list((out / "tensorboard").glob("events.*"))


@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
def test_mixed_precision_channels_last_and_deterministic(tmp_path, precision):
    options = [f"--precision={precision}", "--channels_last=true", "--deterministic=true"]
    try:
        code, out = run(tmp_path, *options, "--epochs=1", "--schedule.warmup_epochs=0")
    finally:
        torch.use_deterministic_algorithms(False)
    assert code == 0
    assert (final(out)["scaler"] != {}) == (precision == "float16")


@pytest.mark.slow
def test_compiled_training_equals_eager(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.nn.Module, "compile", lambda self, mode: self._compile("aot_eager"), raising=False)
    monkeypatch.setattr(
        torch.nn.Module,
        "_compile",
        lambda self, backend: setattr(self, "_compiled_call_impl", torch.compile(self._call_impl, backend=backend)),
        raising=False,
    )
    options = ["--epochs=1", "--schedule.warmup_epochs=0", "--task.model.drop_path=0.0"]
    _, eager = run(tmp_path / "a", *options)
    _, compiled = run(tmp_path / "b", *options, "--compile=true")
    torch._dynamo.reset()
    for a, b in zip(lines(eager), lines(compiled), strict=True):
        assert a.get("loss", 0) == pytest.approx(b.get("loss", 0), rel=1e-3)


@pytest.mark.parametrize("option, mode", [("true", None), ("reduce-overhead", "reduce-overhead")])
def test_the_compiler_is_told_its_mode(tmp_path, monkeypatch, option, mode):
    modes = []
    monkeypatch.setattr(torch.nn.Module, "compile", lambda self, mode: modes.append(mode))
    code, folder = run(tmp_path, "--epochs=1", "--schedule.warmup_epochs=0", f"--compile={option}")
    assert (code, modes) == (0, [mode])
    assert evaluate([str(folder)]) == 0
    assert modes == [mode, mode]


def test_replace_file_keeps_the_old_one_when_writing_fails(tmp_path):
    path = tmp_path / "file"
    path.write_text("old")

    def fails(file):
        file.write(b"ne")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        checkpoint.replace_file(path, fails)
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]
