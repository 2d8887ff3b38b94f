import gc
import multiprocessing
import os
from collections.abc import Iterator

import pytest
import torch

# Some virtual machines advertise AMX and then refuse its instructions: bf16 on CPU would end the process.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")

if not torch.cuda.is_available():  # Triton kernels are interpreted; to be said before they are imported
    os.environ.setdefault("TRITON_INTERPRET", "1")

# Processes of the start method "forkserver" are forked from one that has imported this.
multiprocessing.set_forkserver_preload(
    ["torchsbp.train.loop", "torchsbp.train.tasks.classification", "sklearn.datasets", "torch.distributed.fsdp"]
)


@pytest.fixture(scope="session", autouse=True)
def what_is_imported_is_no_garbage() -> Iterator[None]:
    """Hundreds of thousands of objects that every full collection would look at again."""
    gc.freeze()
    yield
    gc.unfreeze()
