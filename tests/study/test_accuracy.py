"""Accuracy over grids, and masks, at toy size."""

from torchsbp.cli.main import main
from torchsbp.study.accuracy import findings

from .commands import rows_of, study


def test_the_study_runs_at_toy_size(data, tmp_path):
    options = ["--models", "vit", "--arms", "full;grid 0.5;random 0.5", "--epochs", "2"]
    assert study("accuracy", data, tmp_path, *options) == 0
    rows = rows_of("accuracy", tmp_path)
    assert {row["arm"] for row in rows if "done" in row} == {"full", "grid 0.5", "random 0.5"}
    figure = (tmp_path / "accuracy.svg").read_text()
    assert "ViT: masks" in figure
    assert "ViT: keep-ratio" in figure
    assert "attention" not in figure
    (finding,) = findings(rows)
    assert finding.figure == "4, left"


def test_the_paper_s_findings_are_compared():
    def row(arm, accuracy):
        its = {"study": "accuracy", "run": arm, "model": "vit", "arm": arm, "seed": 0, "lr": 1, "drop_path": 0.1}
        return its | {"epochs": 2, "epoch": 2, "accuracy": accuracy}

    found = findings([row("grid 0.5", 80.0), row("grid 0.25", 77.8), row("qkv 0.5", 76.0)])
    assert [(its.figure, its.agrees) for its in found] == [("1, middle", True), ("4, right", False)]


def test_masks_are_drawn_without_data(tmp_path):
    assert main(["study", "masks", "--out", str(tmp_path), "--jobs", "0"]) == 0
    rows = {row["arm"]: row for row in rows_of("masks", tmp_path) if "kept" in row}
    assert all(len(positions) == 98 for row in rows.values() for positions in row["kept"])
    assert len({tuple(positions) for positions in rows["grid"]["kept"]}) == 2
    assert (tmp_path / "masks.svg").read_text().count("h6.5v6.5") == 2 * 5 * 98
    assert "| 7 | grid masks" in (tmp_path / "masks.md").read_text()
