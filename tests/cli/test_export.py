"""A trained model for use elsewhere: the same outputs, at any batch size."""

import json
import sys
from pathlib import Path

import pytest
import timm
import torch
from safetensors import safe_open

from torchsbp.train import exports

from ..train.runs import TINY
from ..train.runs import run as train
from .commands import run

MODEL = TINY["task"]["model"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    code, out = train(tmp_path_factory.mktemp("trained"), epochs=1, schedule={"warmup_epochs": 0})
    assert code == 0
    return out


@pytest.fixture(scope="module")
def expected(trained: Path) -> torch.nn.Module:
    """The average of the run, in plain timm."""
    options = {"in_chans": 1, "num_classes": 10, **MODEL["options"]}
    return timm.create_model(MODEL["name"], checkpoint_path=str(trained / "model.safetensors"), **options).eval()


def images(number: int) -> torch.Tensor:
    return torch.randn(number, 1, 8, 8, generator=torch.Generator().manual_seed(1))


def test_safetensors_are_those_weights_for_plain_timm(trained, capsys, tmp_path):
    path = tmp_path / "new" / "weights.safetensors"
    status, out, _ = run(capsys, "export", str(trained), "--weights=model", f"--out={path}")
    assert (status, out) == (0, f"{path}: the weights, read back bit for bit\n")
    options = {"in_chans": 1, "num_classes": 10, **MODEL["options"]}
    model = timm.create_model(MODEL["name"], checkpoint_path=str(path), **options)
    (newest,) = (trained / "checkpoints").glob("step-*10.pt")
    weights = torch.load(newest, weights_only=True)["model"]
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())
    with safe_open(path, "pt") as file:
        about = file.metadata()
    assert (about["weights"], about["step"], json.loads(about["classes"])) == ("model", "10", list("0123456789"))
    assert run(capsys, "eval", str(path))[0] == 0


@torch.no_grad()
@pytest.mark.filterwarnings("ignore:The given buffer is not writable")  # torch 2.11, of its own reader
def test_torch_export(trained, expected, capsys, tmp_path):
    path = tmp_path / "model.pt2"
    status, out, err = run(capsys, "export", str(trained), "--format=torch_export", f"--out={path}")
    assert status == 0, err
    assert out.startswith(f"{path}: the model, for any batch size; outputs within ")
    program = torch.export.load(path, extra_files=(files := {exports.DESCRIPTION: ""}))
    assert json.loads(json.loads(files[exports.DESCRIPTION])["classes"]) == list("0123456789")
    for number in (1, 7):
        torch.testing.assert_close(program.module()(images(number)), expected(images(number)), rtol=0, atol=1e-5)
    assert [its.name for its in tmp_path.iterdir()] == ["model.pt2"]


@torch.no_grad()
@pytest.mark.filterwarnings("ignore")  # of the converter
def test_onnx(trained, expected, capsys, tmp_path):
    runtime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    path = tmp_path / "model.onnx"
    status, out, err = run(capsys, "export", str(trained), "--format=onnx", f"--out={path}")
    assert status == 0, err
    assert out.splitlines()[-1].startswith(f"{path}: the model, for any batch size; outputs within ")
    session = runtime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    assert json.loads(session.get_modelmeta().custom_metadata_map["classes"]) == list("0123456789")
    (image,) = session.get_inputs()
    for number in (1, 7):
        (found,) = session.run(None, {image.name: images(number).numpy()})
        torch.testing.assert_close(torch.from_numpy(found), expected(images(number)), rtol=0, atol=1e-4)
    assert [its.name for its in tmp_path.iterdir()] == ["model.onnx"]


def test_missing_packages_and_wrong_names_are_told(trained, capsys, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    status, _, err = run(capsys, "export", str(trained), "--format=onnx", f"--out={tmp_path / 'model.onnx'}")
    assert (status, err) == (2, "torchsbp export: onnx needs onnxscript: pip install 'torchsbp[onnx]'\n")
    status, _, err = run(capsys, "export", str(trained), "--format=onnx", "--out=model.pb")
    assert (status, err) == (2, "torchsbp export: --out model.pb: a file of onnx ends in .onnx\n")


@pytest.mark.parametrize("format, file", [("safetensors", "m.safetensors"), ("torch_export", "m.pt2")])
def test_a_file_that_can_not_be_written_is_named(trained, capsys, tmp_path, format, file):
    (tmp_path / "taken").write_text("")
    path = tmp_path / "taken" / file
    status, _, err = run(capsys, "export", str(trained), f"--format={format}", f"--out={path}")
    assert (status, err) == (1, f"error: {path} can't be written: File exists\n")


def test_outputs_that_differ_leave_nothing(trained, capsys, tmp_path, monkeypatch):
    wrong = exports.PROGRAMS["torch_export"]._replace(
        write=lambda model, inputs, path, about: path.write_text(""),
        read=lambda path: lambda x: torch.zeros(len(x), 10),
    )
    monkeypatch.setitem(exports.PROGRAMS, "torch_export", wrong)
    status, _, err = run(capsys, "export", str(trained), "--format=torch_export", f"--out={tmp_path / 'model.pt2'}")
    assert (status, err) == (
        1,
        "error: exported as torch_export, outputs differ by 1.0e+00 of the largest; nothing is written\n",
    )
    assert not list(tmp_path.iterdir())


class Branching(torch.nn.Module):
    def forward(self, x):
        return x if x.sum() > 0 else -x


def test_a_model_that_cannot_be_converted_is_told_in_one_line(tmp_path):
    from torchsbp.errors import RunError

    with pytest.raises(RunError, match="this model can't be exported as torch_export: ") as refused:
        exports.write_program(
            "torch_export", Branching(), lambda n: (torch.ones(n, 2),), tmp_path / "model.pt2", about={}
        )
    assert "\n" not in str(refused.value)
    assert not list(tmp_path.iterdir())
