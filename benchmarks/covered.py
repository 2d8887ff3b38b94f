"""The results of catalogue.py as a table, at its marked place in docs/adapters.md."""

import json
import re
from collections import Counter
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from torchsbp.patching.check import ROUNDING

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "catalogue.jsonl"
PAGE = ROOT / "docs" / "adapters.md"
PLACE = re.compile(r"<!-- coverage.*<!-- /coverage -->", re.S)
OTHER = "other"
FAMILIES = {  # a name belongs to the first that it matches
    "dinov": "*dinov*",
    "vit": "vit_*",
    "deit": "deit*",
    "eva": "eva*",
    "beit": "beit*",
    "convnext": "convnext*",
    "swin": "swin*",
    "coatnet": "coatne*",
    "maxvit": "max*vit*",
    "mixer": "*mixer*,*mlp*",
    OTHER: "*",
}
Row = dict[str, Any]


def matches(name: str, patterns: str) -> bool:
    """Whether a name, with or without its library, fits one of the patterns."""
    return any(fnmatch(text, pattern) for text in (name, short(name)) for pattern in patterns.split(","))


def short(name: str) -> str:
    return name.rpartition("/")[2]


def read(path: Path) -> tuple[list[Row], dict[str, Row]]:
    """(environments, rows): the last row of every name in a file, and the environments in which these were made."""
    made: dict[str, tuple[int, Row]] = {}
    environments: list[Row] = []
    for line in path.read_text().splitlines() if path.exists() else ():
        row = json.loads(line)
        if "name" in row:
            made[row["name"]] = len(environments) - 1, row
        else:
            environments.append(row)
    used = sorted({index for index, _ in made.values()})
    return [environments[index] for index in used], {name: row for name, (_, row) in made.items()}


def append(path: Path, row: Row) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write(json.dumps(row, separators=(",", ":"), ensure_ascii=False) + "\n")


def write_page() -> None:
    PAGE.write_text(PLACE.sub(lambda _: section(), PAGE.read_text()))


def section() -> str:
    """The text of the marked place of the page, marks included."""
    return f"<!-- coverage: made by benchmarks/catalogue.py -->\n{markdown(*read(RESULTS))}\n<!-- /coverage -->"


def markdown(environments: list[Row], rows: dict[str, Row]) -> str:
    """The table by family, when and with which versions it was made, and what is not covered."""
    groups = by_family(rows)
    named = {title: its for title, its in groups.items() if not title.endswith(OTHER)}
    others = [row for title, its in groups.items() if title.endswith(OTHER) for row in its]
    classes = Counter(row["why"].rpartition(".")[2] for row in others if row.get("why", "").startswith("no adapter"))
    return "\n".join(
        [
            "| family | names | patched | forward equal | bit for bit | oracle passed | not run | refused |",
            "|---|---:|---:|---:|---:|---:|---:|---:|",
            *(f"| {title} | {cells(its)} |" for title, its in groups.items()),
            f"| all | {cells(list(rows.values()))} |",
            "",
            f"{len(rows)} of {environments[-1]['names']} names, by `python benchmarks/catalogue.py`:",
            *(f"{made_with(its)}." for its in environments),
            "",
            "Not covered in the named families:",
            "",
            *(missing(named) or ["- nothing"]),
            "",
            f"Model classes without an adapter among the others: {tally(classes)}.",
        ]
    )


def by_family(rows: dict[str, Row]) -> dict[str, list[Row]]:
    found: dict[str, list[Row]] = {}
    for library in ("timm", "torchvision"):
        left = {name: row for name, row in sorted(rows.items()) if name.startswith(f"{library}/")}
        for family, patterns in FAMILIES.items():
            its = [left.pop(name) for name in list(left) if matches(short(name), patterns)]
            if its:
                found[f"{library} {family}"] = its
    return found


def cells(rows: list[Row]) -> str:
    forward = [row["forward"] for row in rows if "forward" in row]
    results = Counter(row["result"] for row in rows)
    patched = results["passed"] + results["failed"] + results["not run"]
    equal = sum(error <= ROUNDING for error in forward)
    numbers = [len(rows), patched, equal, forward.count(0), *(results[r] for r in ("passed", "not run", "refused"))]
    return " | ".join(str(number) for number in numbers)


def made_with(environment: Row) -> str:
    versions = [f"{key} {value}" for key, value in environment.items() if key not in ("date", "names")]
    return ", ".join([environment["date"], *versions])


def missing(groups: dict[str, list[Row]]) -> list[str]:
    """A line for each reason, with the names that it applies to."""
    names: dict[str, list[str]] = {}
    for row in (row for its in groups.values() for row in its if row["result"] != "passed"):
        names.setdefault(f"{row['result']}: {row['why']}", []).append(short(row["name"]))
    return [f"- {reason} – {listed(its)}" for reason, its in sorted(names.items())]


def listed(names: list[str], most: int = 6) -> str:
    more = f", … ({len(names)} names)" if len(names) > most else ""
    return ", ".join(f"`{name}`" for name in names[:most]) + more


def tally(counts: Counter[str]) -> str:
    return ", ".join(f"{name} ({n})" for name, n in counts.most_common()) or "none"
