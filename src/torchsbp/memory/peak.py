"""peak: the memory that training needs on a GPU, as PyTorch's allocator reports it."""

import torch

NO_POOL = (0, 0)


def peak_bytes(device: torch.device | None = None) -> int:
    """Return the most bytes allocated at once since the allocator's statistics were reset, plus what CUDA graphs hold:
    the allocator does not count it, but no other tensor can be there. What graphs that were captured since the reset
    hold may be counted twice."""
    number = torch.cuda.current_device() if device is None or device.index is None else device.index
    segments = [its for its in torch.cuda.memory_snapshot() if its["device"] == number]
    held = [its["total_size"] - its["allocated_size"] for its in segments if its["segment_pool_id"] != NO_POOL]
    return torch.cuda.max_memory_allocated(device) + sum(held)
