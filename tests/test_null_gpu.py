"""CUDA's code where there is no GPU: steps run on one that computes nothing (``benchmarks/null_gpu.py``)."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from benchmarks.null_gpu import missing

from torchsbp.ops.launch import WRITTEN

pytestmark = pytest.mark.skipif(bool(missing()), reason=f"needs {missing()}")
ROOT = Path(__file__).parents[1]
MIB = 2**20
LEAST_SHARED = 99 * 1024  # bytes that a program may take on the GPUs that have least: 8.6, 8.9 and 12.0
WHEN_COMPILED = {"take"}  # kernels of compiled steps alone
Rows = dict[tuple[str, str], dict[str, Any]]


def on_null_gpu(tmp_path: Path, *command: str) -> str:
    caches = {"TRITON_CACHE_DIR": str(tmp_path / "triton"), "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor")}
    more = {"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1", "TRITON_INTERPRET": "0"}
    done = subprocess.run(
        [sys.executable, "benchmarks/null_gpu.py", sys.executable, *command],
        cwd=ROOT, env=os.environ | caches | more, capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def steps(tmp_path: Path, mode: str) -> tuple[Rows, dict[str, int]]:
    """What ``null_steps.py`` found: by model and configuration, and by kernel."""
    *found, shared = map(json.loads, on_null_gpu(tmp_path, "-m", "tests.null_steps", mode).splitlines())
    return {(row["model"], row["config"]): row for row in found}, shared


def test_eager_steps_need_the_predicted_memory_and_launch_less_than_plain_ones(tmp_path):
    found, shared = steps(tmp_path, "eager")
    for (model, config), row in found.items():
        case = f"{model}, {config}: {row}"
        # What cuBLAS keeps for good depends on PyTorch's version: 33 MiB in 2.11, nothing in 2.15.
        assert abs(row["predicted"] - row["peak"]) <= 0.02 * row["peak"] + 72 * MIB, case
        if config != "full":
            assert row["kernels"] + row["graphs"] < found[model, "full"]["kernels"], case
    assert all(found["small vit", config]["graphs"] >= 6 for config in ("exact", "half", "chosen"))  # both ways
    assert shared.keys() == WRITTEN.keys() - WHEN_COMPILED
    assert max(shared.values()) <= LEAST_SHARED, shared


def test_compiled_steps_run(tmp_path):
    """Kernels are built, nothing is compiled again, and small passes are replayed from graphs."""
    found, shared = steps(tmp_path, "compiled")
    assert found["small vit", "half"]["graphs"] >= 6
    assert all(row["peak"] <= 1.02 * row["predicted"] + 72 * MIB for row in found.values()), found
    assert shared.keys() >= WHEN_COMPILED


def test_it_says_what_it_is(tmp_path):
    told = "import torch; print(torch.cuda.get_device_name(), torch.cuda.get_device_capability())"
    assert on_null_gpu(tmp_path, "-c", told) == "no GPU: nothing is computed (9, 0)\n"
