"""What the last training step kept of the first clip of its batch, as a map over frames, height and width."""

import torch
from torch import Tensor, nn

from ...patching.apply import patched_entries
from ..frames import sampled_frames
from .model import Classifier, Frames


def kept_cells(model: Classifier, frames: int) -> Tensor | None:
    """Return ``[T', H', W']``, 1 where a frame or, in the first sampled block, a position was kept. None if nothing has
    been sampled yet, or if positions are chosen in backward, which does not hold them."""
    body = model.body
    if isinstance(body, Frames) and body.sampling is not None:
        return kept_frames(body, frames)[:, None, None]
    return kept_positions(body, frames)


def kept_frames(body: Frames, frames: int) -> Tensor:
    """Return 1 for frames that gradients reach. A clip alone is sampled like the first of a batch."""
    assert body.sampling is not None
    clip = torch.zeros(1, frames, 1, requires_grad=True)
    with torch.enable_grad():
        seen = sampled_frames(torch.clone, clip, body.sampling, body.step, frames)
    (found,) = torch.autograd.grad(seen, clip, torch.ones_like(seen))
    return found.flatten()


def kept_positions(body: nn.Module, frames: int) -> Tensor | None:
    """Return 1 at kept positions, of one grid over time and space or of a grid for every frame."""
    entry, module = next(patched_entries(body))
    masks, drawn = entry.masks, entry.masks.drawn
    if drawn is None or drawn.sites[0].marks is not None:
        return None
    grid = drawn.grids[masks.sites[0].stage]
    positions = masks.positions_kept(drawn, 0, entry.step(module).device).cpu()
    clip = positions[: 1 if len(grid) == 3 else frames]
    cells = torch.zeros(len(clip), masks.positions(grid)).scatter_(1, clip, 1.0)
    return cells[:, masks.prefix :].reshape(-1, *grid[-2:])
