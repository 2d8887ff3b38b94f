"""What is built of the package: a wheel for any Python 3, a source distribution with its tests, one version."""

import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
import yaml

import torchsbp

ROOT = Path(__file__).parents[1]
BUILD = "import sys; from setuptools import build_meta; print(getattr(build_meta, sys.argv[1])(sys.argv[2]))"
FOLDERS = ("src", "tests", "benchmarks", "docs", "examples", ".ci", ".github")
LEFT = shutil.ignore_patterns("__pycache__", "*.egg-info")


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> dict[str, Path]:
    """A wheel and a source distribution, of a copy of the tree."""
    source, out = tmp_path_factory.mktemp("source") / "torchsbp", tmp_path_factory.mktemp("out")
    for folder in FOLDERS:
        shutil.copytree(ROOT / folder, source / folder, ignore=LEFT)
    for file in ROOT.iterdir():
        if file.is_file() and file.name != ".git":
            shutil.copy(file, source)
    found = {}
    for kind in ("wheel", "sdist"):
        command = [sys.executable, "-c", BUILD, f"build_{kind}", str(out)]
        done = subprocess.run(command, cwd=source, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        found[kind] = out / done.stdout.splitlines()[-1]
    return found


def test_the_wheel_is_for_any_python_3_and_holds_what_it_needs(built):
    assert built["wheel"].name == f"torchsbp-{torchsbp.__version__}-py3-none-any.whl"
    names = zipfile.ZipFile(built["wheel"]).namelist()
    package = {path.relative_to(ROOT / "src").as_posix() for path in (ROOT / "src" / "torchsbp").rglob("*.py")}
    assert package <= set(names)
    recipes = [path.relative_to(ROOT / "src").as_posix() for path in (ROOT / "src").rglob("*.yaml")]
    assert len(recipes) > 10
    assert {*recipes, "torchsbp/py.typed"} <= set(names)
    assert not [name for name in names if not name.startswith(("torchsbp/", "torchsbp-"))]


def test_the_source_distribution_has_what_its_tests_read(built):
    root = f"torchsbp-{torchsbp.__version__}/"
    assert built["sdist"].name == f"torchsbp-{torchsbp.__version__}.tar.gz"
    with tarfile.open(built["sdist"]) as archive:
        names = {name.removeprefix(root) for name in archive.getnames()}
    files = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*") if path.is_file()]
    wanted = {path.relative_to(ROOT).as_posix() for path in files if not re.search(r"__pycache__|egg-info", str(path))}
    assert wanted | {"Makefile", "README.md", "CITATION.cff", "CHANGELOG.md", "pyproject.toml"} <= names


def test_the_oldest_versions_of_ci_are_those_that_are_allowed():
    allowed = dict(re.findall(r'"([a-z-]+)(?:\[\w+\])?>=([\d.]+)"', (ROOT / "pyproject.toml").read_text()))
    pinned = dict(re.findall(r"^([a-z-]+)==([\d.]+?)(?:\.\*)?$", (ROOT / ".ci" / "oldest.txt").read_text(), re.M))
    own = ("wandb", "pytest", "pytest-xdist", "ruff", "mypy", "setuptools")  # of development, or not installed for it
    assert pinned == {name: version for name, version in allowed.items() if name not in own}


def test_the_workflow_runs_what_ci_runs():
    (job,) = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())["jobs"].values()
    assert [step["run"] for step in job["steps"] if "run" in step] == [".ci/run"]
    versions = {its["versions"]: its for its in job["strategy"]["matrix"]["include"]}
    assert (ROOT / versions["oldest"]["constraint"]).is_file()
    required = re.search(r'requires-python = ">=([\d.]+)"', (ROOT / "pyproject.toml").read_text())
    assert versions["oldest"]["python"] == required[1]


def test_the_citation_names_both_papers():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    papers = [paper["url"] for paper in citation["references"]]
    assert all(url in (ROOT / "README.md").read_text() for url in papers)
    assert len(papers) == 2
