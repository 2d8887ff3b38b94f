"""What an evaluation of a classifier tells: by class, which for which, and top-5 only of more than five."""

import json

import pytest
import torch
from torch import nn

from torchsbp.train.accuracy import Accuracy

from .runs import lines, run
from .test_recipes import picture_folder

CPU = torch.device("cpu")


def told(
    logits: list[list[float]], labels: list[int], names: tuple[str, ...] = (), valid: int | None = None
) -> Accuracy:
    accuracy = Accuracy(CPU, len(logits[0]), names)
    accuracy.update(nn.Identity(), (torch.tensor(logits), torch.tensor(labels)), valid or len(labels))
    return accuracy


def test_the_confusion_matrix_counts_what_is_found():
    """The last sample only fills the batch; NaN is nothing that was found."""
    nan = float("nan")
    accuracy = told([[1, 0, 0], [0, 1, 0], [0, 0, 1], [1, 1, 0], [nan, 0, 0], [1, 0, 0]], [0, 0, 1, 1, 2, 2], valid=5)
    assert accuracy.result()["top1"] == pytest.approx(20.0)
    assert accuracy.total.tolist() == [[1, 1, 0, 0], [1, 0, 1, 0], [0, 0, 0, 1]]


def test_of_classes_with_the_same_logit_the_first_is_found():
    """As in ``predict``. A model that tells nothing apart is right once in a class, not always."""
    accuracy = told([[0.0] * 10] * 10, [*range(10)])
    assert (accuracy.result()["top1"], accuracy.result()["top5"]) == (10.0, 50.0)
    assert accuracy.total[:, 0].tolist() == [1] * 10


def test_sections_name_the_classes_worst_first():
    accuracy = told([[1.0, 0.0], [1.0, 0.0], [1.0, 0.0]], [0, 1, 1], ("a<b", "c"))
    accuracy.result()
    by_class, matrix = accuracy.sections().values()
    assert (
        "<tr><td>c</td><td>2</td><td>0.0</td><td>a&lt;b (2)</td></tr><tr><td>a&lt;b</td><td>1</td><td>100.0</td><td>–"
        in by_class
    )
    assert matrix.count("<td ") == 4
    assert 'var(--c0) 70%, transparent)">2</td>' in matrix


def test_of_many_classes_the_worst_are_shown():
    accuracy = told(torch.eye(30).tolist(), [*range(29), 0])
    result = accuracy.result()
    assert set(result) == {"loss", "top1", "top5"}
    (table,) = accuracy.sections().values()
    assert "<p>The worst 20 of 30 classes.</p>" in table
    assert table.index("<td>0</td><td>2</td><td>50.0</td><td>29 (1)</td>") < table.index("<td>100.0</td>")
    assert "<td>–</td>" in table


def test_top5_only_where_it_means_something(tmp_path):
    data = {"source": "folder", "root": str(picture_folder(tmp_path / "data")), "size": 8, "channels": 1}
    code, out = run(tmp_path, task={"data": data}, epochs=1, schedule={"warmup_epochs": 0}, batch=12, micro_batch=6)
    assert code == 0
    valid = next(line for line in lines(out) if line["kind"] == "valid")
    assert {"top1", "ema_top1"} <= valid.keys()
    assert not any("top5" in key for key in valid)
    assert [metric["name"] for metric in lines(out)[0]["task"]["metrics"]] == ["loss", "top1"]
    assert "class2" in (out / "report" / "Confusion matrix.html").read_text()


def test_the_names_of_the_classes_are_stored_with_the_weights(tmp_path):
    from safetensors import safe_open

    data = {"source": "folder", "root": str(picture_folder(tmp_path / "data")), "size": 8, "channels": 1}
    _, out = run(tmp_path, task={"data": data}, epochs=1, schedule={"warmup_epochs": 0}, batch=12, micro_batch=6)
    with safe_open(out / "model.safetensors", "pt") as file:
        assert json.loads(file.metadata()["classes"]) == ["class0", "class1", "class2"]
    for path in (out / "checkpoints").glob("*.pt"):
        about = torch.load(path, weights_only=True)["about"]
        assert json.loads(about["classes"]) == ["class0", "class1", "class2"]
