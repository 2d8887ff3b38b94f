"""The house in order: sizes of files and functions, directions of imports, a light import."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "torchsbp"
FILES = sorted(str(path.relative_to(SOURCE)) for path in SOURCE.rglob("*.py"))

LEAVES = {"ops", "sampling", "errors"}
ALLOWED = {
    "ops": {"ops", "errors"},
    "sampling": LEAVES,
    "adapters": LEAVES | {"adapters"},
    "config": LEAVES,
    "patching": LEAVES | {"adapters", "config", "patching"},
    "errors": set(),
}
"""Room -> the rooms that it imports. Those that are not here stand above and may import any of these."""


def tree(file: str) -> ast.Module:
    return ast.parse((SOURCE / file).read_text())


def imports(file: str) -> Iterator[str]:
    """The full names of modules, and of what is imported from them."""
    package = ["torchsbp", *Path(file).parent.parts]
    for node in ast.walk(tree(file)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        if isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            start = ".".join([*base, *([node.module] if node.module else [])])
            yield from (f"{start}.{alias.name}" for alias in node.names)


def room(name: str) -> str:
    """The room of a module of ours, by its full name."""
    first = name.split(".")[1]
    return first if (SOURCE / first).is_dir() or (SOURCE / f"{first}.py").exists() else "__init__"


@pytest.mark.parametrize("file", FILES)
def test_no_file_is_long(file):
    assert len((SOURCE / file).read_text().splitlines()) <= 350


@pytest.mark.parametrize("file", FILES)
def test_no_function_is_long_but_kernels(file):
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    for node in ast.walk(tree(file)):
        if isinstance(node, kinds) and not any("triton" in ast.unparse(its) for its in node.decorator_list):
            assert node.end_lineno - node.lineno < 60, node.name


@pytest.mark.parametrize("file", FILES)
def test_nothing_is_mocked(file):
    assert not any(name.startswith("unittest") for name in imports(file))


def test_ops_have_names_and_hardly_an_ignored_type():
    ignored = [file for file in FILES if file.startswith("ops") for line in lines(file) if "type: ignore" in line]
    assert len(ignored) <= 2


def lines(file: str) -> list[str]:
    return (SOURCE / file).read_text().splitlines()


@pytest.mark.parametrize(
    "file", [file for file in FILES if room(f"x.{Path(file).parts[0].removesuffix('.py')}") in ALLOWED]
)
def test_imports_point_one_way(file):
    allowed = ALLOWED[Path(file).parts[0].removesuffix(".py")]
    ours = {room(name) for name in imports(file) if name.startswith("torchsbp.")}
    assert ours <= allowed


def test_every_room_is_known():
    """A new one is a decision: say where it stands."""
    rooms = {Path(file).parts[0].removesuffix(".py") for file in FILES} - set(ALLOWED)
    above = {"memory", "study", "train", "report", "cli", "integrations", "recipes", "__init__", "__main__"}
    assert rooms <= above


def test_import_needs_torch_alone():
    libraries = ("timm", "torchvision", "transformers", "lightning", "accelerate", "peft", "triton")
    code = (
        f"import sys, torch; before = set(sys.modules); import torchsbp\n"
        f"print([m for m in {libraries} if m in set(sys.modules) - before])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "[]"
