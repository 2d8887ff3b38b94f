"""Predicting with a trained model, and evaluating it, where its training data are gone."""

import base64
import csv
import io
import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from PIL import Image
from timm import create_model

from ..train.runs import TINY, lines
from ..train.runs import run as train
from ..train.test_recipes import picture_folder
from .commands import run

MODEL = TINY["task"]["model"]
SHORT = {"epochs": 1, "schedule": {"warmup_epochs": 0}, "batch": 12, "micro_batch": 6}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run whose training data are gone; its validation data are beside it."""
    folder = tmp_path_factory.mktemp("trained")
    data = {"source": "folder", "root": str(picture_folder(folder / "data")), "size": 8, "channels": 1}
    assert train(folder, task={"data": data, "model": MODEL}, **SHORT)[0] == 0
    shutil.rmtree(folder / "data" / "train")
    return folder / "run"


def stored(out: Path) -> list[Path]:
    """The ways to name its last weights."""
    return [out, *sorted((out / "checkpoints").glob("step-*.pt"))[-1:], out / "model.safetensors"]


@pytest.mark.parametrize("way", range(3))
def test_eval_needs_no_training_data(trained, capsys, way):
    status, out, err = run(capsys, "eval", str(stored(trained)[way]))
    assert (status, err) == (0, "")
    found = json.loads(out)
    (line,) = [line for line in lines(trained) if line["kind"] == "valid"]
    assert found["weights"] == "ema"
    assert (found["top1"], found["loss"]) == (line["ema_top1"], line["ema_loss"])


def test_eval_refuses_validation_data_of_other_classes(trained, capsys, tmp_path):
    root = picture_folder(tmp_path, ("val",), classes=2)
    status, _, err = run(capsys, "eval", str(trained), f"--task.data.root={root}")
    assert status == 1
    assert "3 classes and validation data 2; only in training: class2" in err


@pytest.mark.parametrize("way", range(3))
def test_predictions_are_the_models(trained, capsys, tmp_path, way):
    pictures = trained.parent / "data" / "val"
    path = stored(trained)[way]
    status, out, err = run(capsys, "predict", str(path), str(pictures), f"--out={tmp_path}", "--batch=5")
    assert (status, err) == (0, "")
    assert out.startswith("12 predictions: ")
    with (tmp_path / "predictions.csv").open() as file:
        rows = list(csv.DictReader(file))
    records = json.loads((tmp_path / "predictions.json").read_text())
    files = [str(path) for path in sorted(pictures.rglob("*.jpg"))]
    assert [row["file"] for row in rows] == [record["file"] for record in records] == files
    expected = probabilities(trained / "model.safetensors", files)
    for row, record, shares in zip(rows, records, expected, strict=True):
        assert row["class"] == record["class"] == f"class{int(shares.argmax())}"
        assert float(row["probability"]) == pytest.approx(float(shares.max()), abs=2e-6)
        assert {top["class"]: top["probability"] for top in record["top"]} == pytest.approx(
            {f"class{number}": float(share) for number, share in enumerate(shares)}, abs=2e-6
        )


def probabilities(weights: Path, files: list[str]) -> torch.Tensor:
    """By timm alone."""
    from torchvision.transforms.v2 import functional as F

    model = create_model(
        MODEL["name"], checkpoint_path=str(weights), num_classes=3, in_chans=1, **MODEL["options"]
    ).eval()
    images = []
    for file in files:
        image = F.resize(Image.open(file).convert("L"), [9], F.InterpolationMode.BICUBIC)
        images.append((F.pil_to_tensor(F.center_crop(image, [8, 8])) / 255 - 0.3) / 0.35)
    with torch.no_grad():
        return model(torch.stack(images)).softmax(1)


def test_the_page_shows_the_first_pictures_and_needs_nothing_else(trained, capsys, tmp_path):
    pictures = trained.parent / "data" / "val"
    assert run(capsys, "predict", str(trained), str(pictures), f"--out={tmp_path}", "--pictures=4")[0] == 0
    page = (tmp_path / "predictions.html").read_text()
    shown = re.findall(r'src="data:image/jpeg;base64,([^"]+)"', page)
    assert len(shown) == 4
    assert Image.open(io.BytesIO(base64.b64decode(shown[0]))).size == (48, 40)
    assert "The first 4 of 12 files" in page
    assert not re.search(r'(?:src|href)="(?!data:)', page)
    for record in json.loads((tmp_path / "predictions.json").read_text())[:4]:
        assert f"{record['class']}, {record['probability']:.1%}<small>{record['file']}</small>" in page


def test_files_that_cannot_be_read_are_told_and_the_others_predicted(trained, capsys, tmp_path):
    good = next((trained.parent / "data" / "val").rglob("*.jpg"))
    bad = tmp_path / "bad.jpg"
    bad.write_text("no picture")
    status, out, err = run(capsys, "predict", str(trained), str(bad), str(good), f"--out={tmp_path / 'out'}")
    assert status == 1
    assert out.startswith("1 predictions: ")
    assert f"1 of 2 files can't be read:\n{bad}: it is no picture of a format that Pillow knows" in err
    assert [record["file"] for record in json.loads((tmp_path / "out" / "predictions.json").read_text())] == [str(good)]
    assert str(bad) in (tmp_path / "out" / "predictions.html").read_text()


def test_inputs_that_are_none_are_refused(trained, capsys, tmp_path):
    assert run(capsys, "predict", str(trained), str(tmp_path))[::2] == (
        2,
        f"torchsbp predict: no files to predict in {tmp_path}; known: .bmp, .gif, .jpeg, .jpg, .pgm, .png, .ppm, "
        ".tif, .tiff, .webp\n",
    )
    assert run(capsys, "predict", str(trained), str(tmp_path / "none"))[2].endswith(
        f"no file or folder {tmp_path}/none\n"
    )


def test_a_task_without_predictions_says_so(capsys, tmp_path):
    from ..train.test_tasks import recipe

    assert run(capsys, "train", recipe(tmp_path), "--epochs=1")[0] == 0
    status, _, err = run(capsys, "predict", str(tmp_path / "run"), __file__)
    assert status == 2
    assert "Regression has no predictions: its class needs a method predictor()" in err


def test_weights_that_do_not_say_how_they_were_trained_are_refused(trained, capsys, tmp_path):
    from safetensors.torch import load_file, save_file

    bare = tmp_path / "bare.safetensors"
    save_file(load_file(trained / "model.safetensors"), bare)
    status, _, err = run(capsys, "eval", str(bare))
    assert status == 1
    assert "does not say how its weights were trained" in err
    assert run(capsys, "eval", str(trained / "model.safetensors"), "--weights=model")[2].endswith(
        "has the weights called ema, not model: use a run's folder or a checkpoint\n"
    )
