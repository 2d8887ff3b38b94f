"""What the README says: its code runs, its tables are those of the measured files, its files exist."""

import importlib
import json
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def test_the_first_snippet_runs():
    code = re.search(r"```python\n(.*?)```", README, re.S).group(1)
    names: dict = {}
    exec(code, names)
    assert not any("SBP" in type(m).__name__ for m in names["model"].modules())


def results(file: str) -> dict:
    return json.loads((ROOT / "benchmarks" / "results" / file).read_text())


@pytest.fixture
def benchmarks(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    for name in ("run", "memory"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return importlib.import_module("run"), importlib.import_module("memory")


def test_tables_are_the_measured_ones(benchmarks):
    run, memory = benchmarks
    page, rows = (ROOT / "docs" / "benchmarks.md").read_text(), results("h200.json")["rows"]
    assert run.markdown(run.headline(rows)) in README
    assert run.markdown(results("cpu.json")["rows"]) in README
    for mode in ("eager", "compiled", "graphs"):
        assert run.markdown([row for row in rows if row["mode"] == mode]) in page
    plans = results("memory.json")["rows"]
    assert memory.markdown(plans) in page
    assert memory.plans_markdown(plans) in page
    for text, shown in ((README, run.headline(rows)), (page, [*rows, *plans])):
        assert all(f"commit {row['commit']}" in text.lower() for row in shown)
    assert f"commit {results('cpu.json')['commit']}" in README


def test_predictions_were_within_a_tenth():
    peaks = [row for row in results("memory.json")["rows"] if "error of prediction" in row]
    assert len(peaks) > 30
    assert max(abs(row["error of prediction"]) for row in peaks) < 0.1


def test_links_and_targets_exist():
    for target in re.findall(r"\]\((?!http)([^)#]+)", README):
        assert (ROOT / target).exists(), target
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"^make (\w+)", README, re.M):
        assert f"\n{target}:" in makefile
    for name in re.findall(r"^  (\S+\.py) ", README, re.M):
        assert (ROOT / "src" / "torchsbp" / name).exists(), name
