"""Kernels can be built for GPUs, also where there is none."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from torchsbp.ops.launch import WRITTEN

pytest.importorskip("triton")

LEAST_SHARED = 99 * 1024  # bytes that a program may take on the GPUs that have least: 8.6, 8.9 and 12.0


def test_all_kernels_can_be_built(tmp_path):
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-m", "tests.ops.built", "90"]
    done = subprocess.run(
        command, cwd=Path(__file__).parents[2], env=environment, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr[-4000:]
    shared = json.loads(done.stdout)
    assert shared.keys() == WRITTEN.keys()
    assert max(shared.values()) <= LEAST_SHARED, shared
