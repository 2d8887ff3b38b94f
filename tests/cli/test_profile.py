"""``torchsbp profile``: its table, its chart, its JSON."""

import json

import pytest

from torchsbp import SBPConfig
from torchsbp.adapters import timm
from torchsbp.memory.estimate import describe
from torchsbp.sampling.recommended import EXACT, VIT, Recommended

from ..steps import recommending
from .commands import SMALL, run

FAST = describe(SBPConfig(**VIT.fast))


def test_profile_prints_a_table(capsys):
    status, out, _ = run(capsys, "profile", *SMALL, "--keep-ratio", "0.25", "--recompute", "0.5", "--predict")
    assert status == 0
    assert out.startswith("test_vit, batch 4, 160×160, bf16, adamw: predicted for a CUDA device\n")
    lines = out.splitlines()
    assert lines[2].split("  ")[-1] == "sbp query r=0.25, 50% recomputed"
    names = [line.split("  ")[0] for line in lines]
    assert [n for n in names if n in ("parameters", "gradients", "optimizer state", "saved activations", "peak")]
    assert "saved by block" in lines


@pytest.mark.skipif("__import__('torch').cuda.is_available()")
def test_profile_says_that_it_predicts(capsys):
    _, out, _ = run(capsys, "profile", *SMALL, "--methods", "full")
    assert "predicted for a CUDA device; there is none here to measure on" in out


@pytest.mark.cuda
@pytest.mark.skipif("not __import__('torch').cuda.is_available()")
def test_profile_measures_on_cuda(capsys):
    _, out, _ = run(capsys, "profile", *SMALL, "--json")
    found = json.loads(out)
    assert found["measured"]
    assert all(its["peak"] > 0 for its in found["measurements"].values())


def test_profile_as_json(capsys):
    _, out, _ = run(capsys, "profile", *SMALL, "--methods", "full", "sbp", "--json", "--predict")
    found = json.loads(out)
    assert list(found["predicted"]) == ["full", FAST]
    full, sbp = found["predicted"].values()
    assert full["saved_bytes"] > sbp["saved_bytes"]
    assert full["input_shape"] == [4, 3, 160, 160]


@pytest.mark.parametrize("name, begin", [("chart.png", b"\x89PNG"), ("deep/chart.svg", b"<?xml")])
def test_profile_draws_a_chart(capsys, tmp_path, name, begin):
    pytest.importorskip("matplotlib")
    status, out, _ = run(
        capsys, "profile", *SMALL, "--methods", "full", "sbp", "--out", str(tmp_path / name), "--predict"
    )
    assert status == 0
    assert f"chart: {tmp_path / name}" in out
    assert (tmp_path / name).read_bytes().startswith(begin)
    assert (tmp_path / name).stat().st_size > 10_000


def test_the_legend_of_a_chart_covers_no_bar(capsys, tmp_path, monkeypatch):
    figures, figure = [], pytest.importorskip("matplotlib.figure").Figure
    saved = figure.savefig
    monkeypatch.setattr(figure, "savefig", lambda self, *its, **more: figures.append(self) or saved(self, *its, **more))
    run(capsys, "profile", *SMALL, "--methods", "full", "checkpoint", "--out", str(tmp_path / "chart.png"), "--predict")
    peaks = figures[0].axes[0]
    assert peaks.get_legend().get_window_extent().x0 > peaks.get_window_extent().x1


def test_exact_blocks_and_what_is_fast_are_compared(capsys):
    _, out, _ = run(capsys, "profile", *SMALL, "--json", "--predict")
    found = json.loads(out)["predicted"]
    assert list(found) == ["full", "checkpoint", "exact lean, recomputed", FAST]
    assert found["exact lean, recomputed"]["saved_bytes"] > found[FAST]["saved_bytes"]


def test_a_family_for_which_nothing_sampled_is_recommended_is_exact(capsys):
    with recommending(Recommended(EXACT, EXACT), timm.VIT):
        found, given = (
            json.loads(run(capsys, "profile", *SMALL, "--json", "--predict", *options)[1])
            for options in ([], ["--keep-ratio", "0.5"])
        )
    assert list(found["predicted"]) == ["full", "checkpoint", "exact lean, recomputed"]
    (note,) = found["notes"]
    assert note == "sbp is exact: nothing that is sampled is recommended for this model; --keep-ratio samples"
    assert list(given["predicted"])[3:] == ["sbp query r=0.5, recomputed"]
    assert given["notes"] == []


def test_a_model_without_sbp_is_profiled_without_it(capsys):
    status, out, _ = run(capsys, "profile", "torchvision/resnet18", "--size", "64", "--batch", "4", "--predict")
    assert status == 0
    for method in ("exact lean", "sbp query r=fast"):
        assert f"{method}, recomputed is left out: nothing to patch in torchvision.models.resnet.ResNet" in out
    assert "layer1.0" in out
