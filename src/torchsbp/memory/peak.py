"""peak: the memory that training needs on a GPU, as its allocator tells."""

import torch

NO_POOL = (0, 0)


def peak_bytes(device: torch.device | None = None) -> int:
    """The most that was allocated at once since the allocator's statistics were reset, and what CUDA graphs hold, which
    it does not count: no other tensor can be there. Too much by that if graphs were captured since."""
    number = torch.cuda.current_device() if device is None or device.index is None else device.index
    segments = [its for its in torch.cuda.memory_snapshot() if its["device"] == number]
    held = [its["total_size"] - its["allocated_size"] for its in segments if its["segment_pool_id"] != NO_POOL]
    return torch.cuda.max_memory_allocated(device) + sum(held)
