"""benchmarks/cuda_tests.py, on tests that need no GPU."""

import importlib
import json
import sys
from pathlib import Path

import pytest

FILE = """
import pytest

@pytest.mark.parametrize("n", [1, 2])
def test_compiled(n):
    assert n == 1

def test_skipped():
    pytest.skip()

@pytest.mark.slow
def test_other():
    pass
"""


@pytest.fixture
def cuda_tests(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "benchmarks"))
    monkeypatch.delitem(sys.modules, "cuda_tests", raising=False)
    return importlib.import_module("cuda_tests")


def test_outcomes_are_told_and_recorded(cuda_tests, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("pytest.ini").write_text("[pytest]\nmarkers = slow\n")
    Path("test_few.py").write_text(FILE)
    assert cuda_tests.collected(["test_few.py"], "not slow")[0] == "test_few.py::test_compiled[1]"
    cuda_tests.main(["test_few.py", "--marked", "not slow", "--jobs", "2", "--device", "cpu", "--out", "o.json"])
    found = json.loads(Path("o.json").read_text())
    assert found["counts"] == {"passed": 1, "failed": 1, "error": 0, "skipped": 1, "xfail": 0, "not done": 0}
    assert found["others"] == {"test_few.py::test_compiled[2]": "FAILED"}
    assert 0 < found["seconds"] < 600
    said = capsys.readouterr().out
    assert "assert 2 == 1" in said
    assert "1 passed, 1 failed, 1 skipped" in said


def test_what_takes_too_long_is_told(cuda_tests, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("test_one.py").write_text("import time\n\ndef test_long():\n    time.sleep(600)\n")
    assert cuda_tests.run(["test_one.py::test_long"], 2, 0) == ({"test_one.py::test_long": "NOT DONE"}, "")
