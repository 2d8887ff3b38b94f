"""``torchsbp report RUN…``: tables and a page of runs, and of the results that studies left in their folders."""

import argparse
from pathlib import Path

from ..report import html, markdown, read_all, rows
from ..report.studies import in_folder

PURPOSE = "tables, curves and a page from runs"


def run(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="torchsbp report", description="Compare runs: a table and an HTML page.")
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="a run's folder, or a study's")
    parser.add_argument("--html", type=Path, default=Path("report.html"), help="the page (default: %(default)s)")
    parser.add_argument("--title", default="Training runs")
    options = parser.parse_args(argv)
    studies = {path: in_folder(path) for path in options.runs}
    runs = read_all([path for path, found in studies.items() if not found])
    options.html.parent.mkdir(parents=True, exist_ok=True)
    options.html.write_text(
        html(runs, options.title, [its for found in studies.values() for its in found]), encoding="utf-8"
    )
    tables = [markdown(rows(runs))] if runs else []
    tables += [f"{its.title}\n\n{its.text}" for found in studies.values() for its in found]
    print("\n\n".join(tables))
    print(f"\npage: {options.html}")
