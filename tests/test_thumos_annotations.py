"""The comparison of our mAPs with a written-out reference, on annotations as THUMOS'14 has them."""

import importlib
from pathlib import Path
from types import ModuleType

import pytest

from torchsbp.train.data.annotations import THUMOS


@pytest.fixture
def script(monkeypatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "benchmarks"))
    return importlib.import_module("thumos_annotations")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Ten videos of 60 s, each with five segments of four classes; and, in the test part, one without a length."""
    for part in ("val", "test"):
        rows = []
        for video in range(10):
            for place in range(5):
                name, start = THUMOS[(4 * video + place % 4) % 20], 1 + 11 * place + 0.3 * video
                rows.append(f"{part}_{video},{name},0,{start},{start + 0.6 + 0.4 * place},0,0")
            rows.append(f"{part}_{video},Ambiguous,102,{5 + video},{8 + video},0,0")
        rows += [rows[0], f"{part}_1,Diving,26,61,62,0,0"]  # annotated twice, and beyond the end
        rows += ["test_x,Diving,26,1,2,0,0"] if part == "test" else []
        lines = ["video,type,type_idx,start,end,startFrame,endFrame", *rows]
        (tmp_path / f"{part}_Annotation.csv").write_text("\n".join(lines))
        lines = ["video,fps,sample_fps,count,sample_count", *(f"{part}_{i},30.0,10.0,1800.0,600" for i in range(10))]
        (tmp_path / f"{part}_video_info.csv").write_text("\n".join(lines))
    return tmp_path


def test_ours_and_the_reference_are_equal(script, folder, capsys):
    script.main([str(folder)])
    told = capsys.readouterr().out.splitlines()
    counted = "61 segments, 10 videos, 2400 frames, 1 wholly outside of their video, left out"
    parts = {line.partition(":")[0]: line for line in told if line.startswith(("val:", "test:"))}
    assert set(parts) == {"val", "test"}
    assert all(its in parts["val"] for its in counted.split(", "))
    assert "1 videos without frames, left out" in parts["test"]
    rows = [line.split("|")[2:-1] for line in told if line.startswith(("| torchsbp", "| reference"))]
    assert rows[0] == rows[1]
    assert rows[2] == rows[3]
    assert all(len(row) == 6 and 0 < float(value) < 100 for row in rows for value in row)
    assert float(told[-1].removeprefix("largest difference: ")) < 1e-9


def test_a_difference_is_an_error(script, folder, monkeypatch):
    exact = script.detection_map
    monkeypatch.setattr(
        script, "detection_map", lambda *args: {least: its + 1e-6 for least, its in exact(*args).items()}
    )
    with pytest.raises(SystemExit, match="they differ by more than 1e-09"):
        script.main([str(folder)])
