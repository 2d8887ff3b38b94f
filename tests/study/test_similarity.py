"""Neighbours and frames, at toy size."""

import pytest
import torch

from torchsbp.study.arms import VIT
from torchsbp.study.similarity import cosines, findings, on_grid

from .commands import rows_of, study


def test_pairs_are_neighbours():
    x = torch.zeros(1, 2, 2, 2, 2)
    x[0, 0] = torch.tensor([1.0, 0.0])  # the frames are orthogonal, positions of one frame equal
    x[0, 1] = torch.tensor([0.0, 1.0])
    found = cosines(x)
    assert (found["neighbours"], found["frames"]) == (1, 0)
    assert 0 < found["far"] < 1
    assert "frames" not in cosines(x[:, :1])


@pytest.mark.parametrize("model, tokens", [("hybrid", 1), ("pooled", 0)])
def test_positions_of_a_vit_are_put_on_their_grid(model, tokens):
    x = torch.arange(tokens + 9.0).view(1, -1, 1)
    assert torch.equal(on_grid(model, x), x[:, tokens:].view(1, 1, 3, 3, 1))


@pytest.mark.parametrize("model", ["vit", "hybrid", "convnext", "swin"])
def test_the_study_runs_at_toy_size(data, tmp_path, model):
    assert study("similarity", data, tmp_path, "--models", model, "--epochs", "1") == 0
    (row,) = (row for row in rows_of("similarity", tmp_path) if "blocks" in row)
    *below, last = row["blocks"].values()
    assert all(set(its) == {"neighbours", "far"} for kinds in below for its in kinds.values())
    assert set(last["activations"]) == {"neighbours", "far"}
    assert all(-1 <= value <= 1 for kinds in below for its in kinds.values() for value in its.values())
    assert bool(last["gradients"]) == (model not in VIT)  # the head of a ViT reads the class token alone
    assert (tmp_path / "similarity.svg").exists()
    assert [its.figure for its in findings([row])] == [f"video 1 ({model})"]


def test_clips_have_frames(clips, tmp_path):
    assert study("similarity", clips, tmp_path, "--models", "video", "--epochs", "1") == 0
    (row,) = (row for row in rows_of("similarity", tmp_path) if "blocks" in row)
    first = next(iter(row["blocks"].values()))
    assert first["activations"]["frames"] > first["activations"]["far"]
