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


def home(file: str) -> str:
    """The room of a file."""
    return Path(file).parts[0].removesuffix(".py")


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


@pytest.mark.parametrize("file", [file for file in FILES if home(file) == "ops"])
def test_no_types_are_ignored_in_ops(file):
    assert "type: ignore" not in (SOURCE / file).read_text()


@pytest.mark.parametrize("file", [file for file in FILES if home(file) in ALLOWED])
def test_imports_point_one_way(file):
    assert {room(name) for name in imports(file) if name.startswith("torchsbp.")} <= ALLOWED[home(file)]


def test_every_room_is_known():
    """A new one is a decision: say where it stands."""
    rooms = {home(file) for file in FILES} - set(ALLOWED)
    above = {"memory", "study", "train", "report", "cli", "integrations", "recipes", "__init__", "__main__", "_public"}
    assert rooms <= above


def test_import_needs_torch_alone():
    libraries = ("timm", "torchvision", "transformers", "lightning", "accelerate", "peft", "torchsbp.ops.kernels")
    code = f"import sys, torchsbp; print([m for m in {libraries} if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "[]"


def test_import_is_light_and_the_first_use_does_not_import_the_compiler():
    code = (
        "import sys, torchsbp; print('torch' in sys.modules)\n"
        "torchsbp.apply, torchsbp.estimate; print('torch' in sys.modules, 'torch._dynamo' in sys.modules)\n"
        "print(sorted(torchsbp.__all__) == sorted(name for name in dir(torchsbp) if name in torchsbp.__all__))\n"
        "print(torchsbp.adapters.Adapter.__name__, torchsbp.memory.plan.HEADROOM)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.split() == ["False", "True", "False", "True", "Adapter", "0.1"], done.stderr


def test_what_is_public_is_named_once():
    import torchsbp
    from torchsbp import _public

    assert torchsbp.__all__ == _public.__all__
    assert all(getattr(torchsbp, name) is getattr(_public, name) for name in torchsbp.__all__)
    with pytest.raises(AttributeError, match="module 'torchsbp' has no attribute 'nothing'"):
        torchsbp.nothing  # noqa: B018
