"""docs/study has what the recorded results say: every table and every figure."""

import importlib
from pathlib import Path

import pytest

from torchsbp.cli.study import figures, tables
from torchsbp.study import results

ROOT = Path(__file__).parents[2]
RECORDED = ROOT / "benchmarks" / "results" / "study"
PAGE = ROOT / "docs" / "study"
NAMES = sorted(path.stem for path in RECORDED.glob("*.jsonl"))


@pytest.mark.parametrize(
    "folder, name",
    [
        *((".", name) for name in NAMES),
        *(("chosen", "gradients"), ("video", "similarity"), ("grids", "accuracy")),
        *(("cifar10", "contest"), ("cifar10", "speed")),
    ],
)
def test_tables_and_figures_are_those_of_the_results(folder, name):
    rows = results.read(RECORDED / folder)
    assert tables(name, rows).strip() in (PAGE / "README.md").read_text()
    for file, drawn in figures(name, rows).items():
        recorded = PAGE / (file if folder == "." else file.replace(".svg", f"_{folder}.svg"))
        assert recorded.read_text() == drawn
        assert f"({recorded.name})" in (PAGE / "README.md").read_text()


def test_the_contest_with_the_steps_of_large_models(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    commandline, equal_time = (importlib.import_module(name) for name in ("commandline", "equal_time"))
    rows = commandline.read(ROOT / "benchmarks" / "results" / "h200.json")
    assert equal_time.table(results.read(RECORDED / "cifar10"), rows) in (PAGE / "README.md").read_text()
