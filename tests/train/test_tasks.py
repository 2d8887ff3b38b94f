"""Tasks: found by name, and a second one that trains, resumes, is evaluated and reported like the first."""

import json
import shutil
from pathlib import Path

import pytest
import torch

from torchsbp import SBPConfig
from torchsbp.cli.recipe import parse
from torchsbp.errors import UsageError
from torchsbp.report import html, read, rows
from torchsbp.train import tasks
from torchsbp.train.distributed import Processes
from torchsbp.train.loop import Trainer

from . import regression
from .runs import evaluate, final, lines, same, stopped_at, train

HERE = Path(__file__).parent
RECORDED = HERE / "recorded"
NAME = f"{regression.__name__}:Regression"
SHORT = {"epochs": 3, "batch": 16, "schedule": {"warmup_epochs": 0}, "log": {"every_steps": 2, "progress": False}}


def recipe(folder: Path, **changes) -> str:
    path = folder / "recipe.yaml"
    options = {"task": {"name": NAME}, "optimizer": {"lr": 0.01}, "precision": "float32", "device": "cpu"}
    path.write_text(json.dumps({**SHORT, **options, "out": str(folder / "run"), **changes}))
    return str(path)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a finished run of the second task."""
    folder = tmp_path_factory.mktemp("regression")
    assert train([recipe(folder), "--ema.decay=0.5"]) == 0
    return folder / "run"


def test_a_task_is_one_short_file(whole):
    assert len((HERE / "regression.py").read_text().splitlines()) < 60
    assert [line["kind"] for line in lines(whole)].count("valid") == 3


def test_several_losses_are_logged_by_name_and_their_sum_is_trained(whole):
    trained = [line for line in lines(whole) if line["kind"] == "train"]
    for line in trained:
        assert line["loss"] == pytest.approx(line["loss_square"] + line["loss_weight"], rel=1e-6)
    assert trained[-1]["loss_square"] < trained[0]["loss_square"]


def test_the_best_checkpoint_is_that_of_the_least_error(whole):
    errors = {line["step"]: line["ema_error"] for line in lines(whole) if line["kind"] == "valid"}
    best = torch.load(whole / "checkpoints" / "best.pt", weights_only=True)["progress"]
    assert best["best"] == min(errors.values())
    assert best["step"] == min(errors, key=errors.get)


def test_killed_while_losses_were_being_averaged_it_ends_the_same(whole, tmp_path):
    options = [recipe(tmp_path), "--ema.decay=0.5", "--checkpoint.every_steps=1"]
    with stopped_at(5):
        train(options)
    assert train([*options, "--resume=auto"]) == 0
    assert same(final(whole), final(tmp_path / "run"))
    assert without_clock(tmp_path / "run") == without_clock(whole)


def without_clock(out: Path) -> list[dict]:
    return [{k: v for k, v in line.items() if k not in ("points_per_s", "seconds")} for line in lines(out)]


def test_it_is_evaluated(whole, capsys):
    assert evaluate([str(whole), "--weights=model"]) == 0
    found = json.loads(capsys.readouterr().out)
    (line,) = [line for line in lines(whole) if line["kind"] == "valid" and line["step"] == found["step"]]
    assert found["error"] == line["error"]


def test_it_is_reported_with_its_own_names_units_and_formats(whole, capsys):
    header, row = rows([read(whole)])
    shown = dict(zip(header, row, strict=True))
    valid = [line["ema_error"] for line in lines(whole) if line["kind"] == "valid"]
    assert shown["mean error, mm"] == f"{valid[-1]:.4f}"
    assert shown["best mean error, mm"] == f"{min(valid):.4f}"
    assert float(shown["points/s"]) > 0
    assert not any("top" in title or "images" in title for title in header)
    page = html([read(whole)], "Points")
    for text in ("Error on new points", "Loss square", "Loss weight", "points/s", "Points seen", "<p>13 points</p>"):
        assert text in page


def test_runs_of_two_tasks_share_a_report(whole):
    recorded = read(RECORDED)
    header, *body = rows([read(whole), recorded])
    first, second = (dict(zip(header, row, strict=True)) for row in body)
    assert first["top-1, %"] == second["mean error, mm"] == first["images/s"] == second["points/s"] == "–"
    assert second["top-1, %"] == "7.81"
    assert first["training loss"] != "–" != second["training loss"]


def test_throughput_has_the_tasks_unit(tmp_path, capsys):
    assert train([recipe(tmp_path), "--throughput=1"]) == 0
    assert capsys.readouterr().out.splitlines()[0].endswith(" points/s")


def test_help_shows_the_options_of_the_named_task(capsys, tmp_path):
    for arguments, width in (([f"--task.name={NAME}"], True), ([recipe(tmp_path)], True), ([], False)):
        with pytest.raises(SystemExit) as stop:
            train([*arguments, "--help"])
        text = capsys.readouterr().out
        assert stop.value.code == 0
        assert ("--task.width WIDTH" in text) == width
        assert ("--task.model.name NAME" in text) != width


@pytest.mark.parametrize("option", ["--config=RECIPE", f"--task={json.dumps({'name': NAME, 'width': 3})}"])
def test_any_way_to_name_a_task_counts(tmp_path, option):
    path = recipe(tmp_path, task={"name": NAME, "width": 3})
    config = parse("train", [option.replace("RECIPE", path)])
    assert config.task == regression.RegressionOptions(name=NAME, width=3)


def test_the_last_name_counts(tmp_path):
    config = parse("train", [recipe(tmp_path), "--task.name=classification"])
    assert config.task.name == "classification"
    assert config.task.data.size == 224
    assert parse("train", ["digits"]).task.name == "classification"  # a recipe that names none


def test_a_task_is_registered_in_python(tmp_path, monkeypatch):
    monkeypatch.setattr(tasks, "TASKS", dict(tasks.TASKS))
    tasks.register("points")(regression.Regression)
    assert {"classification", "points"} <= set(tasks.names())
    assert train([recipe(tmp_path, task={"name": "points"}), "--epochs=1"]) == 0
    assert lines(tmp_path / "run")[0]["task"]["name"] == "points"


@pytest.mark.parametrize(
    "name, message",
    [
        ("segmentation", "task.name 'segmentation' is unknown; known: classification, "),
        ("no.such:Task", "task.name 'no.such:Task' can't be imported: No module named 'no'"),
        ("json:dumps", "task.name 'json:dumps' is no class derived from torchsbp.train.task.Task"),
        (":x", "task.name ':x' can't be imported"),
    ],
)
def test_unknown_tasks_are_refused(capsys, name, message):
    assert train([f"--task.name={name}"]) == 2
    assert message in capsys.readouterr().err


def test_options_of_another_task_are_refused():
    with pytest.raises(UsageError, match=r"task.name '' takes .*ClassificationOptions, found RegressionOptions"):
        tasks.start(regression.RegressionOptions(), seed=0)


def test_a_task_says_how_sbp_is_switched_on_and_which_parameters_are_trained(tmp_path, monkeypatch):
    told: list = []

    class Own(regression.Regression):
        def apply_sbp(self, model, config):
            told.append(config)

        def set_step(self, model, number):
            told.append(number)

        def parameters(self, model, optimizer):
            first, last = model[0].parameters(), model[2].parameters()
            return [{"params": list(first), "lr": optimizer.lr / 10}, {"params": list(last)}]

    monkeypatch.setitem(tasks.TASKS, "own", Own)
    path = recipe(tmp_path, task={"name": "own"}, sbp={"preset": "default"}, schedule={"warmup_epochs": 0})
    trainer = Trainer(parse("train", [path]), Processes(torch.device("cpu")))
    assert [group["lr"] for group in trainer.learner.optimizer.param_groups] == [0.001, 0.01]
    batches = trainer.batches()
    trainer.update(batches)
    trainer.update(batches)
    assert told == [SBPConfig(), 0, 1]


def test_a_run_recorded_before_tasks_had_names_resumes(tmp_path, capsys):
    """``recorded`` has a checkpoint of an earlier version at step 6 of 10, and the metrics of its whole run. It
    does not say what share its preset was."""
    out = tmp_path / "run"
    (out / "checkpoints").mkdir(parents=True)
    shutil.copy(RECORDED / "step-0000000006.pt", out / "checkpoints")
    recorded = [json.loads(line) for line in (RECORDED / "metrics.jsonl").read_text().splitlines()]
    (out / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in recorded if line["step"] <= 6))
    path = tmp_path / "recipe.yaml"
    path.write_text(json.dumps(recorded[0]["config"]))
    assert train([str(path), f"--out={out}", "--resume=auto", "--sbp.keep_ratio=1"]) == 0
    told = capsys.readouterr().err
    assert "at step 6 of 10" in told
    assert "other settings; now sbp.keep_ratio=1.0 instead of None\n" in told
    found = [line for line in lines(out) if "changed" not in line]
    assert [(line["kind"], line["step"]) for line in found] == [(line["kind"], line["step"]) for line in recorded]
    for name in ("loss", "lr", "ema_loss"):
        values = [[line[name] for line in its if name in line] for its in (found, recorded)]
        assert values[0] == pytest.approx(values[1], rel=1e-4), name
    assert evaluate([str(RECORDED / "step-0000000006.pt")]) == 0
    assert json.loads(capsys.readouterr().out)["step"] == 6
