"""Benchmarks of detectors on tiny models: methods save what their names say."""

import importlib
import json
import zipfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from PIL import Image

from torchsbp.train.data.coco import open_coco

from .train.detection.detectors import TINY
from .train.detection.runs import recipe

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
NAMES = ("detection", "detection_data", "padding")
MODEL = "mask_rcnn_convnext_tiny"


@pytest.fixture(scope="module")
def bench() -> Iterator[SimpleNamespace]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARKS))
        modules = SimpleNamespace(**{name: importlib.import_module(name) for name in NAMES})
        for name, model in modules.detection.MODELS.items():
            small = {"options": TINY, "width": 32, "hidden": 16, "sampled": 64, "proposals": 450, "norm": "group"}
            patch.setitem(modules.detection.MODELS, name, replace(model, **small))
        yield modules


@pytest.fixture(scope="module")
def rows(bench, tmp_path_factory) -> list[dict]:
    out = tmp_path_factory.mktemp("bench") / "rows.json"
    bench.detection.main([*f"--device cpu --height 60 --width 90 --steps 1 --batches 2 --out {out}".split()])
    return json.loads(out.read_text())["rows"]


def test_every_method_is_measured_by_its_parts(bench, rows):
    assert [(row["model"], row["method"]) for row in rows] == [
        (model, method) for model in bench.detection.MODELS for method in bench.detection.METHODS
    ]
    for row in rows:
        assert sum(row["parts MiB"].values()) == pytest.approx(row["saved MiB"])
        assert row["step ms"] > 0
    assert all(row["memory"] == row["speed"] == 1 for row in rows if row["method"] == "full")
    assert len(bench.detection.markdown(rows).splitlines()) == 2 + len(rows)


def test_without_full_backprop_there_is_nothing_to_compare_with(bench):
    row = {"model": "m", "batch": 2, "mode": "eager", "method": "sbp", "step ms": 5.0, "saved MiB": 7.0}
    rows = [row | {"parts MiB": {"backbone": 7.0}}]
    bench.detection.add_ratios(rows)
    assert bench.detection.markdown(rows).splitlines()[-1] == "| m, 2, eager | sbp | 7 | 5 ms | 7 |"


@pytest.mark.parametrize(
    "part, less, more",
    [
        ("backbone", "checkpointed backbone", "full"),
        ("backbone", "exact lean", "full"),
        ("backbone", "sbp r=0.5", "exact lean"),
        ("backbone", "sbp r=0.25", "sbp r=0.5"),
        ("heads", "sbp r=0.5, heads recomputed", "sbp r=0.5"),
        ("heads", "sbp r=0.5, half of the proposals", "sbp r=0.5"),
    ],
)
def test_methods_save_what_their_names_say(bench, rows, part, less, more):
    for model in bench.detection.MODELS:
        sizes = {row["method"]: row["parts MiB"][part] for row in rows if row["model"] == model}
        assert sizes[less] < 0.99 * sizes[more]


def test_a_quarter_of_the_proposals_are_objects(bench):
    boxes = bench.detection.batch_of(1, 60, 90)[2][0]["boxes"]
    near = bench.detection.near(boxes)
    overlap = importlib.import_module("torchvision.ops").box_iou(near, boxes).max(1).values
    assert len(near) == bench.detection.NEAR
    assert (overlap > 0.7).all()


def test_a_case_that_fails_is_a_row(bench, monkeypatch):
    def fails(*_: object) -> None:
        raise RuntimeError("out of memory\nmore of it")

    monkeypatch.setattr(bench.detection, "Case", fails)
    setting = bench.detection.Setting(MODEL, 1, "eager", "full", 60, 90, "cpu", 0, 1)
    assert bench.detection.alone(setting) == {"error": "out of memory"}


def test_a_zip_becomes_cocos_layout(bench, tmp_path):
    content = {
        "images": [{"id": 1, "file_name": "one.png", "height": 20, "width": 30}],
        "annotations": [
            {"id": 1, "image_id": 1, "category_id": 1, "bbox": [1, 1, 9, 9], "segmentation": [[1, 1, 9, 1, 9, 9]]}
        ],
        "categories": [{"id": 1, "name": "person"}],
    }
    with zipfile.ZipFile(tmp_path / "sets.zip", "w") as archive:
        for part in ("train", "val"):
            archive.writestr(f"people/instances_{part}.json", json.dumps(content))
            with archive.open(f"people/{part}/one.png", "w") as file:
                Image.new("RGB", (30, 20)).save(file, "PNG")
    bench.detection_data.main([str(tmp_path / "sets.zip"), str(tmp_path / "data")])
    root = tmp_path / "data" / "people"
    found = open_coco(root / "annotations" / "instances_val.json", root / "val", True, True)
    assert found[0][0].size == (30, 20)
    assert found.images[0]["file_name"] == "one.jpg"


def test_padding_is_told_by_area(bench, tmp_path, capsys):
    """A whole image, and one that fills 1200 of 6144 pixels: of it all is kept, and 1 − 1200/3072 beside it."""
    batches = [[(64, 96), (30, 40)]]
    assert bench.padding.line(batches, [], 32) == "| multiples of 32 | 0.598 | 0.500 | 0.750 | 0.305 |"
    assert bench.padding.line(batches, [(96, 128)], 32).startswith("| 2 sizes | 0.299 | 0.500 | 1.000 |")
    bench.padding.main([recipe(tmp_path), "--task.data.buckets=[[96, 96]]"])
    told = capsys.readouterr().out.splitlines()
    assert told[0] == f"{6 * bench.padding.EPOCHS} batches, r = 0.5"  # 12 images, two at a time
    assert [row.split(" | ")[0] for row in told[-2:]] == ["| 1 sizes", "| multiples of 32"]
