"""Bias and variance of gradients: the statistics, and the study at toy size."""

import pytest
import torch

from torchsbp.study.gradients import added, findings, statistics, table

from .commands import rows_of, study


def test_bias_and_variance_are_told_apart():
    torch.manual_seed(0)
    full = torch.randn(500)
    assert statistics([full, full], full) == pytest.approx([1, 1, 0, 0], abs=1e-5)
    noisy = [1.5 * full + 0.3 * torch.randn(500) for _ in range(64)]
    _, _, bias, variance = statistics(noisy, full)
    assert bias == pytest.approx(0.25, rel=0.05)
    assert variance == pytest.approx(float(0.09 / full.square().mean()), rel=0.05)


def test_what_an_arm_adds_to_the_noise_of_batches():
    layers = {"a": [1.0, 1.0, 0.01, 0.03], "b": [1.0, 1.0, 0.0, 0.0], "never used": [0.0, 0.0, 0.0, 0.0]}
    row = {"study": "gradients", "run": "r", "model": "vit", "arm": "grid 0.5", "layers": layers}
    assert added(row) == "–"
    assert "noise" not in table([row])
    row |= {"noise": {"a": 0.2, "b": 0.1, "never used": 0.0}}
    assert added(row) == "10.0%; a 20%"
    assert table([row]).splitlines()[0].endswith("| mean variance | of the batch's noise |")


def test_the_study_runs_at_toy_size(data, tmp_path):
    arms = "full;exact;grid 0.5;random 0.5;qkv 0.5;qkv-local 0.5;own rows 0.5;down exact 0.5"
    options = ["--models", "vit", "--arms", arms, "--epochs", "1", "--masks", "4"]
    assert study("gradients", data, tmp_path, *options) == 0
    found = {row["arm"]: row for row in rows_of("gradients", tmp_path) if "layers" in row}
    assert set(found) == {"exact", "grid 0.5", "random 0.5", "qkv 0.5", "qkv-local 0.5", "own rows 0.5"}
    assert all(cosine > 0.999 and variance < 1e-6 for cosine, _, _, variance in found["exact"]["layers"].values())
    assert all(len(row["layers"]) == len(found["exact"]["layers"]) for row in found.values())
    assert found["grid 0.5"]["layers"]["head"][0] > 0.999  # above all that is sampled
    assert found["qkv-local 0.5"]["layers"]["head"][0] < found["grid 0.5"]["layers"]["head"][0]  # another forward
    assert found["grid 0.5"]["layers"]["blocks.1.mlp.fc1"][0] < found["own rows 0.5"]["layers"]["blocks.1.mlp.fc1"][0]
    assert "| vit | grid 0.5 | " in (tmp_path / "gradients.md").read_text()
    assert all(row["noise"].keys() == row["layers"].keys() for row in found.values())
    assert len({tuple(row["noise"].values()) for row in found.values()}) == 1  # that of full gradients, for all arms
    assert (tmp_path / "gradients_vit.svg").read_text().count('class="title"') >= 2
    assert [its.figure for its in findings(rows_of("gradients", tmp_path))] == ["3 (vit)", "5 (vit)", "5 (vit)"]


def test_rows_chosen_in_backward_are_arms_of_it(data, tmp_path):
    arms = ["even 0.5", "norm 0.5", "norm 0.25", "largest 0.5", "dW 0.5", "norm dW 0.5"]
    options = ["--models", "vit,convnext", "--arms", ";".join(arms), "--epochs", "1", "--masks", "4"]
    assert study("gradients", data, tmp_path, *options) == 0
    found = {(row["model"], row["arm"]): row["layers"] for row in rows_of("gradients", tmp_path) if "layers" in row}
    assert list(found) == [(model, arm) for model in ("vit", "convnext") for arm in arms]
    for model, below in (("vit", "patch_embed.proj"), ("convnext", "stem.0")):
        _, _, bias, variance = found[model, "largest 0.5"][below]
        assert variance == 0 < bias  # nothing is drawn
        assert found[model, "norm 0.25"][below][3] > found[model, "norm 0.5"][below][3] > 0
        assert found[model, "dW 0.5"][below] == pytest.approx([1, 1, 0, 0], abs=1e-5)  # input gradients are exact
    assert "rows chosen in backward: bias and variance" in (tmp_path / "gradients_vit.svg").read_text()
