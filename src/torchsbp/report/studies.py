"""What studies left in their folders, as sections of the page: figures and tables, each under the study's name."""

from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import NamedTuple


class Results(NamedTuple):
    """Of one study in one folder: its tables and its figures."""

    title: str
    text: str
    figures: list[Path]


def in_folder(folder: Path) -> list[Results]:
    """A study has a table beside its results; none: the folder is no study's."""
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
    """Tables of a Markdown text, and what stands between them."""
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
