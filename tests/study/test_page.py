"""docs/study has what the recorded results say: every table and every figure."""

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
    [*((".", name) for name in NAMES), ("chosen", "gradients"), ("video", "similarity"), ("cifar10", "contest")],
)
def test_tables_and_figures_are_those_of_the_results(folder, name):
    rows = results.read(RECORDED / folder)
    assert tables(name, rows).strip() in (PAGE / "README.md").read_text()
    for file, drawn in figures(name, rows).items():
        recorded = PAGE / (file if folder == "." else file.replace(".svg", f"_{folder}.svg"))
        assert recorded.read_text() == drawn
        assert f"({recorded.name})" in (PAGE / "README.md").read_text()
