"""benchmarks/catalogue.py on a few names, and its table, which is the page's."""

import importlib
import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture(scope="module")
def tools() -> Iterator[SimpleNamespace]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARKS))
        yield SimpleNamespace(**{name: importlib.import_module(name) for name in ("catalogue", "covered")})


def test_the_page_has_the_table_of_the_results(tools):
    assert tools.covered.section() in tools.covered.PAGE.read_text()


def test_the_results_are_small_and_say_why(tools):
    environments, rows = tools.covered.read(tools.covered.RESULTS)
    assert tools.covered.RESULTS.stat().st_size < 200_000
    assert all({"date", "torch", "timm", "torchvision", "commit", "names"} == set(its) for its in environments)
    assert {row["result"] for row in rows.values()} <= {"passed", "failed", "not run", "refused", "error"}
    assert all(row["result"] == "passed" or row["why"] for row in rows.values())


def test_models_are_tried_once_and_results_appended(tools, tmp_path, capsys):
    out = tmp_path / "rows.jsonl"
    call = ["--only", "test_vit,test_convnext,timm/test_resnet", "--jobs", "2", "--out", str(out)]
    tools.catalogue.main(call)
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert lines[0].keys() >= {"torch", "commit", "date"}
    rows = {line["name"]: line for line in lines[1:]}
    assert rows["timm/test_resnet"] == {
        "name": "timm/test_resnet",
        "result": "refused",
        "why": "no adapter for timm.models.resnet.ResNet",
    }
    for name in ("timm/test_vit", "timm/test_convnext"):
        assert rows[name]["result"] == "passed"
        assert rows[name]["forward"] <= 1e-12
        assert rows[name]["gradient"] <= 1e-9
    before = out.read_text()
    tools.catalogue.main(call)
    assert out.read_text() == before
    assert "| all | 3 | 2 | 2 | " in capsys.readouterr().out


def test_the_last_row_of_a_name_counts_and_what_was_made_again_is_forgotten(tools, tmp_path):
    out = tmp_path / "rows.jsonl"
    for row in ({"commit": "a"}, {"name": "x", "result": "failed"}, {"commit": "b"}, {"name": "x", "result": "passed"}):
        tools.covered.append(out, row)
    assert tools.covered.read(out) == ([{"commit": "b"}], {"x": {"name": "x", "result": "passed"}})
    assert tools.covered.read(tmp_path / "none") == ([], {})


def test_limits_of_time_and_memory_are_rows(tools, capfd):
    late = tools.catalogue.alone("timm/test_vit", seconds=0.0, gib=8)
    assert late == {"name": "timm/test_vit", "result": "error", "why": "not done after 0 s"}
    large = tools.catalogue.alone("torchvision/vit_b_16", seconds=100, gib=0.5)
    assert large == {"name": "torchvision/vit_b_16", "result": "not run", "why": "needs more than 0.5 GiB"}


def test_no_such_name(tools, capsys):
    with pytest.raises(SystemExit):
        tools.catalogue.main(["--only", "vit_huger*"])
    assert "no name of timm or torchvision matches 'vit_huger*'" in capsys.readouterr().err


def test_table_from_rows(tools):
    rows = [
        {"name": "timm/vit_a", "result": "passed", "forward": 0.0, "gradient": 1e-15},
        {"name": "timm/vit_b", "result": "passed", "forward": 1e-15, "gradient": 1e-15},
        {"name": "timm/vit_c", "result": "failed", "why": "head.weight differs", "forward": 0.1, "gradient": 0.1},
        {"name": "timm/vit_d_dinov9", "result": "not run", "why": "needs more than 8 GiB"},
        {"name": "timm/resnet", "result": "refused", "why": "no adapter for timm.models.resnet.ResNet"},
        *({"name": f"torchvision/swin_{i}", "result": "refused", "why": "no adapter for Swin"} for i in range(8)),
    ]
    environment = {"date": "2026-01-02", "torch": "2.15.0", "commit": "abc", "names": 20}
    text = tools.covered.markdown([environment], {row["name"]: row for row in rows})
    assert text.splitlines() == [
        "| family | names | patched | forward equal | bit for bit | oracle passed | not run | refused |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
        "| timm dinov | 1 | 1 | 0 | 0 | 0 | 1 | 0 |",
        "| timm vit | 3 | 3 | 2 | 1 | 2 | 0 | 0 |",
        "| timm other | 1 | 0 | 0 | 0 | 0 | 0 | 1 |",
        "| torchvision swin | 8 | 0 | 0 | 0 | 0 | 0 | 8 |",
        "| all | 13 | 4 | 2 | 1 | 2 | 1 | 9 |",
        "",
        "13 of 20 names, by `python benchmarks/catalogue.py`:",
        "2026-01-02, torch 2.15.0, commit abc.",
        "",
        "Not covered in the named families:",
        "",
        "- failed: head.weight differs – `vit_c`",
        "- not run: needs more than 8 GiB – `vit_d_dinov9`",
        "- refused: no adapter for Swin – `swin_0`, `swin_1`, `swin_2`, `swin_3`, `swin_4`, `swin_5`, … (8 names)",
        "",
        "Model classes without an adapter among the others: ResNet (1).",
    ]
