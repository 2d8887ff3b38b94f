"""``torchsbp report RUN…``."""

import argparse
from pathlib import Path

from ..report import html, markdown, read_all, rows

PURPOSE = "tables, curves and a page from runs"


def run(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="torchsbp report", description="Compare runs: a table and an HTML page.")
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="a run's folder")
    parser.add_argument("--html", type=Path, default=Path("report.html"), help="the page (default: %(default)s)")
    parser.add_argument("--title", default="Training runs")
    options = parser.parse_args(argv)
    runs = read_all(options.runs)
    options.html.parent.mkdir(parents=True, exist_ok=True)
    options.html.write_text(html(runs, options.title), encoding="utf-8")
    print(markdown(rows(runs)))
    print(f"\npage: {options.html}")
