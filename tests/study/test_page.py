"""docs/study has what the recorded results say: every table, every figure and every marked number."""

import importlib
import re
import shlex
from pathlib import Path

import pytest

from torchsbp.cli.study import arguments
from torchsbp.study.arms import ARMS

ROOT = Path(__file__).parents[2]
PAGES = ROOT / "docs" / "study"
RECORDED = ROOT / "benchmarks" / "results" / "study"
NAMES = sorted(path.name for path in PAGES.glob("*.md"))
COMMENT = re.compile(r"<!--.*?-->", re.S)


@pytest.fixture
def study_page(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("study_page")


def anchors(path: Path) -> set[str]:
    """As GitHub makes them of headings."""
    headings = re.findall(r"^#+ (.*)$", path.read_text(), re.M)
    return {re.sub(r"[^\w\- ]", "", its.lower()).replace(" ", "-") for its in headings}


def test_pages_and_figures_are_what_the_command_makes(study_page):
    assert not [str(path.relative_to(ROOT)) for path in study_page.changed()]


def test_figures_are_those_that_are_drawn_and_all_are_shown(study_page):
    drawn = {path.name for path in study_page.drawings()}
    assert {path.name for path in PAGES.glob("*.svg")} == drawn
    shown = {its for name in NAMES for its in re.findall(r"!\[[^\]]+\]\(([\w.]+)\)", (PAGES / name).read_text())}
    assert shown == drawn


def test_what_is_recorded_is_shown():
    marks = {
        tuple(its.split()[1:]) for name in NAMES for its in re.findall(r"made: (.+?) -->", (PAGES / name).read_text())
    }
    for path in RECORDED.rglob("*.jsonl"):
        folder = path.parent.name if path.parent != RECORDED else "early"
        assert (folder, path.stem) in marks or (folder,) in marks, path


def test_the_index_is_short_and_names_every_page():
    index = COMMENT.sub("", (PAGES / "README.md").read_text())
    assert len(index.split()) <= 900
    assert [name for name in NAMES if name != "README.md" and f"({name})" not in index] == []


@pytest.mark.parametrize("page", ["README.md", *sorted(f"docs/{its}" for its in (
    *(path.name for path in (ROOT / "docs").glob("*.md")), *(f"study/{name}" for name in NAMES)
))])  # fmt: skip
def test_links_to_and_from_the_study_lead_somewhere(page):
    path = ROOT / page
    for target, anchor in re.findall(r"\]\((?!http)([^)#\s]*)(?:#([^)\s]+))?\)", path.read_text()):
        file = (path.parent / target).resolve() if target else path
        if "study" in (file.parent.name, path.parent.name):
            assert file.exists(), target
            assert not anchor or anchor in anchors(file), f"{target}#{anchor}"


def test_an_unknown_number_is_refused(study_page):
    with pytest.raises(KeyError):
        study_page.PLACE.sub(study_page.made, "<!-- made: guess 1 -->0.3<!-- /made -->")
    text = "<!-- made: epochs hybrid, own rows 0.5, 24 -->better<!-- /made -->"
    assert study_page.PLACE.sub(study_page.made, text) == text.replace("better", "−0.29 ± 0.38 (5)")


@pytest.mark.parametrize("name", NAMES)
def test_commands_name_arms_calls_and_options_that_exist(name):
    text = "\n".join(re.findall(r"```sh\n(.*?)```", (PAGES / name).read_text(), re.S)).replace("\\\n", "")
    for given in re.findall(r'(?:ARMS=|TIMED=|--arms\s+)"([^"]*)"', text):
        assert [arm for arm in given.split(";") if arm.strip() not in ARMS] == []
    script = (ROOT / "benchmarks" / "contest.sh").read_text()
    for calls in re.findall(r'contest\.sh ("[^"]+"|\w+) ', text):
        assert [call for call in calls.strip('"').split() if f"    {call})" not in script] == []
    for options in re.findall(r"torchsbp study (\w+[^\n#]*)", text):
        arguments(shlex.split(re.sub(r"\$[ST]", "--data cifar10.npz --out OUT --size small --eager", options)))
