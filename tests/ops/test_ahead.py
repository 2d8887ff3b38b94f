"""Kernels are built on another thread, each once, with what launches them."""

import threading

import pytest

from torchsbp.ops import ahead
from torchsbp.ops.ahead import build_ahead, wait_for_builds


class Function:
    """Stands in for a JITFunction, and for what its warmup gives."""

    def __init__(self, fails=False):
        self.fails, self.built, self.loaded = fails, [], []

    def warmup(self, *arguments, grid, **options):
        self.built.append((arguments, grid, options))
        return self

    @property
    def run(self):
        if self.fails:
            raise RuntimeError("no C compiler")
        self.loaded.append(threading.current_thread())


@pytest.fixture(autouse=True)
def no_builds(monkeypatch):
    monkeypatch.setattr(ahead, "_BUILDS", {})


def test_a_kind_is_built_once_on_another_thread():
    function = Function()
    for kind in ("a", "a", "b"):
        build_ahead(kind, function, -1, [kind, 3], {"num_warps": 2})
    wait_for_builds()
    assert function.built == [((kind, 3), (1,), {"num_warps": 2}) for kind in ("a", "b")]
    assert len(function.loaded) == 2
    assert threading.current_thread() not in function.loaded


def test_what_fails_is_left_to_its_launch():
    function = Function(fails=True)
    build_ahead("a", function, -1, [], {})
    wait_for_builds()
    assert len(function.built) == 1
