"""What the README says: its code runs, its tables are those of the measured files, its files exist."""

import importlib
import json
import re
import sys
from pathlib import Path

import pytest

from torchsbp.study import results as study

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def test_the_first_snippet_runs():
    code = re.search(r"```python\n(.*?)```", README, re.S).group(1)
    names: dict = {}
    exec(code, names)
    assert not any("SBP" in type(m).__name__ for m in names["model"].modules())


def flat(page: str) -> str:
    """In one line: where prose is wrapped makes no difference."""
    return " ".join(page.lower().split())


def results(file: str) -> dict:
    return json.loads((ROOT / "benchmarks" / "results" / file).read_text())


@pytest.fixture
def benchmarks(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    names = ("run", "memory", "limits", "frames", "detection")
    for name in names:
        monkeypatch.delitem(sys.modules, name, raising=False)
    return map(importlib.import_module, names)


def test_tables_are_the_measured_ones(benchmarks):
    run, memory, limits, frames, detection = benchmarks
    page, rows = (ROOT / "docs" / "benchmarks.md").read_text(), results("h200.json")["rows"]
    assert run.front(rows, study.read(ROOT / "benchmarks" / "results" / "study" / "cifar10")) in README
    for mode in ("eager", "compiled", "graphs"):
        assert run.markdown([row for row in rows if row["mode"] == mode]) in page
    planned, plans = (ROOT / "docs" / "memory.md").read_text(), results("memory.json")["rows"]
    assert memory.markdown(plans) in planned
    assert memory.plans_markdown(plans) in planned
    assert run.markdown(results("cpu.json")["rows"]) in page
    assert limits.markdown(results("limits.json")["rows"]) in page
    assert all(f"commit {row['commit']}" in flat(planned) for row in plans)
    without_gpu = results("memory_null.json")
    assert memory.markdown(without_gpu["rows"]) in planned
    assert f"commit {without_gpu['commit']}" in flat(planned)
    chosen = [row for row in results("compiled_null.json")["rows"] if row["method"] == "norm rows r=0.5"]
    assert [row["model"] for row in chosen] == ["vit_base", "convnext_tiny", "swin_tiny"]
    assert all(f"{row['memory']:.3f}×" in page for row in chosen)
    for file in ("detection.json", "detection_2.json", "detection_8.json", "detection_8_cascade.json"):
        assert detection.markdown(results(file)["rows"]) in page
        assert f"commit {results(file)['commit']}" in flat(page)
    assert frames.markdown(results("frames.json")["rows"]) in page
    compiled = [row for row in results("frames_compiled.json")["rows"] if row["mode"] == "compiled"]
    assert frames.markdown(compiled) in page
    assert frames.markdown(results("frames_graphs.json")["rows"]) in page
    for name in (
        "cpu",
        "limits",
        "growth",
        "growth_frames",
        "frames",
        "frames_compiled",
        "frames_graphs",
    ):
        assert f"commit {results(f'{name}.json')['commit']}" in flat(page)


def test_predictions_were_within_a_tenth():
    peaks = [row for row in results("memory.json")["rows"] if "error of prediction" in row]
    assert len(peaks) > 30
    assert max(abs(row["error of prediction"]) for row in peaks) < 0.1


def test_accuracies_are_the_measured_ones():
    """Of CIFAR-10: as the runs' metrics say, in docs/reproduction.md."""
    page = (ROOT / "docs" / "reproduction.md").read_text()
    for method in ("full", "sbp"):
        runs = sorted((ROOT / "benchmarks" / "results" / "cifar10").glob(f"cifar10_{method}_*/metrics.jsonl"))
        events = [[json.loads(line) for line in run.read_text().splitlines()] for run in runs]
        last = [[event for event in run if event["kind"] == "valid"][-1]["top1"] for run in events]
        assert len(last) == 3
        assert ", ".join(f"{top1:.2f}" for top1 in last) in page
        assert f"{sum(last) / 3:.2f} ±" in page


def test_links_and_targets_exist():
    for target in re.findall(r"\]\((?!http)([^)#]+)", README):
        assert (ROOT / target).exists(), target
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"^make (\w+)", README, re.M):
        assert f"\n{target}:" in makefile


def test_the_map_names_files_that_exist():
    """docs/architecture.md: rooms at two spaces, their files at four."""
    page, found = (ROOT / "docs" / "architecture.md").read_text(), []
    (start,), where = re.findall(r"^src/torchsbp/$", page, re.M), ""
    for line in page[page.index(start) :].splitlines()[1:]:
        if line.startswith("```"):
            break
        room = re.match(r"  (\w+)/ ", line)
        if room or not line.startswith("    "):
            where = room.group(1) if room else ""
        found += [ROOT / "src" / "torchsbp" / where / name for name in re.findall(r"\w+\.py", line)]
    assert len(found) > 30
    assert all(path.exists() for path in found), [path for path in found if not path.exists()]
