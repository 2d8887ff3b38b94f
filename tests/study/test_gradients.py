"""Bias and variance of gradients: the statistics, and the study at toy size."""

import pytest
import torch

from torchsbp.cli.main import main
from torchsbp.study import contest
from torchsbp.study.gradients import statistics

from .test_contest import data  # noqa: F401  a fixture


def test_bias_and_variance_are_told_apart():
    torch.manual_seed(0)
    full = torch.randn(500)
    exact = statistics([full, full], full)
    assert exact == pytest.approx({"cosine": 1, "norm": 1, "bias": 0, "variance": 0}, abs=1e-5)
    noisy = [1.5 * full + 0.3 * torch.randn(500) for _ in range(64)]
    found = statistics(noisy, full)
    size = full.square().mean()
    assert found["bias"] == pytest.approx(0.25, rel=0.05)
    assert found["variance"] == pytest.approx(float(0.09 / size), rel=0.05)


def test_the_study_runs_at_toy_size(data, tmp_path):  # noqa: F811
    arms = ["--models", "vit", "--arms", "full;exact;rows 0.5;mlp rows 0.25;down exact 0.5"]
    files = ["--data", str(data), "--out", str(tmp_path)]
    sizes = ["--toy", "--eager", "--batch", "16", "--epochs", "1", "--masks", "4"]
    assert main(["study", "gradients", *files, *sizes, *arms]) == 0
    rows = contest.read(tmp_path / "gradients.jsonl")
    assert {row["arm"] for row in rows} == {"exact", "rows 0.5", "mlp rows 0.25"}
    assert {row["block"] for row in rows} >= {"blocks.0", "blocks.2", "head", "patch_embed.proj"}
    assert all(row["cosine"] > 0.999 and row["variance"] < 1e-6 for row in rows if row["arm"] == "exact")
    assert all(row["cosine"] > 0.999 for row in rows if row["block"] == "head")
    assert "| vit | rows 0.5 | " in (tmp_path / "gradients.md").read_text()
