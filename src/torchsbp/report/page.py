"""One HTML page from runs: a table, charts, what the runs' tasks add, settings."""

import json
from base64 import b64encode
from collections.abc import Sequence
from html import escape
from pathlib import Path

from .charts import COLOURS, charts, mark, numbers_of, style
from .runs import Run
from .studies import Results
from .studies import sections as study_sections
from .tables import rows

COLOUR_STYLE = """
:root { color-scheme: light dark; --page: #f7f7f5; --card: #fff; --ink: #1c1d1f; --soft: #6a6e74; --rule: #e3e4e1;
  --c0: #0072b2; --c1: #d55e00; --c2: #009e73; --c3: #cc79a7; --c4: #b58900; --c5: #4b9fd5; --c6: #7a5195; --c7: #555; }
@media (prefers-color-scheme: dark) { :root { --page: #15171a; --card: #1e2125; --ink: #e8e9ea; --soft: #9aa0a8;
  --rule: #33373d; --c0: #56b4e9; --c1: #ff9d5c; --c2: #3fd0a4; --c3: #e8a5cb; --c4: #f0c94a; --c5: #8fc7ee;
  --c6: #b697d6; --c7: #bbb; } }
"""
CHART_STYLE = """
.grid { stroke: var(--rule); } .axis { stroke: var(--soft); }
.tick { fill: var(--soft); font-size: 12px; } .name { fill: var(--ink); font-size: 13px; }
.line { fill: none; stroke: var(--c); stroke-width: 1.8; stroke-linejoin: round; } .dot, .bar { fill: var(--c); }
.d1 { stroke-dasharray: 7 3; } .d2 { stroke-dasharray: 2 3; } .d3 { stroke-dasharray: 9 3 2 3; }
""" + "".join(f".c{i} {{ --c: var(--c{i}); }}\n" for i in range(COLOURS))
STYLE = (
    COLOUR_STYLE
    + CHART_STYLE
    + """
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 2.5rem 1.5rem; max-width: 1180px; background: var(--page); color: var(--ink);
  font: 16px/1.5 system-ui, "Segoe UI", Roboto, "Helvetica Neue", sans-serif; }
h1 { font-size: 1.6rem; margin: 0 0 .2rem; } h2 { font-size: 1.1rem; margin: 2rem 0 .6rem; }
p { color: var(--soft); margin: 0 0 1.5rem; }
.scroll { overflow-x: auto; background: var(--card); border: 1px solid var(--rule); border-radius: 10px; }
table { border-collapse: collapse; width: 100%; font-size: .92rem; font-variant-numeric: tabular-nums; }
th, td { padding: .55rem .7rem; text-align: right; white-space: nowrap; border-bottom: 1px solid var(--rule); }
th:first-child, td:first-child, th:last-child, td:last-child { text-align: left; }
th { color: var(--soft); font-weight: 600; } tr:last-child td { border-bottom: 0; } tr.mean { font-weight: 600; }
svg.key { display: inline-block; width: 2.2em; height: .8em; margin-right: .55em; }
.grid-of { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(440px, 100%), 1fr)); gap: 1rem;
  margin-top: 1rem; }
figure { margin: 0; padding: 1rem 1rem .6rem; background: var(--card); border: 1px solid var(--rule);
  border-radius: 10px; }
figcaption { font-weight: 600; margin-bottom: .4rem; } figcaption small { color: var(--soft); font-weight: 400; }
svg, img { display: block; width: 100%; height: auto; }
details { margin-top: 1rem; } summary { cursor: pointer; }
pre { overflow-x: auto; padding: 1rem; background: var(--card);
  border: 1px solid var(--rule); border-radius: 10px; font-size: .82rem; }
"""
)


def html(runs: Sequence[Run], title: str, studies: Sequence[Results] = ()) -> str:
    """The page of runs and studies."""
    where = sorted({about(run) for run in runs} - {""})
    parts = [f"<p>{escape('; '.join(where))}</p>"]
    if runs:
        parts += [f'<div class="scroll">{table(runs)}</div><div class="grid-of">{charts(runs)}</div>', sections(runs)]
    parts.append(study_sections(studies))
    if runs:
        parts += ["<h2>Settings</h2>", settings(runs)]
    return document(title, STYLE, "".join(parts))


def document(title: str, style: str, body: str) -> str:
    """A page that needs no other file."""
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1"><link rel="icon" href="data:,">'
        f"<style>{style}</style></head><body><h1>{escape(title)}</h1>{body}</body></html>\n"
    )


def about(run: Run) -> str:
    environment = run.about.get("environment", {})
    parts = [environment.get("device", ""), f"torch {environment['torch']}" if "torch" in environment else ""]
    if environment.get("processes", 1) > 1:
        parts.insert(1, f"{environment['processes']} processes")
    return ", ".join(part for part in parts if part)


def table(runs: Sequence[Run]) -> str:
    header, *body = rows(runs)
    numbers = numbers_of(runs)
    head = "".join(f"<th>{escape(cell)}</th>" for cell in header)
    lines = []
    for i, row in enumerate(body):
        key = drawn_key(numbers[id(runs[i])]) if i < len(runs) else ""
        cells = "".join(f"<td>{key if j == 0 else ''}{escape(cell)}</td>" for j, cell in enumerate(row))
        lines.append(f"<tr>{cells}</tr>" if key else f'<tr class="mean">{cells}</tr>')
    return f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(lines)}</tbody></table>"


def drawn_key(number: int) -> str:
    """The line and the mark with which a run is drawn, to be shown beside its name."""
    return (
        '<svg class="key" viewBox="0 0 33 12" aria-hidden="true">'
        f'<line class="line {style(number)}" x1="0" x2="33" y1="6" y2="6"/>{mark(number, 16, 6, "")}</svg>'
    )


def sections(runs: Sequence[Run]) -> str:
    """What the runs' tasks add, run by run."""
    parts = []
    for run in runs:
        figures = [
            f"<figure><figcaption>{escape(title)}</figcaption>{content(path, title)}</figure>"
            for title, path in run.sections()
        ]
        if figures:
            parts.append(f'<h2>{escape(run.name)}</h2><div class="grid-of">{"".join(figures)}</div>')
    return "".join(parts)


def content(path: Path, title: str) -> str:
    if path.suffix == ".png":
        return f'<img alt="{escape(title)}" src="data:image/png;base64,{b64encode(path.read_bytes()).decode()}">'
    return path.read_text(encoding="utf-8")


def settings(runs: Sequence[Run]) -> str:
    """The last settings of every run, and at which steps they were changed."""
    parts = []
    for run in runs:
        changes = "".join(
            f"<p>Resumed at step {step}{f', {escape(when)}' if when else ''}: {escape(', '.join(what))}</p>"
            for step, when, what in run.changes
        )
        shown = escape(json.dumps(run.about, indent=1))
        parts.append(f"<details><summary>{escape(run.name)}</summary>{changes}<pre>{shown}</pre></details>")
    return "".join(parts)
