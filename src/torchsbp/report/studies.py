"""The results of studies as sections of the page: the figures and tables in their folders, under the study's name."""

from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import NamedTuple


class Results(NamedTuple):
    """The tables and figures of one study in one folder."""

    title: str
    text: str
    figures: list[Path]


def in_folder(folder: Path) -> list[Results]:
    """The studies in a folder: those with a table (.md) beside their results (.jsonl). A run's folder has none."""
    found = []
    for table in sorted(folder.glob("*.md")):
        if table.with_suffix(".jsonl").exists():
            figures = sorted([*folder.glob(f"{table.stem}.svg"), *folder.glob(f"{table.stem}_*.svg")])
            title = f"{folder.resolve().name}: {table.stem}"
            found.append(Results(title, table.read_text(encoding="utf-8"), figures))
    return found


def sections(studies: Sequence[Results]) -> str:
    return "".join(f"<h2>{escape(its.title)}</h2>{pictures(its.figures)}{tables(its.text)}" for its in studies)


def pictures(files: Sequence[Path]) -> str:
    return "".join(f'<div class="scroll">{file.read_text(encoding="utf-8")}</div>' for file in files)


def tables(markdown: str) -> str:
    """A Markdown text as HTML: its tables, and what stands between them as paragraphs."""
    parts = []
    for block in markdown.strip().split("\n\n"):
        lines = block.splitlines()
        if not block.startswith("|"):
            parts.append(f"<p>{escape(block)}</p>")
            continue
        head, _, *body = ([escape(cell.strip()) for cell in line.strip("|").split("|")] for line in lines)
        header = "".join(f"<th>{cell}</th>" for cell in head)
        rows = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>" for cells in body)
        parts.append(f'<div class="scroll"><table><thead><tr>{header}</tr></thead><tbody>{rows}</tbody></table></div>')
    return "".join(parts)
