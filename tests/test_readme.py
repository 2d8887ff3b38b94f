"""What the README says: its code runs, its tables are those of the measured files, its files exist."""

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


@pytest.mark.parametrize(
    "file, mode",
    [
        ("h200.json", "compiled"),
        ("cpu.json", "eager"),
        *(("h200_kernels.json", m) for m in ("eager", "compiled", "graphs")),
    ],
)
def test_tables_are_the_measured_ones(file, mode, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    monkeypatch.delitem(sys.modules, "run", raising=False)
    from run import markdown

    results = json.loads((ROOT / "benchmarks" / "results" / file).read_text())
    assert markdown(results["rows"], mode) in README
    commits = {row.get("commit", results["commit"]) for row in results["rows"] if row["mode"] == mode}
    assert all(f"commit {commit}" in README for commit in commits)


def test_links_and_targets_exist():
    for target in re.findall(r"\]\((?!http)([^)#]+)", README):
        assert (ROOT / target).exists(), target
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"^make (\w+)", README, re.M):
        assert f"\n{target}:" in makefile
    for name in re.findall(r"^  (\S+\.py) ", README, re.M):
        assert (ROOT / "src" / "torchsbp" / name).exists(), name
