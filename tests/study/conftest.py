import numpy as np
import pytest


@pytest.fixture(scope="package")
def data(tmp_path_factory):
    """Two classes, dark and light."""
    path, random = tmp_path_factory.mktemp("data") / "images.npz", np.random.default_rng(0)
    arrays = {}
    for part, n in (("train", 64), ("test", 32)):
        y = random.integers(0, 2, n)
        x = random.integers(0, 100, (n, 32, 32, 3)) + 130 * y[:, None, None, None]
        arrays |= {f"x_{part}": x.astype(np.uint8), f"y_{part}": y}
    np.savez(path, **arrays)
    return path


@pytest.fixture(scope="package")
def clips(tmp_path_factory):
    """Two classes of clips of 4 frames, dark and light."""
    path, random = tmp_path_factory.mktemp("data") / "clips.npz", np.random.default_rng(0)
    arrays = {}
    for part in ("train", "test"):
        y = random.integers(0, 2, 16)
        x = random.integers(0, 100, (16, 1, 32, 32, 3)) + 130 * y[:, None, None, None, None]
        arrays |= {f"x_{part}": np.repeat(x, 4, 1).astype(np.uint8), f"y_{part}": y}
    np.savez(path, **arrays)
    return path
